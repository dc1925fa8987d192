// silu_and_mul: the product of SwiGLU.
//
//   gate = input[r, :width], up = input[r, width:]
//   out[r, :] = round(round(gate / (1 + exp(-gate))) * up)
//
// Arithmetic is in float32; round() is to the tensors' dtype, at the points at which a model
// written in torch operations rounds.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"
#include "layers/rows.h"

namespace pagedinfer {

struct SiluAndMulParams {
  const void* input;                      // [num_rows, 2 * width]
  void* out;                              // [num_rows, width]
  RowStrides input_strides, out_strides;  // elements; within a row they lie densely
  int64_t num_rows, inner_rows, width;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void silu_and_mul_cpu(const SiluAndMulParams& params);)

}  // namespace pagedinfer
