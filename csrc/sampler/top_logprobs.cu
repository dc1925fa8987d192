// top_logprobs on the GPU: see top_logprobs.h for the maths and the tensors.
//
// Grid: a team of blocks per row, as in sample_tokens.cu. Passes over a row: its largest logit; the
// tokens at the top, which give the boundary after the first num_top (more passes only for many
// ties, or if hardly any token has a probability to speak of); then, in one, the sum of weights,
// the token's rank and the list of the tokens up to the boundary. Shared memory: 44 KB a block. The
// launch is dependent (dependent_launch.cuh).
#include <cmath>

#include "common/dependent_launch.cuh"
#include "common/element_type.cuh"
#include "sampler/change_logits.h"
#include "sampler/row_boundary.cuh"
#include "sampler/team_launch.cuh"
#include "sampler/top_logprobs_cuda.h"

namespace pagedinfer {

namespace {

using namespace sampling;

template <typename T, bool kAligned>
struct RowLogprobs : RowBoundary<T, kAligned> {
  using Passes = RowPasses<T, kAligned>;
  using Passes::kVector, Passes::row, Passes::shared;

  // The last of the first `count` tokens; kLastCode if no more than those have a finite logit.
  __device__ uint64_t find_last_of(uint64_t count, const float (&groups)[kVector]) {
    if (count == 0 || count >= static_cast<uint64_t>(row.vocab_size)) return kLastCode;
    uint64_t boundary;
    if (this->find_boundary(groups, &boundary)) {
      if (boundary != kLastCode) return boundary;
      this->inverse_temperature = 0.0f;
    }
    // Where too few tokens weigh anything, they are told apart by their logits' digits, with all in
    // one bin.
#pragma unroll 1  // one copy of the search's code
    for (;;) {
      boundary = this->search({Need::Of::count, count}, kLastCode);
      if (boundary != kLastCode || this->inverse_temperature == 0.0f) return boundary;
      this->inverse_temperature = 0.0f;
    }
  }

  struct Sums {
    uint64_t total;  // of the weights at temperature 1
    uint64_t rank;   // of the token, from 1
  };

  // Lists the tokens up to `last`.
  __device__ Sums sum_and_list(uint64_t token_code, uint64_t last, bool listing) {
    Team::sync();
    this->clear_list();
    uint64_t total = 0, before = 0;
    // A token of -inf is ranked among others of -inf, but not among the columns that only look so.
    const int end = row.stretch_end(Team::rank() * kWarps + warp_index());
    row.scan_stretch(this->turn(), [&](int vector, const float (&x)[kVector]) {
      uint32_t listed = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        total += weight_of(exponential(scaled_logit(x[i], this->largest, 1.0f)));
        const uint64_t code = order_code(x[i], row.first_column(vector) + i);
        before += code < token_code && vector < end;
        if (listing && code <= last && x[i] > -INFINITY) listed |= 1u << i;
      }
      shared.list.add(listed, x, row.first_column(vector));
    });
    total = this->team_sum(total, shared.raw_total);
    return {total, this->team_sum(before, shared.rank) + 1};
  }
};

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    top_logprobs_kernel(const __grid_constant__ TopLogprobsParams p) {
  begin_dependent();
  __shared__ Shared shared;
  const int64_t r = blockIdx.x / Team::size();
  auto write_nothing = [&] {
    if (Team::rank() != 0) return;
    if (threadIdx.x == 0) {
      p.logprobs[r] = NAN;
      if (p.ranks != nullptr) p.ranks[r] = 0;
    }
    for (int64_t i = threadIdx.x; i < p.num_top; i += kThreads) {
      p.top_ids[r * p.num_top + i] = -1;
      p.top_logprobs[r * p.num_top + i] = NAN;
    }
  };
  if (p.kinds != nullptr) {
    const int32_t slot = p.slots[r];
    if (!is_changed(p.kinds, slot, p.num_slots)) return;
    if (p.wants_logprob != nullptr && !p.wants_logprob[slot]) return;
  }
  if (p.token_ids[r] < 0 || p.token_ids[r] >= p.vocab_size) {
    write_nothing();
    return;
  }

  if (threadIdx.x == 0) {
    shared.parameters =
        row_parameters(1.0f, static_cast<int32_t>(p.num_top), 1.0f, 0.0f, 0, 0, p.vocab_size);
  }
  __syncthreads();
  const T* logits = static_cast<const T*>(p.logits) + r * p.row_stride;
  RowLogprobs<T, kAligned> sampler{
      {{{logits, static_cast<int>(p.vocab_size)}, shared, shared.parameters, 1.0f, 0.0f, false}}};
  float groups[sampler.kVector];
  uint4 raw[kChunk];
  sampler.row.load_chunk(raw);
  sampler.largest = sampler.find_largest(raw, groups);
  if (!isfinite(sampler.largest)) {
    write_nothing();
    Team::sync();  // no block leaves while another may look at its shared memory
    return;
  }
  const uint64_t last = sampler.find_last_of(p.num_top, groups);
  const int64_t token = p.token_ids[r];  // read again: kept since then, it would be spilled
  const uint64_t token_code =
      order_code(sampler.row.logit(static_cast<int>(token)), static_cast<uint32_t>(token));
  if (threadIdx.x == 0) shared.token_logit = logit_of_code(token_code);
  const auto sums = sampler.sum_and_list(token_code, last, p.num_top > 0);
  if (Team::rank() == 0 && threadIdx.x == 0) {
    p.logprobs[r] = log_probability(shared.token_logit, sampler.largest, sums.total);
    if (p.ranks != nullptr) p.ranks[r] = static_cast<int64_t>(sums.rank);
  }
  const int size = sampler.merge_lists(shared.list, shared.merged);
  Team::sync();  // from here on no block looks at another's shared memory
  if (Team::rank() != 0) return;
  sampler.sort_codes(shared.merged, size);
  for (int64_t i = threadIdx.x; i < p.num_top; i += kThreads) {
    const uint64_t code = shared.merged[i < size ? i : 0];
    p.top_ids[r * p.num_top + i] = i < size ? static_cast<int64_t>(id_of_code(code)) : -1;
    p.top_logprobs[r * p.num_top + i] =
        i < size ? log_probability(logit_of_code(code), sampler.largest, sums.total) : -INFINITY;
  }
}

template <typename T>
cudaError_t launch(const TopLogprobsParams& params, cudaStream_t stream) {
  const bool aligned = rows_are_aligned<T>(params.logits, params.row_stride, params.vocab_size);
  return launch_teams(aligned ? top_logprobs_kernel<T, true> : top_logprobs_kernel<T, false>,
                      params, params.num_rows, params.vocab_size * sizeof(T), stream);
}

}  // namespace

cudaError_t launch_top_logprobs(const TopLogprobsParams& params, cudaStream_t stream) {
  return with_element_type<Float16, BFloat16>(
      params.dtype, [&]<typename T>() { return launch<T>(params, stream); });
}

}  // namespace pagedinfer
