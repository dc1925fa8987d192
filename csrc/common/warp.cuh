// What the threads of a warp do together.
#pragma once

#include <cstdint>

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

// Of an 8 x 8 matrix of 16-bit elements held by a warp: lane l has row l / 4, columns 2 (l % 4) and
// the next.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace pagedinfer
