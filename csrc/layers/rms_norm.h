// rms_norm: root-mean-square normalisation of rows, with the residual stream's addition in front.
//
//   with a residual:  residual[r, :] = x = round(residual[r, :] + input[r, :])
//   without:          x = input[r, :]
//   out[r, :] = round(round(x / sqrt(mean(x^2) + epsilon)) * weight)
//
// Arithmetic is in float32; round() is to the tensors' dtype, at the points at which a model
// written in torch operations rounds, so that half types follow the reference models.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"
#include "layers/rows.h"

namespace pagedinfer {

struct RmsNormParams {
  const void* input;   // [num_rows, hidden]
  const void* weight;  // [hidden]
  void* residual;      // [num_rows, hidden], read and written, or null
  void* out;           // [num_rows, hidden]; may be the input
  RowStrides input_strides, residual_strides,
      out_strides;  // elements; within a row they lie densely
  int64_t num_rows, inner_rows, hidden;
  float epsilon;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void rms_norm_cpu(const RmsNormParams& params);)

}  // namespace pagedinfer
