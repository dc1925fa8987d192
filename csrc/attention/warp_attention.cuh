// The attention of one warp over tiles of 16 keys that lie in its part of shared memory: what the
// decode kernels are made of.
#pragma once

#include "attention/kernel_params.cuh"
#include "attention/mma_primitives.cuh"
#include "attention/partial_results.cuh"

namespace pagedinfer::attention {

constexpr int kWarpTokens = 16;

template <int HEAD_DIM>
struct DecodeTraits {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  // So many warps share 16 tokens, and each has a part of the columns: one warp has no registers
  // for Q and O of a head_dim of 256.
  static constexpr int kHeadWarps = HEAD_DIM <= 128 ? 1 : 2;
  static constexpr int kColumns = HEAD_DIM / kHeadWarps;  // of one warp
  static constexpr int kStepTokens = kWarps / kHeadWarps * kWarpTokens;
  static constexpr int kSteps = kTileTokens / kStepTokens;  // of a tile

  using Rows = TileRows<kColumns>;
  static constexpr int kRowsBytes = kWarpTokens * Rows::kRowBytes;  // K or V of a warp's 16 tokens
  static constexpr int kWarpStageBytes = 2 * kRowsBytes;
  static constexpr int kStageBytes = kWarps * kWarpStageBytes;

  static constexpr int kScalesBytes = kWarps * kDecodeRows * static_cast<int>(sizeof(float2));
  // What warps that share tokens leave each other in a step, their parts of the scores: float4s.
  // Two steps' places in turn.
  static constexpr int kScoreVectors = kHeadWarps > 1 ? kWarps * kDecodeRows * kWarpTokens / 4 : 0;
  static constexpr int kScoresBytes = 2 * kScoreVectors * static_cast<int>(sizeof(float4));

  static_assert(kHeadWarps <= 2 && kWarpStageBytes >= WarpSums<kColumns>::kFloats * 4);

  // Which of a step's 16 tokens this warp has, and where its columns begin.
  static __device__ __forceinline__ int token_warp() {
    return static_cast<int>(threadIdx.x) / 32 / kHeadWarps;
  }
  static __device__ __forceinline__ int first_column() {
    return kHeadWarps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 % kHeadWarps * kColumns;
  }
};

// The attention of one warp over its share of a unit's keys; of kHeadWarps warps that share keys,
// over its part of the columns.
template <typename T, int HEAD_DIM>
struct WarpAttention {
  using Traits = DecodeTraits<HEAD_DIM>;
  using Rows = typename Traits::Rows;
  static constexpr int kSlices = Traits::kColumns / 16;

  uint32_t query[kSlices][4];
  float sums[Traits::kColumns / 8][4];
  float maximum[2], sum[2];      // of rows g and g + 8; `sum` of this lane's columns only
  int last_key[2];               // that the rows see; with a window they see `window` keys up to it
  int all_see_to, all_see_from;  // keys in between are seen by every row

