// The element types of the layer kernels on the CPU: loading any of them as float and rounding a
// float back, written so that compilers vectorise loops over them. For *_cpu.cpp files only:
// everything is local to the including file (see common/cpu_isa.h on inline functions).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float float_from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return float_from_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) {
  // Exponent and mantissa move to their places in a float; the product with 2^112 makes up for the
  // difference of the exponents' biases (127 - 15) and normalises subnormals on the way.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t finite = bits_of(float_from_bits(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;  // infinity or NaN
  const bool is_finite = magnitude < (0x7c00u << 13);
  return float_from_bits((is_finite ? finite : special) |
                         (static_cast<uint32_t>(x.bits & 0x8000) << 16));
}

template <typename T>
inline T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded =
      (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

template <>
inline Float16 from_float<Float16>(float x) {
  const uint32_t sign = bits_of(x) & 0x80000000u;
  const uint32_t magnitude = bits_of(x) ^ sign;
  // Normal results: rebias the exponent, round 13 bits away to nearest, ties to even. A carry into
  // the exponent is right, up to infinity.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 shifts the bits to where they belong, rounded by the addition.
  const uint32_t subnormal = bits_of(float_from_bits(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const bool overflows = magnitude >= (143u << 23);
  return {static_cast<uint16_t>((overflows ? special : finite) | (sign >> 16))};
}

// What a value is after a stay in memory as T.
template <typename T>
inline float rounded_to(float x) {
  return to_float(from_float<T>(x));
}

// Calls body(T{}) with the element type of `dtype`.
template <typename Body>
inline void with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32:
      return body(float{});
    case DType::float16:
      return body(Float16{});
    case DType::bfloat16:
      return body(BFloat16{});
  }
}

}  // namespace
}  // namespace CPU_ISA
}  // namespace pagedinfer
