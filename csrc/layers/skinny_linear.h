// skinny_linear: a linear layer over few rows, with what stands around it in a decoder layer.
//
//   x[r, :] = norm_weight ? rms_norm(input[r, :]) : input[r, :]                 rms_norm.h
//   y[r, i] = round(sum_k x[r, k] * weight[i, k] + bias[i])
//   z[r, i] = gated ? round(silu(y[r, i])) * y[r, out_features + i] : y[r, i]   silu_and_mul.h
//   out[r, i] = round(residual ? residual[r, i] + z[r, i] : z[r, i])
//
// Sums are in float32; round() is to the tensors' dtype, at the points at which a model written in
// torch operations rounds.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

// The most rows that one call takes.
constexpr int64_t kMaxSkinnyRows = 4;

struct SkinnyLinearParams {
  const void* input;        // [num_rows, in_features]
  const void* weight;       // [num_features, in_features], dense
  const void* bias;         // [num_features], or null
  const void* norm_weight;  // [in_features], or null: no norm
  const void* residual;     // [num_rows, out_features], or null; may be `out`
  void* out;                // [num_rows, out_features]
  int64_t input_stride, residual_stride, out_stride;  // elements, from row to row
  int64_t num_rows, in_features;
  int64_t num_features;  // of the weight: out_features, or twice as many if gated
  float epsilon;         // of the norm
  bool gated;            // the weight's first half is the gate's, its second the other factor's
  DType dtype;

  constexpr int64_t out_features() const { return gated ? num_features / 2 : num_features; }
};

PAGEDINFER_FOR_EACH_ISA(void skinny_linear_cpu(const SkinnyLinearParams& params);)

}  // namespace pagedinfer
