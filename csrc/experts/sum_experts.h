// sum_experts: out[t, :] = round(sum over j of weights[t, j] * results[t * k + j, :]), j from 0 to
// k - 1 in this order, in float32.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

struct SumExpertsParams {
  const void* results;   // [num_tokens * k, width]
  const float* weights;  // [num_tokens, k]
  void* out;             // [num_tokens, width]
  int64_t num_tokens, k, width;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void sum_experts_cpu(const SumExpertsParams& params);)

}  // namespace pagedinfer
