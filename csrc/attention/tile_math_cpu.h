// The arithmetic of paged attention on the CPU: one tile of query rows against one block of keys,
// all in float32. For paged_attention_cpu.cpp alone.
//
// Rows lie in the lanes of vectors. So the scores need no transposed keys, the softmax no
// horizontal sums, and a K or V row that was read once serves all rows of the tile.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/attention_work.h"
#include "common/simd.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// Register tiles: accumulators, operands and one broadcast fill the 32 or 16 vector registers.
#if defined(__AVX512F__)
constexpr int kScoreKeys = 8, kScoreVectors = 3;
constexpr int kCollectRows = 6, kCollectVectors = 4;
#else
constexpr int kScoreKeys = 4, kScoreVectors = 3;
constexpr int kCollectRows = 6, kCollectVectors = 2;
#endif

// Tiles of at most so many rows take the functions for few.
constexpr int kFewRows = kLanes > 4 ? 4 : 2;

// The softmax of a tile's rows so far: over the scores s and values v of the keys seen,
// max = max s, sum = sum of exp(s - max), out = sum of exp(s - max) v. No key: -inf, 0, 0.
struct SoftmaxState {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* out;  // [rows, head_dim]
};

// The keys that each row sees: first[r] <= key < end[r].
struct Visible {
  const int32_t* first;  // [padded rows]
  const int32_t* end;    // [padded rows]
};

// exp(m - max) with m the maximum of one part and max that of the whole; 0 where a part saw no key.
PAGEDINFER_SIMD FloatVector rescale(FloatVector part_max, FloatVector whole_max) {
  return exp(part_max - (whole_max == -kInfinity ? FloatVector{} : whole_max));
}

// ---- scores [keys, padded rows] = key [keys, head_dim] . query [head_dim, padded rows] ----

template <int kVectors>
void score_panel(const float* query, const float* key, int64_t padded_rows, int64_t head_dim,
                 float* scores) {
  FloatVector sums[kScoreKeys][kVectors] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    FloatVector q[kVectors];
    for (int v = 0; v < kVectors; ++v) q[v] = load(query + d * padded_rows + v * kLanes);
    for (int k = 0; k < kScoreKeys; ++k) {
      const FloatVector element = broadcast(key[k * head_dim + d]);
      for (int v = 0; v < kVectors; ++v) sums[k][v] = multiply_add(q[v], element, sums[k][v]);
    }
  }
  for (int k = 0; k < kScoreKeys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      store(scores + k * padded_rows + v * kLanes, sums[k][v]);
    }
  }
}

// `key` and `scores` have room for num_keys rounded up to kScoreKeys.
inline void score(const float* query, const float* key, int64_t num_keys, int64_t padded_rows,
                  int64_t head_dim, float* scores) {
  for (int64_t row = 0; row < padded_rows;) {
    const int64_t vectors = (padded_rows - row) / kLanes;
    for (int64_t k = 0; k < num_keys; k += kScoreKeys) {
      const float* keys = key + k * head_dim;
      float* to = scores + k * padded_rows + row;
      if (vectors >= kScoreVectors) {
        score_panel<kScoreVectors>(query + row, keys, padded_rows, head_dim, to);
      } else if (vectors == 2) {
        score_panel<2>(query + row, keys, padded_rows, head_dim, to);
      } else {
        score_panel<1>(query + row, keys, padded_rows, head_dim, to);
      }
    }
    row += (vectors < kScoreVectors ? vectors : kScoreVectors) * kLanes;
  }
}

// ---- weights = exp(scores - max), in place ----

