#include "common/parallel.h"
#include "layers/cpu_elements.h"
#include "layers/silu_and_mul.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kElementsPerTask = 8192;

// e^x to within 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, times 2^n. Beyond
// what a float holds it stays at the ends. (The C library's is not vectorised without -ffast-math.)
inline float exponential(float x) {
  x = x > 88.0f ? 88.0f : x;  // so written, NaN stays NaN
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + 0x1.8p23f;  // the integer n is in its lowest bits
  const float n = shifted - 0x1.8p23f;
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts
  float p = 0x1.6a1a6ep-10f;
  p = p * r + 0x1.123fc6p-7f;
  p = p * r + 0x1.555916p-5f;
  p = p * r + 0x1.55548ap-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = (p * r) * r + r + 1.0f;
  return p * float_from_bits((bits_of(shifted) << 23) + 0x3f800000u);
}

template <typename T>
void silu_and_mul_row(const T* gate, const T* up, int64_t width, T* out) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float x = to_float(gate[i]);
    out[i] = from_float<T>(rounded_to<T>(x / (1.0f + exponential(-x))) * to_float(up[i]));
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
