// Tensor maps: what the copy engine of Hopper knows of a tensor in memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/dtype.h"

namespace pagedinfer {

// The map of a tensor of a half type with `rank` dimensions, the innermost first; `strides` are
// bytes, of all but that one. A box lies in shared memory as wgmma.cuh has panels.
inline cudaError_t make_tensor_map(const void* tensor, DType dtype, int rank,
                                   const cuuint64_t* sizes, const cuuint64_t* strides,
                                   const cuuint32_t* box, CUtensorMap* map) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map,
      dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      rank, const_cast<void*>(tensor), sizes, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace pagedinfer
