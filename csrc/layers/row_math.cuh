// What the layer kernels on the GPU do with the vectors of a row.
#pragma once

#include "layers/elements.cuh"

namespace pagedinfer {

template <typename T, int kVec>
__device__ __forceinline__ float sum_of_squares(const Vector<T, kVec>& x) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < kVec; ++e) sum += to_float(x.elements[e]) * to_float(x.elements[e]);
  return sum;
}

// x * factor * weight, element by element, with factor = 1 / rms(row); see rms_norm.h.
template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> normalised(const Vector<T, kVec>& x, float factor,
                                                      const Vector<T, kVec>& weight) {
  Vector<T, kVec> out;
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const float scaled = to_float(x.elements[e]) * factor;
    out.elements[e] = rounded<T>(rounded_through<T>(scaled) * to_float(weight.elements[e]));
  }
  return out;
}

// Turns a pair by an angle, without fused multiply-adds: the CPU's bits.
template <typename T>
__device__ __forceinline__ void rotate(T& x_element, T& y_element, float cos, float sin) {
  const float x = to_float(x_element), y = to_float(y_element);
  x_element = rounded<T>(__fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin)));
  y_element = rounded<T>(__fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin)));
}

// Cosines and sines of kCount angles.
template <int kCount>
struct Angles {
  float cosines[kCount], sines[kCount];

  __device__ __forceinline__ void load(const float* cos, const float* sin) {
    load_floats(cos, cosines);
    load_floats(sin, sines);
  }
};

// Turns kVec pairs of a head. `a` and `b` are the pairs' first and their second members or, if
// interleaved, 2 * kVec neighbours.
template <bool kInterleaved, typename T, int kVec>
__device__ __forceinline__ void rotate_pairs(Vector<T, kVec>& a, Vector<T, kVec>& b,
                                             const Angles<kVec>& angles) {
  const float (&cosines)[kVec] = angles.cosines;
  const float (&sines)[kVec] = angles.sines;
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    if constexpr (!kInterleaved) {
      rotate(a.elements[e], b.elements[e], cosines[e], sines[e]);
    } else if constexpr (kVec == 1) {
      rotate(a.elements[0], b.elements[0], cosines[0], sines[0]);
    } else {
      Vector<T, kVec>& pairs = e < kVec / 2 ? a : b;
      const int first = 2 * e % kVec;
      rotate(pairs.elements[first], pairs.elements[first + 1], cosines[e], sines[e]);
    }
  }
}

}  // namespace pagedinfer
