// read_ring and write_ring on the GPU: see step_ring.h for the maths and the tensors.
//
// Grid: one block, whose threads copy an element each in turns; a step has some kilobytes, and what
// takes time is the way to the host and back. Shared memory: none. The launches are dependent
// (dependent_launch.cuh). A place is read past the caches: the host has written it anew.
#include "common/dependent_launch.cuh"
#include "runner/step_ring_cuda.h"

namespace pagedinfer {

namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads)
    read_ring_kernel(const __grid_constant__ ReadRingParams p) {
  begin_dependent();
  const int32_t* place = p.ring + *p.turn % p.num_places * p.width;
  for (int64_t i = threadIdx.x; i < p.size; i += kThreads) p.out[i] = __ldcv(place + i);
}

__global__ void __launch_bounds__(kThreads)
    write_ring_kernel(const __grid_constant__ WriteRingParams p) {
  begin_dependent();
  const int64_t turn = *p.turn;
  int32_t* place = p.ring + turn % p.num_places * p.width;
  for (int64_t i = threadIdx.x; i < p.size; i += kThreads) place[i] = p.values[i];
  __syncthreads();
  if (threadIdx.x == 0) *p.turn = turn + 1;
}

}  // namespace

cudaError_t launch_read_ring(const ReadRingParams& p, cudaStream_t stream) {
  return launch_dependent(read_ring_kernel, 1, kThreads, 0, stream, p);
}

cudaError_t launch_write_ring(const WriteRingParams& p, cudaStream_t stream) {
  return launch_dependent(write_ring_kernel, 1, kThreads, 0, stream, p);
}

}  // namespace pagedinfer
