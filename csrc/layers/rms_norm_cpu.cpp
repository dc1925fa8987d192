#include "common/parallel.h"
#include "layers/cpu_elements.h"
#include "layers/rms_norm.h"
#include "layers/row_math_cpu.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kElementsPerTask = 16384;
template <typename T>
void add_to(T* residual, const T* input, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    residual[i] = rounded<T>(to_float(residual[i]) + to_float(input[i]));
  }
}

template <typename T>
void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(p.weight);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t group = r / p.inner_rows, row = r % p.inner_rows;
    const T* x =
        static_cast<const T*>(p.input) + group * p.input_strides.group + row * p.input_strides.row;
    T* out = static_cast<T*>(p.out) + group * p.out_strides.group + row * p.out_strides.row;
    if (p.residual != nullptr) {
      T* residual = static_cast<T*>(p.residual) + group * p.residual_strides.group +
                    row * p.residual_strides.row;
      add_to(residual, x, p.hidden);
      x = residual;
    }
    normalise_row(x, weight, p.epsilon, p.hidden, out);
  }
}

}  // namespace

void rms_norm_cpu(const RmsNormParams& p) {
  const int64_t grain = kElementsPerTask / p.hidden + 1;
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.num_rows, grain,
                 [&](int64_t begin, int64_t end) { rms_norm_rows<T>(p, begin, end); });
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
