// offset_rms_norm: RMSNorm (Zhang and Sennrich, 2019) as Gemma has it.
//
//   norm[r, i] = round(input[r, i] / sqrt(mean(input[r]^2) + epsilon) * (1 + weight[i]))
//   out[r] = norm[r], or with an addend round(addend[r] + norm[r])
//
// Arithmetic is in float32; round() is to the tensors' dtype. Unlike in rms_norm the normalised
// value is not rounded before the product, and the weight is stored as its distance from one, which
// a half type holds more exactly than the sum.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"
#include "layers/rows.h"

namespace pagedinfer {

struct OffsetRmsNormParams {
  const void* input;                                      // [num_rows, width]
  const void* weight;                                     // [width]
  const void* addend;                                     // [num_rows, width], or null; may be out
  void* out;                                              // [num_rows, width]
  RowStrides input_strides, addend_strides, out_strides;  // elements
  int64_t num_rows, inner_rows, width;
  float epsilon;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void offset_rms_norm_cpu(const OffsetRmsNormParams& params);)

}  // namespace pagedinfer
