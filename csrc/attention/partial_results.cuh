// How a unit that was computed in parts becomes an output: parts go to the workspace, and the block
// that finishes last merges them, in the same launch. (A second kernel for the merge would cost
// every layer its launch, about 1 us in a graph, and could not overlap with the blocks still
// reading.)
//
// A part's result for one packed row is the maximum m of its scores, the sum l of 2^(score - m) and
// the sums o[HEAD_DIM] of 2^(score - m) * value. Two results fold into one (Milakov and Gimelshein,
// 2018):
//   m = max(m1, m2);  l = l1 2^(m1 - m) + l2 2^(m2 - m);  o likewise
//
//   workspace   shape                                         dtype
//   sums        [grid * kSlotsPerBlock, partial_rows, D]      float32
//   scales      [grid * kSlotsPerBlock, partial_rows]         float2 (m, l)
#pragma once

#include "attention/kernel_params.cuh"
#include "attention/mma_primitives.cuh"

namespace pagedinfer::attention {

// Online softmax over four neighbouring columns of a row. Empty: maximum -inf, all else 0. Written
// with explicit roundings: deterministic mode folds in more than one place and needs equal bits.
struct RowState {
  float maximum, sum;
  float4 value;

  __device__ __forceinline__ void fold(const RowState& next) {
    const float m = fmaxf(maximum, next.maximum);
    const float reference = m == -INFINITY ? 0.0f : m;  // -inf - -inf is NaN
    const float a = exp2_fast(maximum - reference), b = exp2_fast(next.maximum - reference);
    maximum = m;
    sum = __fmaf_rn(sum, a, __fmul_rn(next.sum, b));
    value.x = __fmaf_rn(value.x, a, __fmul_rn(next.value.x, b));
    value.y = __fmaf_rn(value.y, a, __fmul_rn(next.value.y, b));
    value.z = __fmaf_rn(value.z, a, __fmul_rn(next.value.z, b));
    value.w = __fmaf_rn(value.w, a, __fmul_rn(next.value.w, b));
  }

  // The attention output; zeros for a row that saw no key.
  __device__ __forceinline__ float4 normalized() const {
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    return {value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse};
  }
};

template <typename T>
__device__ __forceinline__ void store_row(T* to, float4 v) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = v;
  } else {
    *reinterpret_cast<uint2*>(to) = {pack<T>(v.x, v.y), pack<T>(v.z, v.w)};
  }
}

// The element of `out` (or, with the strides of the query, of the query) that packed row `row` of a
// KV head begins at.
__device__ __forceinline__ int64_t row_offset(const KernelParams& p, int query_start, int kv_head,
                                              int row, int64_t stride_token, int64_t stride_head) {
  const int token = row / p.group, head = row % p.group;
  return (query_start + token) * stride_token +
         (static_cast<int64_t>(kv_head) * p.group + head) * stride_head;
}

template <typename T, int HEAD_DIM>
__device__ __forceinline__ T* output_row(const KernelParams& p, int query_start, int kv_head,
                                         int row) {
  return static_cast<T*>(p.op.out) +
         row_offset(p, query_start, kv_head, row, p.op.num_heads * HEAD_DIM, HEAD_DIM);
}

// What several warps of a block leave in shared memory: the results of the keys that each has seen.
// Rows of `sums` are HEAD_DIM floats; their columns are xored by the row so that the rows which a
// warp writes at a time lie in different banks.
template <int HEAD_DIM>
struct WarpSums {
  static constexpr int kFloats = kDecodeRows * HEAD_DIM;

  static __device__ __forceinline__ int index(int row, int column) {
    return row * HEAD_DIM + (HEAD_DIM % 32 == 0 ? column ^ ((row & 3) << 3) : column);
  }
};

// One part of a unit, as its block has it.
struct Part {
  const SequenceRecord* sequence;
  int unit;  // KV head * slices + slice
  PartSlots slots;
  bool prefix;         // the block's range holds the unit's first tile
  bool accumulates;    // earlier chunks of the prefix are to be folded in
  bool complete;       // and with this part the unit is whole
  bool last_of_block;  // no further part of the unit follows in this block
  int chunk;           // deterministic mode; else 0
};

template <typename T, int HEAD_DIM, int THREADS>
struct PartWriter {
  static constexpr int kColumns = HEAD_DIM / 4;

  const KernelParams& p;
  const PlanView& plan;
  float* sums;
  float2* scales;

  __device__ PartWriter(const KernelParams& p, const PlanView& plan)
      : p(p),
        plan(plan),
        sums(p.op.workspace),
        scales(reinterpret_cast<float2*>(p.op.workspace + static_cast<int64_t>(p.grid) *
                                                              kSlotsPerBlock * p.partial_rows *
                                                              HEAD_DIM)) {}

