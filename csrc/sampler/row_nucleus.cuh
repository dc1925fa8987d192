// A top-p without a top-k, in two passes over the row. The first estimates how the weight is spread
// and from that where the boundary is; the second sums the weights exactly, lists the tokens around
// that place, and so proves or refutes the estimate. Refuted, the row is searched:
// row_boundary.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "sampler/row_boundary.cuh"

namespace pagedinfer {
namespace sampling {

// 2^x, the hardware's: good enough to estimate with, and the same on all blocks of a team.
__device__ inline float estimated_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Tokens fall into bins by e = 2^(x * scale - top), e < 1: eight to an octave, the first at the
// top. What a bin holds are the leading 12 bits of the mantissas; the bin tells the exponent.
struct MassBin {
  int bin;  // kMassBins and more: too far down
  uint32_t mantissa;
};

__device__ inline MassBin mass_bin(float x, float scale, float top) {
  constexpr uint32_t kLast = 0x3f7fffffu;  // of the floats below 1
  const uint32_t bits = min(bits_of(estimated_exp2(fused_multiply_add(x, scale, -top))), kLast);
  return {static_cast<int>((kLast - bits) >> 20), (bits >> 12 & 0x7ffu) | 0x800u};
}

// The upper edge of a bin.
__device__ inline float mass_bin_edge(int bin) {
  return float_of(0x3f800000u - (static_cast<uint32_t>(bin) << 20));
}

// The least `top` for which e < 1, whole, so that bins of different tops are the same but for
// octaves.
__device__ inline float mass_top(float largest, float scale) {
  return floorf(largest * scale) + 1.0f;
}

template <typename T, bool kAligned>
struct RowNucleus : RowBoundary<T, kAligned> {
  using Passes = RowPasses<T, kAligned>;
  using Passes::clear_list, Passes::cut_list, Passes::inverse_temperature, Passes::kVector;
  using Passes::largest, Passes::parameters, Passes::row, Passes::scaled, Passes::shared;
  using Passes::merge_lists, Passes::sort_codes, Passes::turn, Passes::weigh_listed;

  __device__ bool has_nucleus() const {
    return parameters.has_top_p && parameters.top_k >= row.vocab_size;
  }

  __device__ float mass_scale() const { return inverse_temperature * 0x1.715476p+0f; }

  // The first pass. Leaves the spread of this block's part in shared.mass, and its largest logit.
  // The beginning of the part gives the reference; the few tokens above it are listed.
  __device__ void measure_mass(const uint4 (&raw)[kChunk]) {
    float groups[kVector], most = -INFINITY;
    row.largest_of_chunk(raw, groups);
#pragma unroll
    for (int i = 0; i < kVector; ++i) most = max_or_nan(most, groups[i]);
    for (int i = threadIdx.x; i < kMassBins * kWarpSize; i += kThreads) shared.mass_of_lanes[i] = 0;
    if (threadIdx.x < kMassBins) shared.mass[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.list.size = 0;
    const float reference = block_max_or_nan(most, shared.scratch);
    const float scale = mass_scale(), top = mass_top(reference, scale);

    float part_largest = -INFINITY;
    row.scan_chunk_and_rest(raw, [&](int vector, const float (&x)[kVector]) {
      float most_here = x[0];
#pragma unroll
      for (int i = 1; i < kVector; ++i) most_here = max_or_nan(most_here, x[i]);
      part_largest = max_or_nan(part_largest, most_here);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const MassBin place = mass_bin(x[i], scale, top);
        // A lane adds to a word in a bank of its own.
        if (place.bin < kMassBins && !(x[i] > reference)) {
          atomicAdd(&shared.mass_of_lanes[place.bin * kWarpSize + lane_index()], place.mantissa);
        }
      }
      if (!(most_here > reference)) return;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (x[i] > reference) shared.list.add(order_code(x[i], row.first_column(vector) + i));
      }
    });
    part_largest = block_max_or_nan(part_largest, shared.scratch);

    // The same below the part's largest.
    const float part_top = mass_top(part_largest, scale);
    const float shift = (part_top - top) * kMassBinsPerOctave;
    for (int bin = warp_index(); bin < kMassBins; bin += kWarps) {
      const uint32_t sum =
          __reduce_add_sync(kAllLanes, shared.mass_of_lanes[bin * kWarpSize + lane_index()]);
      if (lane_index() == 0 && shift < static_cast<float>(kMassBins - bin)) {
        shared.mass[bin + static_cast<int>(shift)] = sum;
      }
    }
    __syncthreads();
    const int size = shared.list.size;
    for (int i = threadIdx.x; i < min(size, kListCapacity); i += kThreads) {
      const MassBin place = mass_bin(logit_of_code(shared.list.codes[i]), scale, part_top);
      if (place.bin < kMassBins) atomicAdd(&shared.mass[place.bin], place.mantissa);
    }
    if (threadIdx.x == 0) {
      shared.part_largest = part_largest;
      shared.part_top = size <= kListCapacity ? part_top : NAN;
    }
  }

