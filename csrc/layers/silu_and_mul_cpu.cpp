#include "common/parallel.h"
#include "layers/cpu_elements.h"
#include "layers/silu_and_mul.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kElementsPerTask = 8192;

constexpr int64_t kPiece = 64;

PAGEDINFER_SIMD FloatVector silu(FloatVector x) {
  constexpr float kLargest = 88.0f;  // of what exp takes
  const FloatVector negative = -x > kLargest ? broadcast(kLargest) : -x;
  return x / (1.0f + exp(negative));
}

template <typename T>
void silu_and_mul_row(const T* gate, const T* up, int64_t width, T* out) {
  for (int64_t begin = 0; begin < width; begin += kPiece) {
    const int64_t count = width - begin < kPiece ? width - begin : kPiece;
    float x[kPiece] = {};
    for (int64_t i = 0; i < count; ++i) x[i] = to_float(gate[begin + i]);
    for (int64_t i = 0; i < kPiece; i += kLanes) store(x + i, silu(load(x + i)));
    for (int64_t i = 0; i < count; ++i) {
      out[begin + i] = rounded<T>(rounded_through<T>(x[i]) * to_float(up[begin + i]));
    }
  }
}

}  // namespace

void silu_and_mul_cpu(const SiluAndMulParams& p) {
  const int64_t grain = kElementsPerTask / p.width + 1;
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.num_rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t group = r / p.inner_rows, row = r % p.inner_rows;
        const T* gate = static_cast<const T*>(p.input) + group * p.input_strides.group +
                        row * p.input_strides.row;
        silu_and_mul_row(
            gate, gate + p.width, p.width,
            static_cast<T*>(p.out) + group * p.out_strides.group + row * p.out_strides.row);
      }
    });
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
