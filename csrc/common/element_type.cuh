// The choice of a kernel by its element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "common/dtype.h"

namespace pagedinfer {

// Calls launch.operator()<T>() with the element type of `dtype`: float, Half or BFloat.
template <typename Half = __half, typename BFloat = __nv_bfloat16, typename Launch>
cudaError_t with_element_type(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::float32:
      return launch.template operator()<float>();
    case DType::float16:
      return launch.template operator()<Half>();
    case DType::bfloat16:
      return launch.template operator()<BFloat>();
  }
  return cudaErrorInvalidValue;  // not reached: the entries check dtypes
}

}  // namespace pagedinfer