  // Where the boundary probably is: in `window`, the tokens with from <= z <= to. False if there is
  // nothing to guess from. After a barrier of the team that follows measure_mass; `largest` is
  // known.
  __device__ bool guess_window(float* from, float* to) {
    const float top = mass_top(largest, mass_scale());
    float part_tops[kMaxTeam];
    gather(shared.part_top, -INFINITY, part_tops);
    bool known = true;
#pragma unroll
    for (const float part_top : part_tops) known = known && !isnan(part_top);
    if (threadIdx.x < kMassBins) {
      const int bin = static_cast<int>(threadIdx.x);
      uint32_t masses[kMaxTeam], sum = 0;
#pragma unroll
      for (int rank = 0; rank < kMaxTeam; ++rank) {
        const float part_bin = bin - (top - part_tops[rank]) * kMassBinsPerOctave;
        const bool there = part_bin >= 0.0f && rank < Team::size();
        masses[rank] =
            Team::of(shared.mass[there ? static_cast<int>(part_bin) : 0], there ? rank : 0);
        if (!there) masses[rank] = 0;
      }
#pragma unroll
      for (const uint32_t mass : masses) sum += mass;
      shared.team_mass[bin] = sum;
    }
    __syncthreads();
    if (warp_index() == 0) place_window(top);
    __syncthreads();
    *from = shared.window_from;
    *to = shared.window_to;
    return known;
  }

  // By the first warp: estimates how many tokens come before the boundary, and takes as the window
  // the tokens whose estimated rank is near that.
  __device__ void place_window(float top) {
    constexpr int kEach = kMassBins / kWarpSize;
    float masses[kEach], counts[kEach], mass = 0.0f, count = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int bin = lane_index() * kEach + i;
      const float sum = static_cast<float>(shared.team_mass[bin]);
      masses[i] = sum * float_of((127u - bin / kMassBinsPerOctave) << 23);  // times 2^-octave
      counts[i] =
          sum / static_cast<float>(0xf80 - 0x100 * (bin % kMassBinsPerOctave));  // mean mantissa
      mass += masses[i];
      count += counts[i];
    }
    float mass_before = mass, count_before = count;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const float other_mass = __shfl_up_sync(kAllLanes, mass_before, offset);
      const float other_count = __shfl_up_sync(kAllLanes, count_before, offset);
      if (lane_index() >= offset) {
        mass_before += other_mass;
        count_before += other_count;
      }
    }
    const float all_mass = __shfl_sync(kAllLanes, mass_before, kWarpSize - 1);
    const float all_count = __shfl_sync(kAllLanes, count_before, kWarpSize - 1);
    mass_before -= mass;
    count_before -= count;

