// Kernels that move bytes, whatever they mean: the widest type that every address is a multiple of.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pagedinfer {

// Calls launch.operator()<V>() with an unsigned type of `width` bytes, from common/vector_width.h.
template <typename Launch>
cudaError_t with_vector_type(int64_t width, const Launch& launch) {
  switch (width) {
    case 16:
      return launch.template operator()<uint4>();
    case 8:
      return launch.template operator()<uint2>();
    case 4:
      return launch.template operator()<uint32_t>();
    case 2:
      return launch.template operator()<uint16_t>();
    default:
      return launch.template operator()<uint8_t>();
  }
}

}  // namespace pagedinfer
