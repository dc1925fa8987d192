#include "common/parallel.h"
#include "layers/offset_rms_norm.h"
#include "layers/row_math_cpu.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kElementsPerTask = 8192;

template <typename T>
const T* row_of(const void* base, const RowStrides& strides, int64_t group, int64_t row) {
  return static_cast<const T*>(base) + group * strides.group + row * strides.row;
}

template <typename T>
void norm_row(const OffsetRmsNormParams& p, int64_t r) {
  const int64_t group = r / p.inner_rows, row = r % p.inner_rows;
  const T* input = row_of<T>(p.input, p.input_strides, group, row);
  const T* addend = p.addend ? row_of<T>(p.addend, p.addend_strides, group, row) : nullptr;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = const_cast<T*>(row_of<T>(p.out, p.out_strides, group, row));
  const float mean = sum_of_squares(input, p.width) / static_cast<float>(p.width);
  const float factor = 1.0f / std::sqrt(mean + p.epsilon);
  for (int64_t i = 0; i < p.width; ++i) {
    const float norm =
        rounded_through<T>(to_float(input[i]) * factor * (1.0f + to_float(weight[i])));
    out[i] = rounded<T>(addend ? to_float(addend[i]) + norm : norm);
  }
}

}  // namespace

void offset_rms_norm_cpu(const OffsetRmsNormParams& p) {
  const int64_t grain = kElementsPerTask / p.width + 1;
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.num_rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) norm_row<T>(p, r);
    });
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
