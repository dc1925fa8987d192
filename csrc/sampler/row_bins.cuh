// Histograms over a team's row: how many tokens lie in each bin and what they weigh, and the bin in
// which a need is met. Each block counts its own part of the row; a cut looks at all of them.
#pragma once

#include <cstdint>

#include "sampler/team.cuh"
#include "sampler/token_order.h"

namespace pagedinfer {
namespace sampling {

constexpr int kSections = kNumBins / kWarpSize;  // of 32 bins

struct Bins {
  SharedSum weight[kNumBins];
  uint32_t count[kNumBins];
  uint64_t section_weight[kSections];
  uint32_t section_count[kSections];

  __device__ void clear() {
    for (int bin = threadIdx.x; bin < kNumBins; bin += kThreads) {
      weight[bin].set(0);
      count[bin] = 0;
    }
    __syncthreads();
  }

  __device__ void add_count(int bin) { atomicAdd(&count[bin], 1u); }
  __device__ void add_weight(int bin, uint64_t token_weight) { weight[bin].add(token_weight); }
};

// What a cut through the order must have before it and in it: so many tokens, or so much weight, or
// a share of the total weight in units of 2^-32.
struct Need {
  enum class Of { count, weight, share } of;
  uint64_t amount;  // >= 1, unless a share

  __device__ uint64_t amount_of(uint64_t total_weight) const {
    return of == Of::share ? top_p_target(total_weight, amount) : amount;
  }
};

// Where a cut through the bins falls.
struct BinCut {
  int bin;                  // kNumBins: all of them together do not meet the need
  uint64_t need;            // what the bins before it leave of the need
  uint64_t weight_through;  // of the bins up to it, that bin included
  uint64_t total_weight;
};

// Finds the first of 32 lanes at which the running sum of `amount` reaches the need, 32 if none
// does; takes the lanes before it off the need.
__device__ inline int cut_lanes(uint64_t amount, uint64_t* need) {
  const uint64_t prefix = warp_prefix_sum(amount);
  const unsigned reached = __ballot_sync(kAllLanes, prefix >= *need);
  const int lane = reached == 0 ? kWarpSize : __ffs(static_cast<int>(reached)) - 1;
  const uint64_t before = prefix - amount;
  *need -= lane == kWarpSize ? __shfl_sync(kAllLanes, prefix, kWarpSize - 1)
                             : __shfl_sync(kAllLanes, before, lane);
  return lane;
}

// Cuts the team's bins. All threads call this once they have added their tokens' counts (or
// weights, as the need has it), and get the same answer, through `shared`. The bins may be cleared
// again after the next barrier of the team.
static __device__ __noinline__ BinCut cut_bins(Bins& bins, const Need& need, BinCut& shared) {
  __syncthreads();
  for (int section = warp_index(); section < kSections; section += kWarps) {
    const int bin = section * kWarpSize + lane_index();
    const uint64_t weight = warp_sum(bins.weight[bin].value());
    const uint64_t count = warp_sum(bins.count[bin]);
    if (lane_index() == 0) {
      bins.section_weight[section] = weight;
      bins.section_count[section] = static_cast<uint32_t>(count);
    }
  }
  Team::sync();

  if (warp_index() == 0) {
    uint64_t weights[kSections / kWarpSize] = {}, counts[kSections / kWarpSize] = {};
    uint64_t total = 0;
    for (int part = 0; part < kSections / kWarpSize; ++part) {
      const int section = part * kWarpSize + lane_index();
      weights[part] = sum_over_team<uint64_t>(bins.section_weight[section]);
      counts[part] = sum_over_team<uint64_t>(bins.section_count[section]);
      total += weights[part];
    }
    BinCut cut = {kNumBins, 0, 0, warp_sum(total)};
    cut.need = need.amount_of(cut.total_weight);
    const bool by_count = need.of == Need::Of::count;

    int section = kSections;
    uint64_t weight_before = 0;
    for (int part = 0; part < kSections / kWarpSize && section == kSections; ++part) {
      const int lane = cut_lanes(by_count ? counts[part] : weights[part], &cut.need);
      if (lane < kWarpSize) section = part * kWarpSize + lane;
      weight_before += warp_sum(lane_index() < lane ? weights[part] : 0);
    }
    if (section < kSections) {
      const int bin = section * kWarpSize + lane_index();
      const uint64_t weight = sum_over_team<uint64_t>(bins.weight[bin].low) +
                              (sum_over_team<uint64_t>(bins.weight[bin].high) << 32);
      const uint64_t count = sum_over_team<uint64_t>(bins.count[bin]);
      const int lane = cut_lanes(by_count ? count : weight, &cut.need);
      cut.bin = section * kWarpSize + lane;
      cut.weight_through = weight_before + warp_sum(lane_index() <= lane ? weight : 0);
    }
    if (lane_index() == 0) shared = cut;
  }
  __syncthreads();
  return shared;
}

}  // namespace sampling
}  // namespace pagedinfer
