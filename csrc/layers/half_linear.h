// half_linear: a linear layer in a half type, for CPUs without arithmetic in it.
//
//   out[m, n] = round(sum over k of input[m, k] * weight[n, k] + bias[n])
//
// Products and sums are in float32; round() is to the tensors' dtype, once. The order of a sum
// depends on its length and the instruction set alone, neither on the other rows nor on the number
// of threads: a row's result is the same to the last bit in any batch.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"
#include "layers/rows.h"

namespace pagedinfer {

struct HalfLinearParams {
  const void* input;   // [num_rows, width]
  const void* weight;  // [num_columns, width]
  const void* bias;    // [num_columns], dense; null: none
  void* out;           // [num_rows, num_columns]
  float* packed;       // room for half_linear_packed_size(num_rows, width) floats
  RowStrides input_strides, out_strides;  // elements; within a row they lie densely
  int64_t weight_stride;                  // elements, from column to column of the result
  int64_t num_rows, inner_rows;           // inner_rows: of a group, see RowStrides
  int64_t num_columns, width;             // of the result; of the input
  DType dtype;                            // float16 or bfloat16
};

PAGEDINFER_FOR_EACH_ISA(
    // Floats of scratch, at a multiple of 64 bytes, for these numbers of rows and their width.
    int64_t half_linear_packed_size(int64_t num_rows, int64_t width);
    void half_linear_cpu(const HalfLinearParams& params);)

}  // namespace pagedinfer
