// skinny_linear on the CPU: see skinny_linear.h for the maths and the tensors.
#include <cmath>
#include <vector>

#include "common/parallel.h"
#include "layers/row_math_cpu.h"
#include "layers/skinny_linear.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kProductsPerTask = 1 << 15;

// Of `count` elements, in kSums sums: every instruction set adds in one order.
template <typename T>
float product(const float* x, const T* weight, int64_t count) {
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
#pragma omp simd
    for (int64_t j = 0; j < kSums; ++j) sums[j] += x[i + j] * to_float(weight[i + j]);
  }
  for (; i < count; ++i) sums[i % kSums] += x[i] * to_float(weight[i]);
  for (int64_t width = kSums / 2; width > 0; width /= 2) {
    for (int64_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

// The input's rows in float32, normed if there is a norm.
template <typename T>
std::vector<float> rows_of(const SkinnyLinearParams& p) {
  std::vector<float> rows(p.num_rows * p.in_features);
  std::vector<T> normed(p.in_features);
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const T* input = static_cast<const T*>(p.input) + r * p.input_stride;
    if (p.norm_weight != nullptr) {
      normalise_row(input, static_cast<const T*>(p.norm_weight), p.epsilon, p.in_features,
                    normed.data());
      input = normed.data();
    }
    for (int64_t i = 0; i < p.in_features; ++i) rows[r * p.in_features + i] = to_float(input[i]);
  }
  return rows;
}

}  // namespace

void skinny_linear_cpu(const SkinnyLinearParams& p) {
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::vector<float> rows = rows_of<T>(p);
    const T* weight = static_cast<const T*>(p.weight);
    const T* bias = static_cast<const T*>(p.bias);
    const int64_t outputs = p.out_features();
    const auto feature_of = [&](int64_t r, int64_t feature) {
      const float sum =
          product(&rows[r * p.in_features], weight + feature * p.in_features, p.in_features);
      return rounded_through<T>(bias == nullptr ? sum : sum + to_float(bias[feature]));
    };
    const int64_t grain = kProductsPerTask / (p.in_features * p.num_rows + 1) + 1;
    parallel_for(outputs, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t r = 0; r < p.num_rows; ++r) {
          float result = feature_of(r, i);
          if (p.gated) {
            const float silu = result / (1.0f + std::exp(-result));
            result = rounded_through<T>(silu) * feature_of(r, outputs + i);
          }
          if (p.residual != nullptr) {
            result += to_float(static_cast<const T*>(p.residual)[r * p.residual_stride + i]);
          }
          static_cast<T*>(p.out)[r * p.out_stride + i] = rounded<T>(result);
        }
      }
    });
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
