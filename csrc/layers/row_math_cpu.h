// One row of the layer kernels on the CPU. For *_cpu.cpp files only.
#pragma once

#include <cmath>
#include <cstdint>

#include "layers/cpu_elements.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

// Partial sums of squares: as many as the widest vector registers hold, on every instruction set,
// so that all of them add in one order.
constexpr int64_t kSums = 16;

template <typename T>
float sum_of_squares(const T* x, int64_t count) {
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
#pragma omp simd
    for (int64_t j = 0; j < kSums; ++j) {
      const float value = to_float(x[i + j]);
      sums[j] += value * value;
    }
  }
  for (; i < count; ++i) sums[i % kSums] += to_float(x[i]) * to_float(x[i]);
  for (int64_t width = kSums / 2; width > 0; width /= 2) {
    for (int64_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

// out = x / rms(x) * weight; see rms_norm.h. `out` may be x.
template <typename T>
void normalise_row(const T* x, const T* weight, float epsilon, int64_t count, T* out) {
  const float mean = sum_of_squares(x, count) / static_cast<float>(count);
  const float factor = 1.0f / std::sqrt(mean + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    out[i] = rounded<T>(rounded_through<T>(to_float(x[i]) * factor) * to_float(weight[i]));
  }
}

// Element i of the pairs' first (second) members stands at x[i * Step] (y[i * Step]).
template <int Step, typename T>
void rotate_pairs(T* x, T* y, const float* cos, const float* sin, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[i * Step]), b = to_float(y[i * Step]);
    x[i * Step] = rounded<T>(a * cos[i] - b * sin[i]);
    y[i * Step] = rounded<T>(b * cos[i] + a * sin[i]);
  }
}

// Rotates a head in place; see rotary_embedding.h. `cos_sin`: half cosines, then half sines.
template <typename T>
void rotate_row(T* head, const float* cos_sin, int64_t half, bool interleaved) {
  if (interleaved) {
    rotate_pairs<2>(head, head + 1, cos_sin, cos_sin + half, half);
  } else {
    rotate_pairs<1>(head, head + half, cos_sin, cos_sin + half, half);
  }
}

}  // namespace
}  // namespace CPU_ISA
}  // namespace pagedinfer
