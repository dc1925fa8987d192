// decode_linear: a linear layer over the rows of a step of decodes.
//
//   y[r, i] = round(sum_k input[r, k] * weight[i, k] + bias[i])
//   out[r, i] = gated ? round(round(silu(y[r, i])) * y[r, out_features + i]) : y[r, i]
//
// Sums are in float32; round() is to the tensors' dtype, at the points at which a model written in
// torch operations rounds (silu_and_mul.h). On the CPU it is skinny_linear.h without norm and
// residual.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pagedinfer {

// The most rows that one call takes.
constexpr int64_t kMaxDecodeRows = 128;

// Calls with different queues, of so many, may run at the same time: each queue has counters of its
// own in the GPU's memory.
constexpr int64_t kDecodeLinearQueues = 256;

struct DecodeLinearParams {
  const void* input;                 // [num_rows, in_features]
  const void* weight;                // [num_features, in_features], dense
  const void* bias;                  // [num_features], or null
  void* workspace;                   // room for decode_linear_workspace_floats()
  void* out;                         // [num_rows, out_features]
  int64_t input_stride, out_stride;  // elements, from row to row
  int64_t num_rows, in_features;
  int64_t num_features;  // of the weight: out_features, or twice as many if gated
  int64_t queue;         // below kDecodeLinearQueues
  bool gated;            // the weight's first half is the gate's, its second the other factor's
  DType dtype;           // float16 or bfloat16

  constexpr int64_t out_features() const { return gated ? num_features / 2 : num_features; }
};

}  // namespace pagedinfer