  __device__ __forceinline__ RowState load(int slot, int row, int column) const {
    const int64_t at = static_cast<int64_t>(slot) * p.partial_rows + row;
    const float2 scale = __ldcg(scales + at);
    return {scale.x, scale.y,
            __ldcg(reinterpret_cast<const float4*>(sums + at * HEAD_DIM + column))};
  }

  __device__ __forceinline__ void store(int slot, int row, int column, const RowState& s) const {
    const int64_t at = static_cast<int64_t>(slot) * p.partial_rows + row;
    *reinterpret_cast<float4*>(sums + at * HEAD_DIM + column) = s.value;
    if (column == 0) scales[at] = {s.maximum, s.sum};
  }

  // The whole block; what the warps left must be visible. warp_scales: [WARPS][kDecodeRows] (m, l);
  // warp_sums: WarpSums of warp w at warp_sums + w * stride. `flag`: one int of shared memory.
  template <int WARPS>
  __device__ void finish(const Part& part, const float2 (*warp_scales)[kDecodeRows],
                         const float* warp_sums, int stride, int* flag) const {
    const SequenceRecord& s = *part.sequence;
    const int kv_head = part.unit / p.slices;
    const int first_row = part.unit % p.slices * kDecodeRows;
    const int rows = smaller(kDecodeRows, s.query_len * p.group - first_row);
    const bool whole = part.prefix && part.complete;
    const int block = blockIdx.x;
    const int slot = part.prefix ? part.slots.prefix_slot(block, part.chunk)
                                 : part.slots.later_slot(block, part.chunk);

    for (int i = threadIdx.x; i < rows * kColumns; i += THREADS) {
      const int row = i / kColumns, column = i % kColumns * 4;
      RowState state{-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 scale = warp_scales[w][row];
        const RowState next{scale.x, scale.y,
                            *reinterpret_cast<const float4*>(
                                warp_sums + w * stride + WarpSums<HEAD_DIM>::index(row, column))};
        if (w == 0) {
          state = next;
        } else {
          state.fold(next);
        }
      }
      if (part.accumulates) {
        RowState earlier = load(part.slots.prefix_slot(block, part.chunk - 1), row, column);
        earlier.fold(state);
        state = earlier;
      }
      if (whole) {
        store_row(output_row<T, HEAD_DIM>(p, s.query_start, kv_head, first_row + row) + column,
                  state.normalized());
      } else {
        store(slot, row, column, state);
      }
    }
    if (whole || (part.prefix && !part.last_of_block)) return;

    __syncthreads();  // the block's writes come before thread 0's fence
    if (threadIdx.x == 0) {
      __threadfence();
      int* counter = plan.counters + part.slots.first_block;
      const int parts = part.slots.num_parts();
      const bool last = atomicAdd(counter, 1) == parts - 1;
      if (last) *counter = 0;
      *flag = last ? parts : 0;
    }
    __syncthreads();
    const int parts = *flag;
    if (parts == 0) return;
    __threadfence();
    for (int i = threadIdx.x; i < rows * kColumns; i += THREADS) {
      const int row = i / kColumns, column = i % kColumns * 4;
      const RowState state = merge(part.slots, parts, row, column);
      store_row(output_row<T, HEAD_DIM>(p, s.query_start, kv_head, first_row + row) + column,
                state.normalized());
    }
  }

  // Left to right, several loads in flight.
  __device__ __forceinline__ RowState merge(const PartSlots& slots, int parts, int row,
                                            int column) const {
    constexpr int kBatch = 8;
    RowState state = load(slots.slot(0), row, column);
    for (int first = 1; first < parts; first += kBatch) {
      RowState next[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < parts) next[i] = load(slots.slot(first + i), row, column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < parts) state.fold(next[i]);
      }
    }
    return state;
  }
};

// Rows that belong to no sequence, and those of sequences of length 0. The whole decode grid.
template <typename T>
__device__ void write_zero_rows(const KernelParams& p, const PlanView& plan, int threads) {
  const int64_t vectors = p.op.num_heads * p.op.head_dim * static_cast<int64_t>(sizeof(T)) / 16;
  auto* out = static_cast<uint4*>(p.op.out);
  auto zero = [&](int64_t row) {
    for (int64_t i = threadIdx.x; i < vectors; i += threads) out[row * vectors + i] = {0, 0, 0, 0};
  };
  for (int64_t row = plan.header->first_padded_row + blockIdx.x; row < p.op.num_tokens;
       row += gridDim.x) {
    zero(row);
  }
  for (int run = blockIdx.x; run < plan.header->num_zero_runs; run += gridDim.x) {
    const ZeroRun zeros = plan.zero_runs[run];
    for (int row = 0; row < zeros.num_rows; ++row) zero(zeros.first_row + row);
  }
}

}  // namespace pagedinfer::attention
