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

  // The same with a result (m, l), o whose maximum is `reference` at most; so is this one's, which
  // has been rescaled. Folding several under the maximum of all is the shorter chain.
  __device__ __forceinline__ void add(float2 scale, float4 next, float reference) {
    const float weight = exp2_fast(scale.x - reference);
    sum = __fmaf_rn(scale.y, weight, sum);
    value.x = __fmaf_rn(next.x, weight, value.x);
    value.y = __fmaf_rn(next.y, weight, value.y);
    value.z = __fmaf_rn(next.z, weight, value.z);
    value.w = __fmaf_rn(next.w, weight, value.w);
  }

  __device__ __forceinline__ void rescale(float by) {
    sum = __fmul_rn(sum, by);
    value = {__fmul_rn(value.x, by), __fmul_rn(value.y, by), __fmul_rn(value.z, by),
             __fmul_rn(value.w, by)};
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

// The same of a decode sequence.
__device__ __forceinline__ int64_t decode_row_offset(const KernelParams& p, int query_start,
                                                     int kv_head, int row, int64_t stride_token,
                                                     int64_t stride_head) {
  const int token = decode_token(p, row), head = row - token * p.group;
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

// The packed rows of a unit.
struct UnitRows {
  int query_start, kv_head;
  int first_row, rows;
  bool has_prefix = false;  // the results of a shared prefix are to be folded in
};

// What WARPS warps have left in shared memory: (m, l) of each warp and row, and WarpSums, those of
// warp w at sums + w * stride. HEAD_WARPS neighbouring warps share keys, and each has a part of the
// columns.
template <int HEAD_DIM, int WARPS, int HEAD_WARPS = 1>
struct WarpResults {
  static constexpr int kColumns = HEAD_DIM / HEAD_WARPS, kShares = WARPS / HEAD_WARPS;

  const float2 (*scales)[kDecodeRows];
  const float* sums;
  int stride;

  __device__ __forceinline__ RowState fold(int row, int column) const {
    float2 scale[kShares];
    float4 value[kShares];
    float m = -INFINITY;
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const int warp = i * HEAD_WARPS + (HEAD_WARPS == 1 ? 0 : column / kColumns);
      const int at = WarpSums<kColumns>::index(row, HEAD_WARPS == 1 ? column : column % kColumns);
      scale[i] = scales[warp][row];
      value[i] = *reinterpret_cast<const float4*>(sums + warp * stride + at);
      m = fmaxf(m, scale[i].x);
    }
    RowState state{m, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    const float reference = m == -INFINITY ? 0.0f : m;
#pragma unroll
    for (int i = 0; i < kShares; ++i) state.add(scale[i], value[i], reference);
    return state;
  }
};

// The results of shared prefixes, which one kernel writes and the next reads: of each split, row
// and head. `row_head`: row * num_heads + head.
//
//   sums     [prefix_splits, num_tokens, num_heads, D]   float32
//   scales   [prefix_splits, num_tokens, num_heads]      float2 (m, l)
template <int HEAD_DIM>
struct PrefixResults {
  float* sums;
  float2* scales;
  int64_t rows;  // of a split

  __device__ __forceinline__ explicit PrefixResults(const KernelParams& p)
      : sums(p.op.prefix_results),
        scales(
            reinterpret_cast<float2*>(p.op.prefix_results + p.op.prefix_splits * p.op.num_tokens *
                                                                p.op.num_heads * HEAD_DIM)),
        rows(p.op.num_tokens * p.op.num_heads) {}

  __device__ __forceinline__ RowState load(int split, int64_t row_head, int column) const {
    const int64_t at = split * rows + row_head;
    const float2 scale = scales[at];
    return {scale.x, scale.y, *reinterpret_cast<const float4*>(sums + at * HEAD_DIM + column)};
  }
};

// One part of a unit, as its block has it, or one chunk of it: tiles `tile` .. `end` - 1.
struct Part {
  int unit;         // KV head * slices + slice
  int tile, end;    // within the unit
  int range_end;    // where the block's tiles of the unit end: beyond `end` there are more chunks
  bool prefix;      // the block's range holds the unit's first tile
  bool first_unit;  // it is the one that the block began with
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

  // The whole block; what the warps left must be visible. `flag`: one int of shared memory.
  template <typename Results>
  __device__ __forceinline__ void write(const BlockRecord& record, const SequenceRecord& sequence,
                                        const UnitRows& rows, const Part& part,
                                        const Results& results, int* flag) const {
    if (part.prefix && part.tile == 0 && part.end == sequence.num_tiles) {
      for_each(rows,
               [&](int row, int column) { output(rows, row, column, results.fold(row, column)); });
    } else if (!record.deterministic) {
      const bool began_earlier = part.first_unit && !part.prefix;
      write_part(rows, part.prefix, results, began_earlier ? record.owner : blockIdx.x,
                 began_earlier ? record.first_parts : record.last_parts, flag);
    } else {
      write_chunk(record, sequence, rows, part, results, flag);
    }
  }

 private:
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

  __device__ __forceinline__ void output(const UnitRows& unit, int row, int column,
                                         RowState state) const {
    const int64_t at = decode_row_offset(p, unit.query_start, unit.kv_head, unit.first_row + row,
                                         p.op.num_heads, 1);
    if (unit.has_prefix) {
      const PrefixResults<HEAD_DIM> results(p);
#pragma unroll 4  // the loads of four parts are under way together
      for (int split = 0; split < p.op.prefix_splits; ++split) {
        state.fold(results.load(split, at, column));
      }
    }
    store_row(static_cast<T*>(p.op.out) + at * HEAD_DIM + column, state.normalized());
  }

  template <typename Body>
  __device__ __forceinline__ void for_each(const UnitRows& unit, const Body& body) const {
    for (int i = threadIdx.x; i < unit.rows * kColumns; i += THREADS) {
      body(i / kColumns, i % kColumns * 4);
    }
  }

  // Counts a part in; true for the last of `parts`, which sees what all have written.
  __device__ __forceinline__ bool is_last(int owner, int parts, int* flag) const {
    __syncthreads();  // the block's writes come before thread 0's release
    if (threadIdx.x == 0) {
      int* counter = plan.counters + owner;
      const bool last = count_in(counter) == parts - 1;
      if (last) *counter = 0;
      *flag = last;
    }
    __syncthreads();  // and thread 0's acquire before the block's reads
    return *flag != 0;
  }

  // A part of a unit that lies in `parts` blocks from `owner` on.
  template <typename Results>
  __device__ __forceinline__ void write_part(const UnitRows& rows, bool prefix,
                                             const Results& results, int owner, int parts,
                                             int* flag) const {
    const int slot = part_slot(blockIdx.x, prefix);
    for_each(rows,
             [&](int row, int column) { store(slot, row, column, results.fold(row, column)); });
    if (!is_last(owner, parts, flag)) return;
    for_each(rows, [&](int row, int column) {
      output(rows, row, column, merge(owner, parts, row, column));
    });
  }

  // Several loads in flight; each batch is folded under the maximum of all in it.
  __device__ __forceinline__ RowState merge(int owner, int parts, int row, int column) const {
    constexpr int kBatch = 8;
    RowState state{-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    const int64_t first_at = static_cast<int64_t>(part_slot(owner, false)) * p.partial_rows + row;
    const float2* scale_from = scales + first_at;
    const float* sums_from = sums + first_at * HEAD_DIM + column;
    const int stride = kSlotsPerBlock * p.partial_rows, prefix = kPrefixSlot * p.partial_rows;
#pragma unroll 1
    for (int first = 0; first < parts; first += kBatch) {
      float2 scale[kBatch];
      float4 value[kBatch];
      float m = state.maximum;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = first + i;
        const int at = part == 0 ? prefix : part * stride;
        scale[i] = {-INFINITY, 0.0f};
        value[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (part < parts) {
          scale[i] = __ldcg(scale_from + at);
          value[i] = __ldcg(
              reinterpret_cast<const float4*>(sums_from + static_cast<int64_t>(at) * HEAD_DIM));
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) m = fmaxf(m, scale[i].x);
      const float reference = m == -INFINITY ? 0.0f : m;
      state.rescale(exp2_fast(state.maximum - reference));
      state.maximum = m;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) state.add(scale[i], value[i], reference);
    }
    return state;
  }

  // Deterministic mode: chunks are folded from the left, one by one.
  template <typename Results>
  __device__ __forceinline__ void write_chunk(const BlockRecord& record,
                                              const SequenceRecord& sequence, const UnitRows& rows,
                                              const Part& part, const Results& results,
                                              int* flag) const {
    const Unit unit{sequence.list_begin + part.unit * sequence.num_tiles, sequence.num_tiles,
                    chunk_tiles(sequence.num_tiles, true)};
    const ChunkSlots slots(Partition(record.total_tiles, gridDim.x), unit);
    const int block = blockIdx.x, chunk = part.tile / unit.chunk;
    const bool whole = part.prefix && part.end == unit.num_tiles;
    const int slot = part.prefix ? slots.prefix_slot(block, chunk) : slots.later_slot(block, chunk);
    for_each(rows, [&](int row, int column) {
      RowState state = results.fold(row, column);
      if (part.prefix && chunk > 0) {
        RowState earlier = load(slots.prefix_slot(block, chunk - 1), row, column);
        earlier.fold(state);
        state = earlier;
      }
      if (whole) {
        output(rows, row, column, state);
      } else {
        store(slot, row, column, state);
      }
    });
    if (whole || (part.prefix && part.end < part.range_end)) return;

    const int parts = slots.num_parts();
    if (!is_last(slots.first_block, parts, flag)) return;
    for_each(rows, [&](int row, int column) {
      constexpr int kBatch = 4;
      RowState state = load(slots.slot(0), row, column);
#pragma unroll 1
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
      output(rows, row, column, state);
    });
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
