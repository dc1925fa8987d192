// Launching a kernel in which a team of blocks works on each row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device_limits.h"
#include "sampler/team.cuh"

namespace pagedinfer {
namespace sampling {

// How many blocks share a row: the most that still lets all rows run at once, two blocks to a
// multiprocessor, and that leaves each warp something to read.
inline int team_size(int64_t num_rows, int64_t row_bytes, int multiprocessors) {
  int team = kMaxTeam;
  while (team > 1 &&
         (num_rows * team > 2 * multiprocessors || row_bytes < int64_t{team - 1} * kThreads * 16)) {
    team /= 2;
  }
  return team;
}

// `row_bytes`: what of a row is read. The kernel begins with begin_dependent()
// (common/dependent_launch.cuh).
template <typename Params>
cudaError_t launch_teams(void (*kernel)(Params), const Params& params, int64_t num_rows,
                         int64_t row_bytes, cudaStream_t stream) {
  DeviceLimits limits;
  cudaFuncAttributes attributes;
  cudaError_t status = device_limits(&limits);
  if (status != cudaSuccess) return status;
  status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  // There are clusters, and dependent launches, if the code that this device runs was compiled for
  // them.
  const int team = attributes.ptxVersion >= 90 ? team_size(num_rows, row_bytes, limits.num_sms) : 1;

  cudaLaunchAttribute how[2]{};
  how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  how[0].val.programmaticStreamSerializationAllowed = 1;
  how[1].id = cudaLaunchAttributeClusterDimension;
  how[1].val.clusterDim.x = static_cast<unsigned>(team);
  how[1].val.clusterDim.y = 1;
  how[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_rows * team));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = how;
  config.numAttrs = attributes.ptxVersion < 90 ? 0 : team > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Whether all rows start at multiples of 16 bytes and their vocabulary ends at one.
template <typename T>
bool rows_are_aligned(const void* logits, int64_t row_stride, int64_t vocab_size) {
  return reinterpret_cast<uintptr_t>(logits) % 16 == 0 && row_stride * sizeof(T) % 16 == 0 &&
         vocab_size * sizeof(T) % 16 == 0;
}

}  // namespace sampling
}  // namespace pagedinfer
