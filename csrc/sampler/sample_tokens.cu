// sample_tokens on the GPU: see sample_tokens.h for the maths and the tensors.
//
// Grid: a team of 1, 2, 4 or 8 blocks per row (a cluster; always 1 before sm_90), the more the
// fewer rows there are. A row's passes read it from device memory once and then mostly from L2:
//
//   greedy      1 pass: the first of the order
//   short top-k 1 pass: the tokens that may be among the first k into a list, from which the token
//               is drawn (row_shortlist.cuh)
//   top-p alone 2 passes: an estimate of the boundary, and its proof (row_nucleus.cuh)
//   otherwise   1 pass: the largest logit of every thread's columns, and of the row; then
//     no filter 1 pass: the weights
//     top-k     1 pass: the tokens at the top into a list, as far down as those largest logits show
//               to be enough; the list is sorted and cut (row_boundary.cuh)
//   a longer top-k, and where a list is too small or an estimate wrong, is searched:
//               1 pass: counts or weights by bins, which tell in which bin the boundary lies;
//               crowded bins are narrowed, 1 pass a digit (only where thousands of logits tie or
//               nearly so)
//               1 pass: that bin's tokens into the list, and the weights of all before them
//   the draw    from the weights of each warp's stretch of the row; only one stretch is read again
//
// Shared memory: 44 KB a block. Registers: 64 a thread, so that two blocks fit a multiprocessor;
// what is needed only at the end waits in shared memory, so that none is spilled. Row strides and
// addresses are free. Padding rows (slot -1) return at once. The launch is dependent
// (dependent_launch.cuh), so no load of logits may be one through the non-coherent cache, which
// compilers move.
//
// Invariants: whatever decides is an integer or a comparison, so that neither the team's size nor
// timing shows in the result; a barrier of the team (Team::sync) lies between a block's last read
// of another's shared memory and the next write there.
#include <cmath>

#include "common/dependent_launch.cuh"
#include "common/element_type.cuh"
#include "sampler/change_logits_cuda.h"
#include "sampler/row_shortlist.cuh"
#include "sampler/sample_tokens_cuda.h"
#include "sampler/team_launch.cuh"
#include "sampler/top_logprobs_cuda.h"

namespace pagedinfer {

namespace {

using namespace sampling;

// Samples the rows whose slot changes its logits, or the others, padding among them.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    sample_tokens_kernel(const __grid_constant__ SampleTokensParams p) {
  begin_dependent();
  __shared__ Shared shared;
  const int64_t r = blockIdx.x / Team::size();
  const Row<T, kAligned> row(static_cast<const T*>(p.logits) + r * p.row_stride,
                             static_cast<int>(p.vocab_size));
  const int32_t slot = p.slots[r];
  if (is_changed(p.changes.kinds, slot, p.num_slots) != p.of_changed_rows) return;
  const bool is_first_thread = Team::rank() == 0 && threadIdx.x == 0;
  auto write = [&](int64_t id, float logprob) {
    p.token_ids[r] = id;
    if (p.logprobs != nullptr) p.logprobs[r] = logprob;
  };
  if (slot < 0 || slot >= p.num_slots) {
    if (is_first_thread) write(-1, 0.0f);
    return;
  }
  uint4 raw[kChunk];
  row.load_chunk(raw);  // on its way together with the parameters

  if (threadIdx.x == 0) {
    shared.parameters =
        row_parameters(p.temperature[slot], p.top_k[slot], p.top_p[slot], p.min_p[slot],
                       p.seeds[slot], p.positions[slot], p.vocab_size);
  } else if (threadIdx.x == kWarpSize) {
    shared.random_bits =
        random_bits(static_cast<uint64_t>(p.seeds[slot]), static_cast<uint64_t>(p.positions[slot]));
  }
  __syncthreads();
  const bool rated = !p.of_changed_rows && is_rated(p, slot);  // those are rated by another kernel
  RowShortlist<T, kAligned> sampler{
      {{{{row, shared, shared.parameters, shared.parameters.inverse_temperature, 0.0f, false}}}}};