// Moves max and sum on; correction [padded rows] is what the sums so far are to be multiplied with.
inline void weigh(float* scores, int64_t first_key, int64_t num_keys, int64_t padded_rows,
                  const Visible* visible, float logit_cap, SoftmaxState state, float* correction) {
  for (int64_t row = 0; row < padded_rows; row += kLanes) {
    float* column = scores + row;
    const FloatVector old_max = load(state.max + row);
    FloatVector row_max = old_max;
    if (logit_cap > 0) {
      const FloatVector cap = broadcast(logit_cap);
      for (int64_t k = 0; k < num_keys; ++k) {
        store(column + k * padded_rows, cap * tanh(load(column + k * padded_rows) / cap));
      }
    }
    if (visible != nullptr) {
      const IntVector first = load(visible->first + row), end = load(visible->end + row);
      for (int64_t k = 0; k < num_keys; ++k) {
        const IntVector key = broadcast(static_cast<int32_t>(first_key + k));
        const FloatVector s = load(column + k * padded_rows);
        store(column + k * padded_rows, (key >= first) & (key < end) ? s : broadcast(-kInfinity));
      }
    }
    for (int64_t k = 0; k < num_keys; ++k) row_max = max(load(column + k * padded_rows), row_max);

    const FloatVector scale = rescale(old_max, row_max);
    const FloatVector shift = row_max == -kInfinity ? FloatVector{} : row_max;
    FloatVector sum = load(state.sum + row) * scale;
    for (int64_t k = 0; k < num_keys; ++k) {
      const FloatVector weight = exp(load(column + k * padded_rows) - shift);
      store(column + k * padded_rows, weight);
      sum += weight;
    }
    store(state.max + row, row_max);
    store(state.sum + row, sum);
    store(correction + row, scale);
  }
}

// ---- the same for few rows: scores [rows, kKeyBlock], then weights [keys, kFewRows] ----

