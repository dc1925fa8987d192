#include <cmath>

#include "common/parallel.h"
#include "experts/expert_gemm.h"
#include "layers/cpu_elements.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kRowsPerTask = 4;

template <typename T>
float dot(const T* a, const T* b, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += to_float(a[i]) * to_float(b[i]);
  return rounded_through<T>(sum);
}

template <typename T>
void gemm_row(const ExpertGemmParams& p, int64_t expert, int64_t position) {
  const int64_t pair = p.pairs[position];
  const int64_t from = p.is_gate_up ? pair / p.k : position;
  const int64_t to = p.is_gate_up ? position : pair;
  const T* row = static_cast<const T*>(p.input) + from * p.width;
  const int64_t weight_rows = (p.is_gate_up ? 2 : 1) * p.columns;
  const T* weight = static_cast<const T*>(p.weight) + expert * weight_rows * p.width;
  T* out = static_cast<T*>(p.out) + to * p.columns;
  for (int64_t column = 0; column < p.columns; ++column) {
    float value = dot(weight + column * p.width, row, p.width);
    if (p.is_gate_up) {
      const float up = dot(weight + (p.columns + column) * p.width, row, p.width);
      value = rounded_through<T>(value / (1.0f + std::exp(-value))) * up;
    }
    out[column] = rounded<T>(value);
  }
}

}  // namespace

void expert_gemm_cpu(const ExpertGemmParams& p) {
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t t = 0; t < p.num_tiles; ++t) {
      const ExpertTile tile = p.tiles[t];
      if (tile.expert < 0) continue;
      parallel_for(tile.end - tile.begin, kRowsPerTask, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) gemm_row<T>(p, tile.expert, tile.begin + i);
      });
    }
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