    const float wanted = all_mass * (static_cast<float>(parameters.top_p) * 0x1p-32f);
    float rank = all_count, width = 0.0f, mass_here = mass_before, count_here = count_before;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!found && wanted > mass_here && wanted <= mass_here + masses[i]) {
        rank = count_here + counts[i] * ((wanted - mass_here) / masses[i]);
        width = counts[i];
        found = true;
      }
      mass_here += masses[i];
      count_here += counts[i];
    }
    const unsigned finders = __ballot_sync(kAllLanes, found);
    if (finders != 0) {
      rank = __shfl_sync(kAllLanes, rank, __ffs(static_cast<int>(finders)) - 1);
      width = __shfl_sync(kAllLanes, width, __ffs(static_cast<int>(finders)) - 1);
    }
    width = fminf(fmaxf(1.5f * width, kNarrowestWindow), kWidestWindow);

    if (lane_index() == 0) {
      shared.window_to = 0.0f;
      shared.window_from = z_of(mass_bin_edge(kMassBins), top);
    }
    __syncwarp();
    count_here = count_before;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float through = count_here + counts[i];
      if (rank - width > count_here && rank - width <= through) {
        shared.window_to =
            z_within(lane_index() * kEach + i, (rank - width - count_here) / counts[i], top);
      }
      if (rank + width > count_here && rank + width <= through) {
        shared.window_from =
            z_within(lane_index() * kEach + i, (rank + width - count_here) / counts[i], top);
      }
      count_here = through;
    }
  }

  // z of e, and of what lies that share of the way down a bin.
  __device__ float z_of(float e, float top) const {
    return (log2f(e) + fused_multiply_add(-largest, mass_scale(), top)) * 0x1.62e43p-1f;
  }
  __device__ float z_within(int bin, float share, float top) const {
    const float upper = mass_bin_edge(bin), lower = mass_bin_edge(bin + 1);
    return z_of(upper - (upper - lower) * share, top);
  }

  // The second pass: the last token that top-p keeps. False if it does not lie in the window, or
  // the window holds too many tokens. Leaves in kept_weight what each stretch's kept tokens weigh.
  __device__ bool find_within(float from, float to, uint64_t* boundary) {
    clear_list();
    const float min_p = parameters.min_p;
    uint64_t below = 0, above = 0, kept = 0;
    row.scan_stretch(turn(), [&](int vector, const float (&x)[kVector]) {
      uint32_t listed = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float z = scaled(x[i]);
        const float e = exponential(z);
        const uint64_t weight = weight_of(e);
        if (z > to) {
          above += weight;
          if (e >= min_p) kept += weight;
        } else {
          below += weight;
          if (z >= from) listed |= 1u << i;
        }
      }
      shared.list.add(listed, x, row.first_column(vector));
    });
    kept = warp_sum(kept);
    if (lane_index() == 0) shared.kept_weight[warp_index()].set(kept);
    above = block_sum(above, shared.scratch);
    below = block_sum(below, shared.scratch);
    if (threadIdx.x == 0) {
      shared.above_total = above;
      shared.below_total = below;
    }
    Team::sync();

    above = sum_over_team<uint64_t>(shared.above_total);
    const uint64_t total = above + sum_over_team<uint64_t>(shared.below_total);
    const uint64_t target = top_p_target(total, parameters.top_p);
    if (target <= above) return false;
    const int size = merge_lists(shared.list, shared.merged);
    if (size > kListCapacity) return false;
    *boundary = cut_window(size, target - above, from, to);
    return *boundary != kLastCode;
  }

  // The last token of the shortest part of the merged list that weighs at least `need`; kLastCode
  // if the whole list does not. Adds the tokens up to it to the weights of the stretches they are
  // from. Of parts of the list, by z, only the one in which the boundary turns out to lie is
  // sorted.
  __device__ uint64_t cut_window(int size, uint64_t need, float from, float to) {
    constexpr int kEach = kListCapacity / kThreads;
    const float parts_per_unit = kThreads / fmaxf(to - from, 1e-6f);
    uint64_t codes[kEach];
    int parts[kEach];
    shared.part_weight[threadIdx.x].set(0);
    if (threadIdx.x == 0) {
      shared.crossing_part = -1;
      shared.num_crossing = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int place = threadIdx.x + i * kThreads;
      parts[i] = kThreads;
      if (place >= size) continue;
      codes[i] = shared.merged[place];
      const float z = scaled(logit_of_code(codes[i]));
      parts[i] = min(static_cast<int>((to - z) * parts_per_unit), kThreads - 1);
      shared.part_weight[parts[i]].add(weight_of(exponential(z)));
    }
    __syncthreads();
    const uint64_t weight = shared.part_weight[threadIdx.x].value();
    const uint64_t before = block_sum_before(weight, shared.scratch);
    if (before < need && before + weight >= need) {
      shared.crossing_part = static_cast<int>(threadIdx.x);
      shared.crossing_need = need - before;
    }
    __syncthreads();
    const int crossing = shared.crossing_part;
    if (crossing < 0) return kLastCode;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (parts[i] < crossing) this->weigh_token(codes[i]);
      if (parts[i] == crossing) shared.merged[atomicAdd(&shared.num_crossing, 1)] = codes[i];
    }
    __syncthreads();
    const int num_crossing = shared.num_crossing;
    sort_codes(shared.merged, num_crossing);
    const uint64_t boundary = cut_list(num_crossing, shared.crossing_need);
    weigh_listed(num_crossing, boundary);
    return boundary;
  }

  // The last token that top-p keeps, in `boundary`, after measure_mass and a barrier of the team.
  // False if the row has to be searched for it.
  __device__ bool find_nucleus(uint64_t* boundary) {
    float from, to;
    return guess_window(&from, &to) && find_within(from, to, boundary);
  }
};

}  // namespace sampling
}  // namespace pagedinfer