  __device__ __forceinline__ void start(const KernelParams& p, const SequenceRecord& s,
                                        const UnitRows& unit) {
    const int group_lane = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    const int kv_head = unit.kv_head, first_row = unit.first_row, rows = unit.rows;
    const T* rows_of[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + smaller(group_lane + 8 * half, rows - 1);
      rows_of[half] = static_cast<const T*>(p.op.query) +
                      decode_row_offset(p, s.query_start, kv_head, row, p.op.query_stride_token,
                                        p.op.query_stride_head) +
                      Traits::first_column();
      last_key[half] = s.seq_len - s.query_len + decode_token(p, row);
      maximum[half] = -INFINITY;
      sum[half] = 0.0f;
    }
    all_see_to = s.seq_len - s.query_len;
    all_see_from = p.window > 0 ? s.seq_len - p.window : 0;
    // Rows past the last are zeros: their scores are zeros, and nobody looks at them.
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool valid = group_lane + 8 * (i & 1) < rows;
        const T* from = rows_of[i & 1] + slice * 16 + i / 2 * 8 + pair * 2;
        query[slice][i] = valid ? *reinterpret_cast<const uint32_t*>(from) : 0;
      }
    }
  }

  // Before a part. Apart from start(), so that the sums take no registers while a part is written.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < Traits::kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    }
  }

  // The same by one warp, for the one newest token of a sequence; Q lies in shared memory.
  __device__ __forceinline__ void start_newest(int seq_len, int window, uint32_t from) {
    static_assert(Traits::kHeadWarps == 1);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      last_key[half] = seq_len - 1;
      maximum[half] = -INFINITY;
      sum[half] = 0.0f;
    }
    all_see_to = seq_len - 1;
    all_see_from = window > 0 ? seq_len - window : 0;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      load_matrices(query[slice], from + Rows::offset(lane % 16, slice * 2 + lane / 16));
    }
  }

  // `stage`: K, then V of tokens first .. first + 15. Params have a ScoreScale and a window.
  // `place`: of kScoreVectors, for the scores of warps that share tokens; another than the call's
  // before.
  template <typename Params>
  __device__ __forceinline__ void step(const Params& p, uint32_t stage, int first,
                                       float4* place = nullptr) {
    const int lane = threadIdx.x % 32;

    float scores[2][4] = {};
    {
      const int row = lane / 16 * 8 + lane % 8, half = lane / 8 & 1;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        uint32_t k[4];
        load_matrices(k, stage + Rows::offset(row, slice * 2 + half));
        multiply_add<T>(scores[0], query[slice], k[0], k[1]);
        multiply_add<T>(scores[1], query[slice], k[2], k[3]);
      }
    }
    if constexpr (Traits::kHeadWarps > 1) add_other_columns(scores, place);
    if (p.score.capped || p.score.negated) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scores[i / 4][i % 4] = transformed_score(scores[i / 4][i % 4], p.score);
      }
    }
    if (first + kWarpTokens - 1 > all_see_to || first < all_see_from) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int last = last_key[i % 4 / 2];
        const bool seen = key <= last && (p.window == 0 || key > last - p.window);
        if (!seen) scores[i / 4][i % 4] = -INFINITY;
      }
    }

    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* low = &scores[0][half * 2];
      float* high = &scores[1][half * 2];
      float m = fmaxf(fmaxf(low[0], low[1]), fmaxf(high[0], high[1]));
      m = fmaxf(m, __shfl_xor_sync(kWarpMask, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kWarpMask, m, 2));
      m = fmaxf(maximum[half], m * p.score.factor);
      const float reference = m == -INFINITY ? 0.0f : m;
      rescale[half] = exp2_fast(maximum[half] - reference);
      maximum[half] = m;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        low[i] = exp2_fast(fmaf(low[i], p.score.factor, -reference));
        high[i] = exp2_fast(fmaf(high[i], p.score.factor, -reference));
      }
      sum[half] = sum[half] * rescale[half] + ((low[0] + low[1]) + (high[0] + high[1]));
    }
    // The maximum settles after a few tiles; from then on this is skipped.
    if (__any_sync(kWarpMask, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < Traits::kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= rescale[i / 2];
      }
    }

    const uint32_t weights[4] = {
        pack<T>(scores[0][0], scores[0][1]), pack<T>(scores[0][2], scores[0][3]),
        pack<T>(scores[1][0], scores[1][1]), pack<T>(scores[1][2], scores[1][3])};
    {
      const int row = lane % 16, half = lane / 16;
      const uint32_t values = stage + Traits::kRowsBytes;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        uint32_t v[4];
        load_matrices_transposed(v, values + Rows::offset(row, slice * 2 + half));
        multiply_add<T>(sums[slice * 2], weights, v[0], v[1]);
        multiply_add<T>(sums[slice * 2 + 1], weights, v[2], v[3]);
      }
    }
  }

  // A barrier of the warps that share tokens.
  static __device__ __forceinline__ void meet() {
    if constexpr (Traits::kHeadWarps > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + Traits::token_warp()), "n"(32 * Traits::kHeadWarps)
                   : "memory");
    }
  }

  // Adds the scores over the other warp's columns. Both warps get the same bits.
  __device__ __forceinline__ void add_other_columns(float (&scores)[2][4], float4* place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      place[(warp * 2 + i) * 32 + lane] = {scores[i][0], scores[i][1], scores[i][2], scores[i][3]};
    }
    meet();  // the next step leaves its scores elsewhere, so that one barrier is enough
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 other = place[((warp ^ 1) * 2 + i) * 32 + lane];
      scores[i][0] += other.x;
      scores[i][1] += other.y;
      scores[i][2] += other.z;
      scores[i][3] += other.w;
    }
  }

  // Leaves the first `rows` rows' results in shared memory.
  __device__ __forceinline__ void leave(float* sums_to, float2* scales_to, int rows) {
    const int group_lane = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = sum[half];
      l += __shfl_xor_sync(kWarpMask, l, 1);
      l += __shfl_xor_sync(kWarpMask, l, 2);
      const int row = group_lane + 8 * half;
      if (row >= rows) continue;
      if (pair == 0) scales_to[row] = {maximum[half], l};
#pragma unroll
      for (int n = 0; n < Traits::kColumns / 8; ++n) {
        *reinterpret_cast<float2*>(sums_to +
                                   WarpSums<Traits::kColumns>::index(row, n * 8 + pair * 2)) = {
            sums[n][half * 2], sums[n][half * 2 + 1]};
      }
    }
  }
};

}  // namespace pagedinfer::attention
