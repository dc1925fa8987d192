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
  uint64_t section_amount[kSections];  // count or weight, whichever a cut goes by

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
  int bin;        // kNumBins: all of them together do not meet the need
  uint64_t need;  // what the bins before it leave of the need
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
// weights, as the need has it), and find the cut in `result`, which is in shared memory. The bins
// may be cleared again after the next barrier of the team.
__device__ inline void cut_bins(Bins& bins, Need need, BinCut& result) {
  const bool by_count = need.of == Need::Of::count;
  __syncthreads();
  for (int section = warp_index(); section < kSections; section += kWarps) {
    const int bin = section * kWarpSize + lane_index();
    const uint64_t amount = warp_sum(by_count ? bins.count[bin] : bins.weight[bin].value());
    if (lane_index() == 0) bins.section_amount[section] = amount;
  }
  Team::sync();

  if (warp_index() == 0) {
    constexpr int kParts = kSections / kWarpSize;
    uint64_t amounts[kParts], total = 0;
    for (int part = 0; part < kParts; ++part) {
      const int section = part * kWarpSize + lane_index();
      amounts[part] = sum_over_team<uint64_t>(bins.section_amount[section]);
      total += amounts[part];
    }
    BinCut cut = {kNumBins, need.amount_of(warp_sum(total))};
    int section = kSections;
    for (int part = 0; part < kParts && section == kSections; ++part) {
      const int lane = cut_lanes(amounts[part], &cut.need);
      if (lane < kWarpSize) section = part * kWarpSize + lane;
    }
    if (section < kSections) {
      const int bin = section * kWarpSize + lane_index();
      const uint64_t amount = by_count ? sum_over_team<uint64_t>(bins.count[bin])
                                       : sum_over_team<uint64_t>(bins.weight[bin].low) +
                                             (sum_over_team<uint64_t>(bins.weight[bin].high) << 32);
      cut.bin = section * kWarpSize + cut_lanes(amount, &cut.need);
    }
    if (lane_index() == 0) result = cut;
  }
  __syncthreads();
}

}  // namespace sampling
}  // namespace pagedinfer
