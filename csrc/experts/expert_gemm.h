// expert_gate_up and expert_down: the two projections of a mixture of experts, each a GEMM for
// every tile of route_experts, with the weight of the tile's expert.
//
//   expert_gate_up   for a position s of a tile of expert e, the pair x = pairs[s]
//       gate = round(weight[e, :inner] . hidden[x / k])
//       up = round(weight[e, inner:] . hidden[x / k])
//       out[s] = round(round(gate / (1 + exp(-gate))) * up)
//   expert_down
//       out[pairs[s]] = round(weight[e] . input[s])
//
// so that what lies between them is in the order of `pairs`, and the results in that of the pairs'
// numbers. Sums are in float32; round() is to the tensors' dtype.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"
#include "experts/route_experts.h"

namespace pagedinfer {

struct ExpertGemmParams {
  const void* input;     // gate_up: [num_tokens, width]; down: [num_pairs, width]
  const void* weight;    // gate_up: [num_experts, 2 * columns, width]; down: [.., columns, width]
  const int32_t* pairs;  // [num_pairs]
  const ExpertTile* tiles;  // [num_tiles]
  void* out;                // [num_pairs, columns]
  int64_t num_tiles, block_rows, k;
  int64_t width;    // elements of a row of input and weight
  int64_t columns;  // of out
  bool is_gate_up;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void expert_gemm_cpu(const ExpertGemmParams& params);)

}  // namespace pagedinfer
