// Programmatic dependent launch: a kernel's blocks start while the last blocks of the kernel before
// it in the stream still run, and wait on the device for its end; what that saves is the launch.
//
// Right for any neighbours. A kernel launched this way calls wait_for_predecessor() before it reads
// or writes any memory that another kernel may touch; the wait returns when the kernel before has
// ended and its writes are visible. That kernel had done the same, so all before it have ended too.
// A kernel after this one that is not launched this way starts when this one has ended.
//
// Two kernels may also run side by side. The first waits for its predecessor before it lets the
// second start. The second, which must need nothing of the first, then reads and writes at once:
// all before the first have ended. One of its blocks waits for the first before it ends, so that
// whoever waits for the second has waited for both.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace pagedinfer {

// The next kernel's blocks may start once all blocks of this one have come here, or ended.
__device__ __forceinline__ void let_successor_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Both have something brought into the second-level cache: `bytes` from `address` on, multiples of
// 16 both, or the line in which `address` lies. They may stand before wait_for_predecessor(), since
// whatever a kernel writes is seen there: nothing stale is read. Worth it for what the kernel
// before does not write; what it writes is there already.
__device__ __forceinline__ void ask_for(const void* address, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void ask_for_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

__device__ __forceinline__ void begin_dependent() {
  let_successor_start();
  wait_for_predecessor();
}

// Launches a kernel that calls wait_for_predecessor(), in clusters of so many blocks. One that was
// compiled for an architecture without either, which may run on a newer one, is launched as any
// other.
template <typename... Params>
cudaError_t launch_dependent_clusters(void (*kernel)(Params...), unsigned blocks, unsigned cluster,
                                      unsigned threads, int shared_bytes, cudaStream_t stream,
                                      const std::type_identity_t<Params>&... params) {
  cudaFuncAttributes compiled;
  if (cudaError_t status = cudaFuncGetAttributes(&compiled, kernel); status != cudaSuccess) {
    return status;
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = compiled.ptxVersion < 90 ? 0 : cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

template <typename... Params>
cudaError_t launch_dependent(void (*kernel)(Params...), unsigned blocks, unsigned threads,
                             int shared_bytes, cudaStream_t stream,
                             const std::type_identity_t<Params>&... params) {
  return launch_dependent_clusters(kernel, blocks, 1, threads, shared_bytes, stream, params...);
}

}  // namespace pagedinfer
