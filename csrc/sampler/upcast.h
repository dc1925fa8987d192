// 16-bit floats as they lie in memory, and their exact values as fp32, in plain integer code that
// compilers vectorise.
#pragma once

#include <cstdint>

#include "sampler/sampling_math.h"

namespace pagedinfer {
namespace sampling {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

PAGEDINFER_SHARED float upcast(float x) { return x; }

PAGEDINFER_SHARED float upcast(BFloat16 x) { return float_of(uint32_t{x.bits} << 16); }

PAGEDINFER_SHARED float upcast(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Exponent and mantissa in place, then the exponent's bias put right by 2^112, which also
  // normalises subnormals. Infinities and NaNs get the exponent that they have in fp32.
  const uint32_t scaled = bits_of(multiply(float_of(magnitude << 13), 0x1p+112f));
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return float_of(scaled | special | (uint32_t{x.bits} & 0x8000u) << 16);
}

}  // namespace sampling
}  // namespace pagedinfer
