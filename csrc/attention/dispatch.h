// The one place where the attention kernels' run-time parameters become template parameters. What
// is not listed throws std::invalid_argument (a ValueError in Python) with the list. block_size
// stays a run-time parameter: a shift and a mask.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/dtype.h"

namespace pagedinfer::attention {

template <typename T>
struct TypeTag {
  using Type = T;
};

// body(TypeTag<T>{}) for the types of the tensor-core kernels.
template <typename Body>
cudaError_t dispatch_half_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float16:
      return body(TypeTag<__half>{});
    case DType::bfloat16:
      return body(TypeTag<__nv_bfloat16>{});
    default:
      throw std::invalid_argument("paged_attention: no tensor-core kernel for dtype " +
                                  std::to_string(static_cast<int>(dtype)) +
                                  "; supported are float16, bfloat16");
  }
}

// body(std::integral_constant<int, HEAD_DIM>{}).
template <typename Body>
cudaError_t dispatch_head_dim(int64_t head_dim, const Body& body) {
  switch (head_dim) {
    case 64:
      return body(std::integral_constant<int, 64>{});
    case 80:
      return body(std::integral_constant<int, 80>{});
    case 96:
      return body(std::integral_constant<int, 96>{});
    case 112:
      return body(std::integral_constant<int, 112>{});
    case 128:
      return body(std::integral_constant<int, 128>{});
    case 256:
      return body(std::integral_constant<int, 256>{});
    default:
      throw std::invalid_argument("paged_attention: head_dim is " + std::to_string(head_dim) +
                                  "; supported are 64, 80, 96, 112, 128, 256");
  }
}

}  // namespace pagedinfer::attention
