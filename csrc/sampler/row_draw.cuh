// The draw: which of a row's kept tokens the random number falls on.
#pragma once

#include <cstdint>

#include "sampler/row_nucleus.cuh"

namespace pagedinfer {
namespace sampling {

template <typename T, bool kAligned>
struct RowDraw : RowNucleus<T, kAligned> {
  using Passes = RowPasses<T, kAligned>;
  using Passes::kVector, Passes::parameters, Passes::row, Passes::scaled, Passes::shared;

  // What a token weighs in the draw.
  __device__ uint64_t drawn_weight(float logit, int column, uint64_t boundary) const {
    const float e = exponential(scaled(logit));
    const bool kept =
        order_code(logit, static_cast<uint32_t>(column)) <= boundary && e >= parameters.min_p;
    return kept ? weight_of(e) : 0;
  }

  // Draws from the kept tokens. One thread of the team gets the token's code, the others kLastCode.
  __device__ uint64_t draw(uint64_t boundary) {
    Team::sync();
    if (warp_index() == 0) choose_stretch();
    __syncthreads();
    const int stretch = shared.drawn_warp;
    if (stretch / kWarps != Team::rank()) return kLastCode;

    // Each warp sums a part of the stretch; the first then looks through the part that was hit.
    const int begin = row.stretch_begin(stretch), end = row.stretch_end(stretch);
    const int each = (row.vectors_a_warp / kWarpSize + kWarps - 1) / kWarps * kWarpSize;
    const int part_begin = begin + warp_index() * each;
    uint64_t sum = 0;
    auto add = [&](int vector, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sum += drawn_weight(x[i], row.first_column(vector) + i, boundary);
      }
    };
    row.template scan<2>(part_begin, min(part_begin + each, end), false, add);
    sum = warp_sum(sum);
    if (lane_index() == 0) shared.scratch[warp_index()] = sum;
    __syncthreads();
    if (warp_index() > 0) return kLastCode;
    uint64_t random = shared.random;
    int part = 0;
    while (random >= shared.scratch[part]) random -= shared.scratch[part++];
    return draw_within(begin + part * each, end, boundary, random);
  }

  // The stretch in which the random number falls, and how far into it. The first warp.
  __device__ void choose_stretch() {
    const int stretches = Team::size() * kWarps;
    constexpr int kEach = kMaxTeam * kWarps / kWarpSize;  // a lane's
    uint64_t weights[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int stretch = lane_index() * kEach + i;
      weights[i] = stretch < stretches
                       ? Team::of(shared.kept_weight[stretch % kWarps], stretch / kWarps).value()
                       : 0;
      sum += weights[i];
    }
    const uint64_t through = warp_prefix_sum(sum);
    const uint64_t total = __shfl_sync(kAllLanes, through, kWarpSize - 1);
    uint64_t random = random_below(total, shared.random_bits);
    if (random < through && random >= through - sum) {
      random -= through - sum;
      bool found = false;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (!found && random < weights[i]) {
          shared.drawn_warp = lane_index() * kEach + i;
          shared.random = random;
          found = true;
        }
        if (!found) random -= weights[i];
      }
    }
  }

  // Walks vectors from `begin` on, 32 at a time, until the running weight exceeds `random`. One
  // warp; the lane that finds the token gets its code.
  __device__ uint64_t draw_within(int begin, int end, uint64_t boundary, uint64_t random) const {
    for (int step = begin; step < end; step += kWarpSize) {
      const int vector = step + lane_index();
      float x[kVector];
      uint64_t weights[kVector], sum = 0;
      row.read(vector, end, x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        weights[i] = drawn_weight(x[i], row.first_column(vector) + i, boundary);
        sum += weights[i];
      }
      const uint64_t through = warp_prefix_sum(sum);
      const uint64_t total = __shfl_sync(kAllLanes, through, kWarpSize - 1);
      if (random >= total) {
        random -= total;
        continue;
      }
      if (random >= through || random < through - sum) return kLastCode;
      random -= through - sum;
      uint64_t code = kLastCode;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (code == kLastCode) {
          if (random < weights[i]) code = order_code(x[i], row.first_column(vector) + i);
          random -= weights[i];
        }
      }
      return code;
    }
    return kLastCode;
  }
};

}  // namespace sampling
}  // namespace pagedinfer
