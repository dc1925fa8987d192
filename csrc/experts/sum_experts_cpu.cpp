#include "common/parallel.h"
#include "experts/sum_experts.h"
#include "layers/cpu_elements.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kElementsPerTask = 8192;

}  // namespace

void sum_experts_cpu(const SumExpertsParams& p) {
  const int64_t grain = kElementsPerTask / p.width + 1;
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* results = static_cast<const T*>(p.results) + token * p.k * p.width;
        const float* weights = p.weights + token * p.k;
        T* out = static_cast<T*>(p.out) + token * p.width;
        for (int64_t i = 0; i < p.width; ++i) {
          float sum = 0.0f;
          for (int64_t j = 0; j < p.k; ++j) sum += weights[j] * to_float(results[j * p.width + i]);
          out[i] = rounded<T>(sum);
        }
      }
    });
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