// query [rows, head_dim]; `key` has room for num_keys rounded up to 4.
template <int kRows>
void score_few(const float* query, const float* key, int64_t num_keys, int64_t head_dim,
               float* scores) {
  for (int64_t k = 0; k < num_keys; k += 4) {
    FloatVector sums[kRows][4] = {};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      FloatVector q[kRows];
      for (int r = 0; r < kRows; ++r) q[r] = load(query + r * head_dim + d);
      for (int i = 0; i < 4; ++i) {
        const FloatVector elements = load(key + (k + i) * head_dim + d);
        for (int r = 0; r < kRows; ++r) sums[r][i] = multiply_add(q[r], elements, sums[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r) store_lane_sums(scores + r * kKeyBlock + k, sums[r]);
  }
}

inline void score_few(const float* query, const float* key, int64_t num_keys, int64_t num_rows,
                      int64_t head_dim, float* scores) {
  switch (num_rows) {
    case 1:
      return score_few<1>(query, key, num_keys, head_dim, scores);
    case 2:
      return score_few<2>(query, key, num_keys, head_dim, scores);
    case 3:
      return score_few<3>(query, key, num_keys, head_dim, scores);
    case 4:
      return score_few<4>(query, key, num_keys, head_dim, scores);
  }
}

inline void weigh_few(float* scores, int64_t first_key, int64_t num_keys, int64_t num_rows,
                      const Visible& visible, float logit_cap, SoftmaxState state,
                      float* correction, float* weights) {
  int32_t lane_numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) lane_numbers[i] = i;
  const IntVector lanes = load(lane_numbers);
  for (int64_t r = 0; r < num_rows; ++r) {
    float* row = scores + r * kKeyBlock;
    const int64_t past = visible.end[r] - first_key;
    const IntVector first = broadcast(static_cast<int32_t>(visible.first[r] - first_key));
    const IntVector end = broadcast(static_cast<int32_t>(past < num_keys ? past : num_keys));
    FloatVector lane_max = broadcast(state.max[r]);
    for (int64_t k = 0; k < num_keys; k += kLanes) {
      FloatVector s = load(row + k);
      if (logit_cap > 0) s = logit_cap * tanh(s / logit_cap);
      const IntVector key = lanes + static_cast<int32_t>(k);
      s = (key >= first) & (key < end) ? s : broadcast(-kInfinity);
      store(row + k, s);
      lane_max = max(s, lane_max);
    }
    float row_max = lane_max[0];
    for (int i = 1; i < kLanes; ++i) row_max = lane_max[i] > row_max ? lane_max[i] : row_max;

    const FloatVector scale = rescale(broadcast(state.max[r]), broadcast(row_max));
    const float shift = row_max == -kInfinity ? 0 : row_max;
    FloatVector lane_sums = {};
    for (int64_t k = 0; k < num_keys; k += kLanes) {
      const FloatVector weight = exp(load(row + k) - shift);
      store(row + k, weight);
      lane_sums += weight;
    }
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lane_sums[i];
    for (int64_t k = 0; k < num_keys; ++k) weights[k * kFewRows + r] = row[k];
    state.sum[r] = state.sum[r] * scale[0] + sum;
    state.max[r] = row_max;
    correction[r] = scale[0];
  }
}

// ---- out [rows, head_dim] = out * correction + weights^T . value [keys, head_dim] ----

template <int kRows, int kVectors>
void collect_panel(const float* weights, const float* value, const float* correction,
                   int64_t num_keys, int64_t padded_rows, int64_t head_dim, float* out) {
  FloatVector sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load(out + r * head_dim + v * kLanes) * broadcast(correction[r]);
    }
  }
  for (int64_t k = 0; k < num_keys; ++k) {
    FloatVector elements[kVectors];
    for (int v = 0; v < kVectors; ++v) elements[v] = load(value + k * head_dim + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const FloatVector weight = broadcast(weights[k * padded_rows + r]);
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = multiply_add(weight, elements[v], sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(out + r * head_dim + v * kLanes, sums[r][v]);
  }
}

template <int kVectors>
void collect_columns(const float* weights, const float* value, const float* correction,
                     int64_t num_keys, int64_t num_rows, int64_t padded_rows, int64_t head_dim,
                     float* out) {
  static_assert(kCollectRows == 6);
  constexpr decltype(&collect_panel<1, 1>) kPanels[] = {
      collect_panel<1, kVectors>, collect_panel<2, kVectors>, collect_panel<3, kVectors>,
      collect_panel<4, kVectors>, collect_panel<5, kVectors>, collect_panel<6, kVectors>,
  };
  for (int64_t row = 0; row < num_rows; row += kCollectRows) {
    const int64_t rows = num_rows - row < kCollectRows ? num_rows - row : kCollectRows;
    kPanels[rows - 1](weights + row, value, correction + row, num_keys, padded_rows, head_dim,
                      out + row * head_dim);
  }
}

// head_dim is a multiple of 16.
inline void collect(const float* weights, const float* value, const float* correction,
                    int64_t num_keys, int64_t num_rows, int64_t padded_rows, int64_t head_dim,
                    float* out) {
  for (int64_t d = 0; d < head_dim;) {
    const int64_t left = (head_dim - d) / kLanes;
    const int64_t vectors = left < kCollectVectors ? left : kCollectVectors;
    auto* columns = vectors == 4   ? collect_columns<4>
                    : vectors == 3 ? collect_columns<3>
                    : vectors == 2 ? collect_columns<2>
                                   : collect_columns<1>;
    columns(weights, value + d, correction, num_keys, num_rows, padded_rows, head_dim, out + d);
    d += vectors * kLanes;
  }
}

// ---- SoftmaxState ----

inline void clear(SoftmaxState state, int64_t num_rows, int64_t padded_rows, int64_t head_dim) {
  for (int64_t r = 0; r < padded_rows; ++r) {
    state.max[r] = -kInfinity;
    state.sum[r] = 0;
  }
  std::memset(state.out, 0, num_rows * head_dim * sizeof(float));
}

// The state over the keys of both.
inline void merge(SoftmaxState into, SoftmaxState other, int64_t num_rows, int64_t head_dim) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const FloatVector a = broadcast(into.max[r]), b = broadcast(other.max[r]);
    const FloatVector whole = max(a, b);
    const FloatVector scale_a = rescale(a, whole), scale_b = rescale(b, whole);
    into.max[r] = whole[0];
    into.sum[r] = into.sum[r] * scale_a[0] + other.sum[r] * scale_b[0];
    float* out = into.out + r * head_dim;
    const float* added = other.out + r * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(out + d, load(out + d) * scale_a + load(added + d) * scale_b);
    }
  }
}

// out / sum; rows that saw no key are zeros.
inline void normalize(SoftmaxState state, int64_t num_rows, int64_t head_dim) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const float sum = state.sum[r];
    const FloatVector inverse = broadcast(sum == 0 ? 0.0f : 1.0f / sum);
    float* out = state.out + r * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(out + d, load(out + d) * inverse);
  }
}

}  // namespace
}  // namespace CPU_ISA
}  // namespace pagedinfer
