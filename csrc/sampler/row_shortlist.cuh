// A top-k of few tokens, in one pass over the row: what may be among them is listed while the row
// is read for the first time, and the token is drawn from that list.
#pragma once

#include <cmath>
#include <cstdint>

#include "sampler/row_draw.cuh"

namespace pagedinfer {
namespace sampling {

template <typename T, bool kAligned>
struct RowShortlist : RowDraw<T, kAligned> {
  using Passes = RowPasses<T, kAligned>;
  using Passes::inverse_temperature, Passes::kVector, Passes::largest, Passes::parameters;
  using Passes::row, Passes::scaled, Passes::shared, Passes::sort_codes;

  // A list holds about as many times top_k tokens as the part is longer than its beginning.
  __device__ bool has_shortlist() const {
    if (parameters.top_k > kLongestShortlist) return false;
    const int chunks = max(row.vectors_a_warp / (kChunk * kWarpSize), 1);
    return static_cast<int>(parameters.top_k) * chunks * Team::size() <= kListCapacity * 3 / 4;
  }

  // Lists every token of this block's part of the row that may be one of the row's first top_k, and
  // notes the part's largest logit. The beginning of the part says how far down to list: at least
  // top_k of its tokens lie above `below`, so those that do not are none of the first top_k; and
  // tokens of no weight are left out.
  __device__ void list_candidates(const uint4 (&raw)[kChunk]) {
    float groups[kVector];
    row.largest_of_chunk(raw, groups);
    clear_coarse();
    if (threadIdx.x == 0) shared.list.size = 0;
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < kVector; ++j) most = max_or_nan(most, groups[j]);
    const float top = block_max_or_nan(most, shared.scratch);

    // Masked tokens alone tell nothing: then all others are listed.
    const bool blind = top == -INFINITY;
    const float reference = blind ? 0.0f : top;
    if (!blind) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) count_coarse(groups[j], top);
    }
    const float below = blind ? -INFINITY : z_below(find_depth());
    // No token that is listed has a smaller logit.
    const float drop = below / inverse_temperature;
    const float least = reference + drop - (fabsf(reference) + fabsf(drop)) * 1e-6f;

    float part_largest = -INFINITY;
    row.scan_chunk_and_rest(raw, [&](int vector, const float (&x)[kVector]) {
      float most_here = x[0];
#pragma unroll
      for (int i = 1; i < kVector; ++i) most_here = max_or_nan(most_here, x[i]);
      part_largest = max_or_nan(part_largest, most_here);
      if (most_here < least) return;
      uint32_t listed = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (scaled_logit(x[i], reference, inverse_temperature) > below) listed |= 1u << i;
      }
      shared.list.add(listed, x, row.first_column(vector));
    });
    part_largest = block_max_or_nan(part_largest, shared.scratch);
    if (threadIdx.x == 0) shared.part_largest = part_largest;
  }

  __device__ void clear_coarse() {
    if (threadIdx.x < kCoarseBins) shared.coarse_count[threadIdx.x] = 0;
  }

  // Counts a token, or a group by its largest, in the bin of its z below `top`; not in the last
  // one, in which no token weighs anything.
  __device__ void count_coarse(float logit, float top) {
    const float z = scaled_logit(logit, top, inverse_temperature);
    const float bin = multiply(z, -static_cast<float>(kCoarseBinsPerUnit));
    if (bin < static_cast<float>(kCoarseBins - 1)) {
      atomicAdd(&shared.coarse_count[static_cast<int>(bin)], 1u);
    }
  }

  // How many of the coarse bins hold top_k of what was counted; all but the last if that is less.
  __device__ int find_depth() {
    __syncthreads();
    if (warp_index() == 0) {
      constexpr int kEach = kCoarseBins / kWarpSize;
      uint32_t counts[kEach], sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        sum += counts[i] = shared.coarse_count[lane_index() * kEach + i];
      }
      uint32_t through = sum;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, through, offset);
        if (lane_index() >= offset) through += other;
      }
      const auto wanted = static_cast<uint32_t>(parameters.top_k);
      if (lane_index() == kWarpSize - 1 && through < wanted) shared.depth = kCoarseBins - 1;
      if (through >= wanted && through - sum < wanted) {
        uint32_t missing = wanted - (through - sum);
        int bin = lane_index() * kEach;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (missing > counts[i]) {
            missing -= counts[i];
            ++bin;
          } else {
            missing = 0;
          }
        }
        shared.depth = bin + 1;
      }
    }
    __syncthreads();
    return shared.depth;
  }

  // The z above which those bins lie.
  static __device__ float z_below(int depth) {
    return -static_cast<float>(depth) / kCoarseBinsPerUnit;
  }

  // How many tokens the team's lists hold, or -1 if some found no room. After a barrier of the
  // team.
  __device__ int listed() const {
    const int size = sum_over_team<int>(shared.list.size);
    return size <= kListCapacity ? size : -1;
  }

  // Draws from the merged list, in one block alone. One thread gets the token's code, the others
  // kLastCode. `largest` is the row's.
  __device__ uint64_t draw_listed(int size) {
    // Most are no more than candidates of their block: the best of all go back into the list.
    clear_coarse();
    if (threadIdx.x == 0) shared.list.size = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += kThreads) {
      count_coarse(logit_of_code(shared.merged[i]), largest);
    }
    const float below = z_below(find_depth());
    for (int i = threadIdx.x; i < size; i += kThreads) {
      const uint64_t code = shared.merged[i];
      if (scaled(logit_of_code(code)) > below) shared.list.add(code);
    }
    __syncthreads();
    const int listed = shared.list.size;
    sort_codes(shared.list.codes, listed);
    const int kept = min(listed, static_cast<int>(parameters.top_k));
    const int i = static_cast<int>(threadIdx.x);
    const uint64_t code = i < kept ? shared.list.codes[i] : kLastCode;
    const float e = i < kept ? exponential(scaled(logit_of_code(code))) : 0.0f;
    uint64_t weight = i < kept ? weight_of(e) : 0;
    if (parameters.has_top_p) {
      const uint64_t before = block_sum_before(weight, shared.scratch);
      if (threadIdx.x == kThreads - 1) shared.listed_total = before + weight;
      __syncthreads();
      if (before >= top_p_target(shared.listed_total, parameters.top_p)) weight = 0;
    }
    if (e < parameters.min_p) weight = 0;
    if (i < kept) shared.kept[i] = {weight, id_of_code(code)};
    const uint64_t total = block_sum(weight, shared.scratch);
    const uint64_t random = random_below(total, shared.random_bits);

    // The tokens of smaller ids come before this one.
    if (weight == 0) return kLastCode;
    uint64_t before = 0;
    for (int j = 0; j < kept; ++j) {
      const KeptToken other = shared.kept[j];
      before += other.id < id_of_code(code) ? other.weight : 0;
    }
    return random >= before && random < before + weight ? code : kLastCode;
  }
};

}  // namespace sampling
}  // namespace pagedinfer
