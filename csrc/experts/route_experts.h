// route_experts: which experts each token goes to, with which weights, and the work that follows.
//
//   p = softmax(scores[t, :])                       in float32
//   experts[t, :] = the k largest of p, the lower number first where two are equal
//   weights[t, j] = p[experts[t, j]]                over their sum, if `renormalize`
//
// A pair is a token and one of its experts: number t * k + j. `pairs` has the pairs of expert 0,
// then those of expert 1, and so on, in any order within an expert; `tiles` cuts each expert's
// stretch of it into pieces of at most block_rows.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

constexpr int64_t kMostExperts = 512;  // of a layer
constexpr int64_t kMostExpertsOfAToken = 32;
constexpr float kLowestScore = -3.4e38f;  // what is no number, or below this, counts as this

// A stretch of `pairs` that one expert has.
struct ExpertTile {
  int32_t expert;  // -1: none; there is more room for tiles than there are
  int32_t begin, end;
};

struct RouteExpertsParams {
  const void* scores;    // [num_tokens, num_experts]
  float* weights;        // [num_tokens, k]
  int32_t* experts;      // [num_tokens, k]
  int32_t* pairs;        // [num_tokens * k]
  ExpertTile* tiles;     // [max_tiles]
  int64_t score_stride;  // elements from one token's scores to the next's
  int64_t num_tokens, num_experts, k, max_tiles, block_rows;
  bool renormalize;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void route_experts_cpu(const RouteExpertsParams& params);)

}  // namespace pagedinfer
