// The element types of tensors that hold activations, as plain C++ and CUDA code knows them.
#pragma once

#include <cstdint>

namespace pagedinfer {

enum class DType : int32_t { float32, float16, bfloat16 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

}  // namespace pagedinfer
