// What the threads of a warp do together.
#pragma once

namespace pagedinfer {

constexpr int kWarp = 32;

// The sum of x over kLanes neighbouring lanes, a power of two: the same bits for all of them. The
// whole warp calls it.
template <int kLanes = kWarp>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0u, x, distance);
  }
  return x;
}

}  // namespace pagedinfer