  // The first pass over the row, by what the row needs.
  const bool greedy = shared.parameters.greedy;
  const bool shortlist = !greedy && sampler.has_shortlist();
  const bool nucleus = !greedy && sampler.has_nucleus();
  uint64_t first = 0;
  float groups[sampler.kVector];
  if (greedy) {
    first = sampler.find_first(raw);
    sampler.largest = logit_of_code(first);
  } else if (shortlist || nucleus) {
    if (shortlist) {
      sampler.list_candidates(raw);
    } else {
      sampler.measure_mass(raw);
    }
    Team::sync();
    sampler.largest = sampler.largest_of_parts();
  } else {
    sampler.largest = sampler.find_largest(raw, groups);
  }

  if (!isfinite(sampler.largest)) {
    if (is_first_thread) write(-1, NAN);
    Team::sync();  // no block leaves while another may look at its shared memory
    return;
  }
  if (rated) sampler.find_raw_total();
  auto finish = [&](uint64_t drawn) {  // the one thread that has a token
    if (drawn == kLastCode) return;
    const float logprob =
        rated ? log_probability(logit_of_code(drawn), sampler.largest, shared.row_raw_total) : 0.0f;
    write(id_of_code(drawn), logprob);
    if (p.of_changed_rows) count_token(p.changes, slot, id_of_code(drawn));
  };

  if (greedy) {
    if (is_first_thread) finish(first);
    Team::sync();
    return;
  }
  const int listed = shortlist ? sampler.listed() : -1;
  if (listed >= 0) {
    const bool draws = Team::rank() == static_cast<int>(r % Team::size());
    if (draws) sampler.merge_lists(shared.list, shared.merged);
    Team::sync();  // from here on no block looks at another's shared memory
    if (draws) finish(sampler.draw_listed(listed));
    return;
  }
  uint64_t boundary = kLastCode;
  const bool found = nucleus      ? sampler.find_nucleus(&boundary)
                     : !shortlist ? sampler.find_boundary(groups, &boundary)
                                  : false;
  if (!found) boundary = sampler.search_filters();
  finish(sampler.draw(boundary));
  Team::sync();
}

template <typename T>
cudaError_t launch(const SampleTokensParams& params, cudaStream_t stream) {
  const bool aligned = rows_are_aligned<T>(params.logits, params.row_stride, params.vocab_size);
  return launch_teams(aligned ? sample_tokens_kernel<T, true> : sample_tokens_kernel<T, false>,
                      params, params.num_rows, params.vocab_size * sizeof(T), stream);
}

cudaError_t launch_of_dtype(const SampleTokensParams& params, cudaStream_t stream) {
  return with_element_type<Float16, BFloat16>(
      params.dtype, [&]<typename T>() { return launch<T>(params, stream); });
}

}  // namespace

cudaError_t launch_sample_tokens(const SampleTokensParams& params, cudaStream_t stream) {
  cudaError_t status = launch_of_dtype(params, stream);
  if (status != cudaSuccess || params.changes.kinds == nullptr) return status;

  // Rows that change: their new logits, tokens from those, log-probabilities from the old ones.
  status = launch_change_logits(params.changes, stream);
  if (status != cudaSuccess) return status;
  SampleTokensParams changed = params;
  changed.logits = params.changes.changed;
  changed.row_stride = params.changes.changed_stride;
  changed.dtype = DType::float32;
  changed.of_changed_rows = true;
  status = launch_of_dtype(changed, stream);
  if (status != cudaSuccess || params.logprobs == nullptr) return status;
  const TopLogprobsParams logprobs{
      .logits = params.logits,
      .token_ids = params.token_ids,
      .logprobs = params.logprobs,
      .ranks = nullptr,
      .top_ids = nullptr,
      .top_logprobs = nullptr,
      .row_stride = params.row_stride,
      .num_rows = params.num_rows,
      .vocab_size = params.vocab_size,
      .num_top = 0,
      .dtype = params.dtype,
      .slots = params.slots,
      .kinds = params.changes.kinds,
      .wants_logprob = params.wants_logprob,
      .num_slots = params.num_slots,
  };
  return launch_top_logprobs(logprobs, stream);
}

}  // namespace pagedinfer
