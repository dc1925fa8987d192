// sample_tokens on the GPU: see sample_tokens.h for the maths and the tensors.
//
// Grid: a team of 1, 2, 4 or 8 blocks per row (a cluster; always 1 before sm_90), the more the
// fewer rows there are. A row's passes read it from device memory once and then mostly from L2:
//
//   greedy      1 pass: the first of the order
//   otherwise   1 pass: the largest logit of every thread's columns, and of the row
//   top-k, or top-p that leaves few tokens
//               1 pass: the tokens at the top into a list, as far down as those largest logits show
//               to be enough; the list is sorted and cut
//   any other   1 pass: counts and weights by bins, which tell in which bin the boundary lies;
//   crowded
//               bins are narrowed, 1 pass a digit (only where thousands of logits tie or nearly so)
//               1 pass: that bin's tokens into the list, and the weights of all before them
//   the draw    from the weights of each warp's stretch of the row; only one stretch is read again
//
// Shared memory: 43 KB a block. Row strides and addresses are free. Padding rows (slot -1) return
// at once. Invariants: whatever decides is an integer or a comparison, so that neither the team's
// size nor timing shows in the result; a barrier of the team (Team::sync) lies between a block's
// last read of another's shared memory and the next write there.
#include <cmath>

#include "sampler/row_draw.cuh"
#include "sampler/sample_tokens_cuda.h"
#include "sampler/team_launch.cuh"

namespace pagedinfer {

namespace {

using namespace sampling;

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    sample_tokens_kernel(const __grid_constant__ SampleTokensParams p) {
  __shared__ Shared shared;
  const int64_t r = blockIdx.x / Team::size();
  const bool is_first_thread = Team::rank() == 0 && threadIdx.x == 0;
  auto write = [&](int64_t id, float logprob) {
    p.token_ids[r] = id;
    if (p.logprobs != nullptr) p.logprobs[r] = logprob;
  };
  const int32_t slot = p.slots[r];
  if (slot < 0 || slot >= p.num_slots) {
    if (is_first_thread) write(-1, 0.0f);
    return;
  }

  if (threadIdx.x == 0) {
    shared.parameters =
        row_parameters(p.temperature[slot], p.top_k[slot], p.top_p[slot], p.min_p[slot],
                       p.seeds[slot], p.positions[slot], p.vocab_size);
  }
  __syncthreads();
  const T* logits = static_cast<const T*>(p.logits) + r * p.row_stride;
  RowDraw<T, kAligned> sampler{{{{logits, static_cast<int>(p.vocab_size)},
                                 shared,
                                 shared.parameters,
                                 shared.parameters.inverse_temperature,
                                 0.0f,
                                 false}}};
  const bool greedy = shared.parameters.greedy;
  uint64_t first = 0;
  float groups[sampler.kVector];
  if (greedy) {
    first = sampler.find_first();
    sampler.largest = logit_of_code(first);
  } else {
    sampler.largest = sampler.find_largest(groups);
  }
  if (!isfinite(sampler.largest)) {
    if (is_first_thread) write(-1, NAN);
  } else {
    const uint64_t raw_total = p.logprobs == nullptr ? 0 : sampler.find_raw_total();
    auto write_drawn = [&](uint64_t code) {
      const float logprob = p.logprobs == nullptr
                                ? 0.0f
                                : log_probability(logit_of_code(code), sampler.largest, raw_total);
      write(id_of_code(code), logprob);
    };
    if (!greedy) {
      sampler.draw(sampler.find_boundary(groups), write_drawn);
    } else if (is_first_thread) {
      write_drawn(first);
    }
  }
  Team::sync();  // no block leaves while another may look at its shared memory
}

template <typename T>
cudaError_t launch(const SampleTokensParams& params, cudaStream_t stream) {
  const bool aligned = rows_are_aligned<T>(params.logits, params.row_stride, params.vocab_size);
  return launch_teams(aligned ? sample_tokens_kernel<T, true> : sample_tokens_kernel<T, false>,
                      params, params.num_rows, params.vocab_size * sizeof(T), stream);
}

}  // namespace

cudaError_t launch_sample_tokens(const SampleTokensParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::float32:
      return launch<float>(params, stream);
    case DType::float16:
      return launch<Float16>(params, stream);
    case DType::bfloat16:
      return launch<BFloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace pagedinfer
