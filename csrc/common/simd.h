// Vectors of floats for *_cpu.cpp files (see cpu_isa.h): as many lanes as the instruction set has,
// with the few functions that plain loops cannot say well.
//
// Built on the vector types of GCC and Clang, so that +, *, <, ?: and & work lane by lane.
// Everything lies in the namespace of its instruction set, so that no two share a copy.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common/dtype.h"

#define PAGEDINFER_SIMD [[gnu::always_inline]] inline

namespace pagedinfer {
namespace CPU_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float FloatVector __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVector __attribute__((vector_size(kLanes * 4)));

PAGEDINFER_SIMD FloatVector load(const float* from) {
  FloatVector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

PAGEDINFER_SIMD IntVector load(const int32_t* from) {
  IntVector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

PAGEDINFER_SIMD void store(float* to, FloatVector v) { std::memcpy(to, &v, sizeof v); }

PAGEDINFER_SIMD FloatVector broadcast(float x) { return x - FloatVector{}; }
PAGEDINFER_SIMD IntVector broadcast(int32_t x) { return x - IntVector{}; }

// a * b + c, rounded once where the instruction set can.
PAGEDINFER_SIMD FloatVector multiply_add(FloatVector a, FloatVector b, FloatVector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// to[0..3] = the sums of each vector's lanes.
PAGEDINFER_SIMD void store_lane_sums(float* to, const FloatVector (&v)[4]) {
#if defined(__AVX2__)
  __m128 quarter[4];
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    const __m256 half = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, v[i], 0),
                                      _mm512_maskz_extractf32x8_ps(0xff, v[i], 1));
#else
    const __m256 half = v[i];
#endif
    quarter[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  _mm_storeu_ps(
      to, _mm_hadd_ps(_mm_hadd_ps(quarter[0], quarter[1]), _mm_hadd_ps(quarter[2], quarter[3])));
#else
  for (int i = 0; i < 4; ++i) to[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}

// b where a is NaN.
PAGEDINFER_SIMD FloatVector max(FloatVector a, FloatVector b) { return a > b ? a : b; }

// exp(x) for x <= 88, within 2 ulp; 0 below -87.3, where float32 leaves its normal numbers. NaN
// stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 is split in two so that n times its first part is
// exact; e^r is its Taylor polynomial of degree 7 (the next term is below 6e-9), and 2^n goes into
// the exponent.
PAGEDINFER_SIMD FloatVector exp(FloatVector x) {
  constexpr float kLog2E = 0x1.715476p0f, kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  constexpr float kSmallest = -87.3f;
  const FloatVector clamped = x < kSmallest ? broadcast(kSmallest) : x;
  const FloatVector shifted = multiply_add(clamped, broadcast(kLog2E), broadcast(kRound));
  const FloatVector n = shifted - kRound;
  FloatVector r = multiply_add(n, broadcast(-kLn2High), clamped);
  r = multiply_add(n, broadcast(-kLn2Low), r);
  FloatVector y = broadcast(1.0f / 5040);
  constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float coefficient : kTaylor) {
    y = multiply_add(y, r, broadcast(coefficient));
  }
  const IntVector power = ((IntVector)shifted << 23) + 0x3f800000;
  return x < kSmallest ? FloatVector{} : y * (FloatVector)power;
}

// tanh(x), relative error below 1e-6: Lambert's continued fraction where |x| < 0.6, so that small
// results keep their digits; (1 - e^-2|x|) / (1 + e^-2|x|) elsewhere. NaN stays NaN.
PAGEDINFER_SIMD FloatVector tanh(FloatVector x) {
  const FloatVector z = x * x;
  const FloatVector numerator = x * (10395.0f + z * (1260.0f + z * 21.0f));
  const FloatVector small = numerator / (10395.0f + z * (4725.0f + z * (210.0f + z)));
  const FloatVector magnitude = x < 0.0f ? -x : x;
  const FloatVector e = exp(-2.0f * magnitude);
  const FloatVector large = (1.0f - e) / (1.0f + e);
  return magnitude < 0.6f ? small : (x < 0.0f ? -large : large);
}

// ---- rows of activations to and from float32 ---------------------------------------------------

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

PAGEDINFER_SIMD float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

PAGEDINFER_SIMD uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

PAGEDINFER_SIMD float to_float(float x) { return x; }
PAGEDINFER_SIMD float to_float(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
PAGEDINFER_SIMD float to_float(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // The exponents differ by 112; multiplying also makes subnormal numbers normal ones.
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN
  const float scaled = float_of(magnitude << 13) * 0x1p112f;
  return float_of(bits_of(scaled) | special | static_cast<uint32_t>(x.bits & 0x8000u) << 16);
#endif
}

// To nearest, ties to even; NaN stays NaN.
PAGEDINFER_SIMD void from_float(float x, float* to) { *to = x; }
PAGEDINFER_SIMD void from_float(float x, BFloat16* to) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(x != x ? (bits >> 16 | 0x40u) : rounded);
}
PAGEDINFER_SIMD void from_float(float x, Half* to) {
#if defined(__F16C__)
  to->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x47800000u) {  // 65536 and more, infinity, NaN
    half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: beside 0.5, one ulp is the smallest half
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | sign);
#endif
}

// count is a multiple of 16.
template <typename T>
PAGEDINFER_SIMD void convert_row(const T* from, float* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}
#if defined(__F16C__)
PAGEDINFER_SIMD void convert_row(const Half* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
}
#endif

}  // namespace CPU_ISA
}  // namespace pagedinfer
