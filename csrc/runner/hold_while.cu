// hold_while on the GPU: see hold_while.h.
//
// Grid: one block of one thread, which polls; what else the GPU has room for is left to others. It
// is launched as a dependent (dependent_launch.cuh), and lets its successor start only at its end:
// blocks that wait would hold what whoever goes first needs.
#include "common/dependent_launch.cuh"
#include "runner/hold_while_cuda.h"

namespace pagedinfer {

namespace {

__device__ __forceinline__ int64_t nanoseconds_now() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void hold_while_kernel(const __grid_constant__ HoldWhileParams p) {
  wait_for_predecessor();
  const volatile int32_t* flag = p.flag;
  if (*flag == 0) return;
  const int64_t end = nanoseconds_now() + p.nanoseconds;
  while (*flag != 0 && nanoseconds_now() < end) __nanosleep(1000);
}

}  // namespace

cudaError_t launch_hold_while(const HoldWhileParams& p, cudaStream_t stream) {
  return launch_dependent(hold_while_kernel, 1, 1, 0, stream, p);
}

}  // namespace pagedinfer
