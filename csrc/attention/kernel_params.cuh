// What every paged_attention kernel is given: the op's params and what the launcher derived from
// them.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>

#include "attention/paged_attention.h"
#include "attention/work_partition.h"

namespace pagedinfer::attention {

constexpr unsigned kWarpMask = ~0u;  // all lanes of a warp

// Scores in base 2, as the kernels use them: weight = 2^(factor * score - maximum), where
//   no cap:  score = q . k,                      factor = scale * log2(e)
//   a cap:   score = tanh(q . k * scale / cap),  factor = cap * log2(e)
// The factor is made positive, so that the largest score has the largest weight; then a negative
// scale turns the scores round.
struct ScoreScale {
  float factor, inverse;  // inverse: 1 / factor
  float inner;            // scale / cap with a cap; -1: turn the score round; 1: leave it
  bool capped, negated;

  ScoreScale(float scale, float cap) {
    constexpr float kLog2E = 1.4426950408889634f;
    capped = cap > 0;
    negated = !capped && scale < 0;
    inner = capped ? scale / cap : negated ? -1.0f : 1.0f;
    // Not 0: a masked score is -inf, and -inf * 0 is NaN.
    factor = std::fmax((capped ? cap : std::fabs(scale)) * kLog2E, FLT_MIN);
    inverse = 1.0f / factor;
  }
};

struct KernelParams;

// Where packed row `row` of a tile lies whose first row is of head `first_head` of its group: so
// many query tokens after the first row's, and at which head. Without a division: exact as long as
// group * (first_head + row) < 2^31.
struct RowPlace {
  int token, head;

  __device__ __forceinline__ RowPlace(const KernelParams& p, int first_head, int row);

  static unsigned reciprocal(int group) { return ((1u << 31) + group - 1) / group; }
};

struct KernelParams {
  PagedAttentionParams op;
  ScoreScale score;
  int group;                  // query heads that share a KV head
  unsigned group_inverse;     // see decode_token
  unsigned group_reciprocal;  // see RowPlace
  int slices;                 // row_slices(group)
  int units;                  // of a decode sequence: num_kv_heads * slices
  int block_shift;            // log2(block_size)
  uint32_t block_vectors;  // cache_stride_block in units of 16 bytes, in which 32 bits are enough
  int partial_rows;        // rows of a partial result in the workspace
  int window;              // sliding_window; 0: none
  int grid;                // blocks of the decode grid
  int stages;              // tiles of the decode kernel's ring in shared memory
  bool beside_prefill;     // the decode kernel runs beside the prefill kernel before it
};

// Which of a decode sequence's query tokens packed row `row` is of: row / group, without a
// division. There is one token if the group is larger than a unit; else there are at most
// kDecodeRows rows.
inline unsigned decode_group_inverse(int group) {
  return group > kDecodeRows ? 0 : (65536 + group - 1) / group;
}

__device__ __forceinline__ int decode_token(const KernelParams& p, int row) {
  return static_cast<int>(row * p.group_inverse >> 16);
}

__device__ __forceinline__ RowPlace::RowPlace(const KernelParams& p, int first_head, int row) {
  const int from = first_head + row;
  token = static_cast<int>(static_cast<uint64_t>(from) * p.group_reciprocal >> 31);
  head = from - token * p.group;
}

// The arrays of the plan (see work_partition.h).
struct PlanView {
  const PlanHeader* header;
  const BlockRecord* blocks;
  int* counters;     // zero between launches; the block that resets one is the last to use it
  int* units_asked;  // the same, where units are dealt
  const SequenceRecord* sequences;
  const SequenceRecord* by_length;  // the same, the longest first, where units are dealt
  const ZeroRun* zero_runs;
  const PrefillTile* prefill_tiles;

  __device__ explicit PlanView(const KernelParams& p) {
    const PlanLayout layout(p.grid, p.op.num_seqs);
    const int32_t* plan = p.op.plan;
    header = reinterpret_cast<const PlanHeader*>(plan);
    blocks = reinterpret_cast<const BlockRecord*>(plan + layout.blocks);
    counters = const_cast<int*>(plan + layout.counters);
    units_asked = const_cast<int*>(plan + layout.units_asked);
    sequences = reinterpret_cast<const SequenceRecord*>(plan + layout.sequences);
    by_length = reinterpret_cast<const SequenceRecord*>(plan + layout.by_length);
    zero_runs = reinterpret_cast<const ZeroRun*>(plan + layout.zero_runs);
    prefill_tiles = reinterpret_cast<const PrefillTile*>(plan + layout.prefill_tiles);
  }
};

// Takes one of the units that are not dealt beforehand; num_units or more if there is none left.
// One thread of each block calls it until then, so that the last one to ask resets the counter.
__device__ __forceinline__ int take_unit(const PlanView& plan, const UnitDeal& deal) {
  const int asked = atomicAdd(plan.units_asked, 1);
  if (asked == deal.times_asked() - 1) *plan.units_asked = 0;
  return deal.taken(asked);
}

// The bytes of one KV head's K in a block of the cache; its V lies value_bytes further on.
template <typename T, int HEAD_DIM>
struct HeadPages {
  const char* base;
  int64_t value_bytes;

  __device__ __forceinline__ HeadPages(const KernelParams& p, int kv_head) {
    const int64_t head_bytes = static_cast<int64_t>(HEAD_DIM * sizeof(T)) << p.block_shift;
    base = static_cast<const char*>(p.op.kv_cache) + kv_head * head_bytes;
    value_bytes = p.op.num_kv_heads * head_bytes;
  }

  __device__ __forceinline__ const char* page(const KernelParams& p, int id) const {
    return base + (static_cast<uint64_t>(static_cast<uint32_t>(id)) * p.block_vectors) * 16;
  }
};

// tanh(s * inner) = 1 - 2 / (1 + e^2x) is exact to 1e-7 of the score's scale of 1, where
// tanh.approx has 5e-4: with a cap of 50 that would be 2.5 % of a weight.
__device__ __forceinline__ float capped_score(float s, float inner) {
  return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * s * inner));
}

// A score as the softmax takes it (see ScoreScale).
__device__ __forceinline__ float transformed_score(float s, const ScoreScale& score) {
  return score.capped ? capped_score(s, score.inner) : s * score.inner;
}

}  // namespace pagedinfer::attention
