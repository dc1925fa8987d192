// The blocks that share one row: a thread block cluster on sm_90 and newer, one block before that.
// They see each other's shared memory. Every decision about a row is taken by each block on its
// own, from the same numbers, so that nothing needs to be announced.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "sampler/token_order.h"

namespace pagedinfer {
namespace sampling {

constexpr int kWarpSize = 32;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxTeam = 8;  // the largest cluster that every device grants
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / kWarpSize); }

#if __CUDA_ARCH__ >= 900

struct Team {
  static __device__ int size() {
    return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
  }
  static __device__ int rank() {
    return static_cast<int>(cooperative_groups::this_cluster().block_rank());
  }
  // All threads of all blocks arrive, and see what any of them wrote before.
  static __device__ void sync() { cooperative_groups::this_cluster().sync(); }
  // A variable in shared memory as the block of that rank has it.
  template <typename V>
  static __device__ const V& of(const V& shared, int rank) {
    return *cooperative_groups::this_cluster().map_shared_rank(&shared, rank);
  }
};

#else

struct Team {
  static __device__ int size() { return 1; }
  static __device__ int rank() { return 0; }
  static __device__ void sync() { __syncthreads(); }
  template <typename V>
  static __device__ const V& of(const V& shared, int) {
    return shared;
  }
};

#endif

// What each block of the team has of a variable in shared memory, `none` for ranks that there are
// not. All are on their way at once: one after another, each would be waited for.
template <typename V>
__device__ inline void gather(const V& shared, V none, V (&values)[kMaxTeam]) {
#pragma unroll
  for (int rank = 0; rank < kMaxTeam; ++rank) {
    values[rank] = Team::of(shared, rank < Team::size() ? rank : 0);
  }
#pragma unroll
  for (int rank = 0; rank < kMaxTeam; ++rank) {
    if (rank >= Team::size()) values[rank] = none;
  }
}

template <typename Sum, typename V>
__device__ inline Sum sum_over_team(const V& shared) {
  V values[kMaxTeam];
  gather(shared, V{}, values);
  Sum sum = 0;
#pragma unroll
  for (const V value : values) sum += value;
  return sum;
}

// ---- within a warp: all lanes call these together ----

__device__ inline uint64_t warp_sum(uint64_t value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

__device__ inline uint64_t warp_min(uint64_t value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other < value ? other : value;
  }
  return value;
}

// The sum over this lane and those before it.
__device__ inline uint64_t warp_prefix_sum(uint64_t value) {
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane_index() >= offset) value += other;
  }
  return value;
}

// ---- within a block: all threads call these together; `scratch` is free again on return ----

__device__ inline uint64_t block_sum(uint64_t value, uint64_t (&scratch)[kWarps]) {
  value = warp_sum(value);
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  uint64_t sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += scratch[warp];
  __syncthreads();
  return sum;
}

__device__ inline uint64_t block_min(uint64_t value, uint64_t (&scratch)[kWarps]) {
  value = warp_min(value);
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  uint64_t least = scratch[0];
  for (int warp = 1; warp < kWarps; ++warp) least = scratch[warp] < least ? scratch[warp] : least;
  __syncthreads();
  return least;
}

// The largest, NaN if one is.
__device__ inline float block_max_or_nan(float value, uint64_t (&scratch)[kWarps]) {
  const uint32_t key = __reduce_max_sync(kAllLanes, ordered_key(value));
  if (lane_index() == 0) scratch[warp_index()] = key;
  __syncthreads();
  const auto of_warp = static_cast<uint32_t>(scratch[lane_index() % kWarps]);
  const uint32_t most = __reduce_max_sync(kAllLanes, of_warp);
  __syncthreads();
  return float_of_key(most);
}

// The sum over the threads before this one.
__device__ inline uint64_t block_sum_before(uint64_t value, uint64_t (&scratch)[kWarps]) {
  const uint64_t prefix = warp_prefix_sum(value);
  if (lane_index() == kWarpSize - 1) scratch[warp_index()] = prefix;
  __syncthreads();
  uint64_t before = prefix - value;
  for (int warp = 0; warp < warp_index(); ++warp) before += scratch[warp];
  __syncthreads();
  return before;
}

// A 64-bit sum in shared memory, to which threads add at the same time. In two words, since the
// hardware adds 32 bits there and would have to try again and again for 64. Carries are whole
// numbers too: the order of the additions does not show.
struct SharedSum {
  uint32_t low, high;

  __device__ void add(uint64_t value) {
    const uint32_t value_low = static_cast<uint32_t>(value);
    const uint32_t carry = atomicAdd(&low, value_low) > ~value_low ? 1u : 0u;
    const uint32_t value_high = static_cast<uint32_t>(value >> 32) + carry;
    if (value_high > 0) atomicAdd(&high, value_high);
  }
  __device__ void set(uint64_t value) {
    low = static_cast<uint32_t>(value);
    high = static_cast<uint32_t>(value >> 32);
  }
  __device__ uint64_t value() const { return uint64_t{high} << 32 | low; }
};

}  // namespace sampling
}  // namespace pagedinfer
