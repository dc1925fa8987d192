// What the layer kernels on the CPU share beyond common/simd.h: rounding to an element type, and
// the choice of that type. For *_cpu.cpp files only.
#pragma once

#include "common/dtype.h"
#include "common/simd.h"

namespace pagedinfer {
namespace CPU_ISA {

template <typename T>
PAGEDINFER_SIMD T rounded(float x) {
  T element;
  from_float(x, &element);
  return element;
}

// What a value is after a stay in memory as T.
template <typename T>
PAGEDINFER_SIMD float rounded_through(float x) {
  return to_float(rounded<T>(x));
}

// Calls body(T{}) with the element type of `dtype`.
template <typename Body>
PAGEDINFER_SIMD void with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32:
      return body(float{});
    case DType::float16:
      return body(Half{});
    case DType::bfloat16:
      return body(BFloat16{});
  }
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
