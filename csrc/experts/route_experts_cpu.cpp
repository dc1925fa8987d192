#include <cmath>

#include "common/parallel.h"
#include "experts/route_experts.h"
#include "layers/cpu_elements.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kTokensPerTask = 16;

template <typename T>
void route_token(const RouteExpertsParams& p, int64_t token) {
  const T* scores = static_cast<const T*>(p.scores) + token * p.score_stride;
  float values[kMostExperts];
  float largest = kLowestScore;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const float score = to_float(scores[e]);
    values[e] = score > kLowestScore ? score : kLowestScore;
    largest = values[e] > largest ? values[e] : largest;
  }
  float sum = 0.0f;
  for (int64_t e = 0; e < p.num_experts; ++e) sum += std::exp(values[e] - largest);
  float* weights = p.weights + token * p.k;
  float total = 0.0f;
  for (int64_t j = 0; j < p.k; ++j) {
    int64_t best = 0;
    for (int64_t e = 1; e < p.num_experts; ++e) {
      if (values[e] > values[best]) best = e;
    }
    weights[j] = std::exp(values[best] - largest) / sum;
    total += weights[j];
    values[best] = -INFINITY;  // taken
    p.experts[token * p.k + j] = static_cast<int32_t>(best);
  }
  for (int64_t j = 0; p.renormalize && j < p.k; ++j) weights[j] /= total;
}

// A counting sort of the pairs by expert, and the tiles of each expert.
void sort_pairs(const RouteExpertsParams& p) {
  const int64_t num_pairs = p.num_tokens * p.k;
  int32_t next[kMostExperts] = {};
  for (int64_t i = 0; i < num_pairs; ++i) ++next[p.experts[i]];
  int32_t begin = 0;
  ExpertTile* tile = p.tiles;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    const int32_t end = begin + next[e];
    next[e] = begin;
    for (int64_t at = begin; at < end; at += p.block_rows) {
      const int64_t stop = at + p.block_rows < end ? at + p.block_rows : end;
      *tile++ = {static_cast<int32_t>(e), static_cast<int32_t>(at), static_cast<int32_t>(stop)};
    }
    begin = end;
  }
  while (tile < p.tiles + p.max_tiles) *tile++ = {-1, 0, 0};
  for (int64_t i = 0; i < num_pairs; ++i) {
    p.pairs[next[p.experts[i]]++] = static_cast<int32_t>(i);
  }
}

}  // namespace

void route_experts_cpu(const RouteExpertsParams& p) {
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.num_tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) route_token<T>(p, token);
    });
  });
  sort_pairs(p);
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
