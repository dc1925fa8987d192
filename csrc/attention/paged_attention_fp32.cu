// Attention in fp32, decode and prefill: fused multiply-adds throughout, never TF32.
//
//   for Q [16 x D] packed query rows, over steps of 32 keys:
//     S = Q K^T;  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P
//     O = O 2^(m - m') + P V
//
//   tensor        shape                                          dtype    strides (elements)
//   query         [num_tokens, num_heads, D]                     float32  free, free, 1
//   kv_cache      [num_blocks, 2, num_kv_heads, block_size, D]   float32  cache_stride_block, dense
//   block_table   [num_seqs, max_blocks]                         int32    block_table_stride, 1
//   plan          PlanLayout                                     int32    what each block does
//   workspace     see partial_results.cuh                        float32  results of parts
//   out           [num_tokens, num_heads, D]                     float32  dense
//
// Grids and what a block owns: those of the tensor-core kernels, so that one plan serves every
// dtype; but a prefill block owns 16 rows of a tile, not all. Eight threads own a row: thread c of
// them the scores of keys c, c + 8, .. and the output columns 4 c .. 4 c + 3, 4 c + 32 .. and so
// on.
//
// Shared memory: Q [16, D]; K [32, D + 4]; V [32, D]; P [16, 36]; at the end of a unit O in K's
// place.
//
// Template: HEAD_DIM.
//
// Invariants: keys outside the sequence (or before its window) are never read: their shared memory
// is zeroed and their scores are -inf.
#include "attention/dispatch.h"
#include "attention/kernel_params.cuh"
#include "attention/launchers.cuh"
#include "attention/mma_primitives.cuh"
#include "attention/partial_results.cuh"

namespace pagedinfer::attention {

namespace {

constexpr int kThreads = 128;
constexpr int kRows = kDecodeRows;
constexpr int kLanes = kThreads / kRows;  // threads of a row
constexpr int kStepKeys = 32;
constexpr int kKeysOfThread = kStepKeys / kLanes;
constexpr int kWeightsStride = kStepKeys + 4;

template <int HEAD_DIM>
struct SharedTiles {
  float query[kRows][HEAD_DIM];
  float keys[kStepKeys][HEAD_DIM + 4];  // eight rows' same column in eight groups of banks
  float values[kStepKeys][HEAD_DIM];
  float weights[kRows][kWeightsStride];
  float2 scales[1][kRows];
  int flag, taken_unit;
};

// Packed query rows of one KV head of one sequence, and the keys that any of them sees.
struct RowBlock {
  int seq, query_start, query_len, seq_len, kv_head;
  int first_row, rows;
  int key_begin, key_end;
};

template <int HEAD_DIM>
struct Fp32Attention {
  static constexpr int kChunks = HEAD_DIM / 4;
  static constexpr int kChunksOfThread = (kChunks + kLanes - 1) / kLanes;

  const KernelParams& p;
  SharedTiles<HEAD_DIM>& shared;
  RowBlock block;
  float4 sums[kChunksOfThread];
  float maximum, sum;
  int last_key;

  __device__ Fp32Attention(const KernelParams& p, SharedTiles<HEAD_DIM>& shared)
      : p(p), shared(shared) {}

  static __device__ __forceinline__ int row() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }

  // The whole block; nobody may still be reading the shared tiles.
  __device__ void start(const RowBlock& rows) {
    block = rows;
    maximum = -INFINITY;
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunksOfThread; ++i) sums[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    last_key = block.seq_len - block.query_len +
               (block.first_row + smaller(row(), block.rows - 1)) / p.group;
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const int r = i / kChunks, column = i % kChunks * 4;
      const bool valid = r < block.rows;
      const float* from =
          static_cast<const float*>(p.op.query) +
          row_offset(p, block.query_start, block.kv_head, block.first_row + (valid ? r : 0),
                     p.op.query_stride_token, p.op.query_stride_head) +
          column;
      copy_async(shared_address(&shared.query[r][column]), from, valid);
    }
    // Waited for in step().
  }

  // The whole block: keys first .. first + 31.
  __device__ void step(int first) {
    __syncthreads();  // the step before is done with K and V
    const HeadPages<float, HEAD_DIM> pages(p, block.kv_head);
    const int32_t* table = p.op.block_table + block.seq * p.op.block_table_stride;
    for (int i = threadIdx.x; i < kStepKeys * kChunks; i += kThreads) {
      const int r = i / kChunks, column = i % kChunks * 4;
      const int key = first + r;
      const bool valid = key >= block.key_begin && key < block.key_end;
      const char* from = pages.base;
      if (valid) {
        from = pages.page(p, table[key >> p.block_shift]) +
               ((key & ((1 << p.block_shift) - 1)) * HEAD_DIM + column) * sizeof(float);
      }
      copy_async(shared_address(&shared.keys[r][column]), from, valid);
      copy_async(shared_address(&shared.values[r][column]), from + pages.value_bytes, valid);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();

    float scores[kKeysOfThread] = {};
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += 4) {
      const float4 q = *reinterpret_cast<const float4*>(&shared.query[row()][d]);
#pragma unroll
      for (int i = 0; i < kKeysOfThread; ++i) {
        const float4 k = *reinterpret_cast<const float4*>(&shared.keys[lane() + i * kLanes][d]);
        scores[i] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, scores[i]))));
      }
    }

    float m = -INFINITY;
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
      const int key = first + lane() + i * kLanes;
      float s = scores[i] * p.score.inner;
      if (p.score.capped) s = tanhf(s);
      const bool seen =
          key <= last_key && key >= block.key_begin && (p.window == 0 || key > last_key - p.window);
      scores[i] = seen ? s : -INFINITY;
      m = fmaxf(m, scores[i]);
    }
#pragma unroll
    for (int delta = 1; delta < kLanes; delta *= 2) {
      m = fmaxf(m, __shfl_xor_sync(kWarpMask, m, delta));
    }
    m = fmaxf(maximum, m * p.score.factor);
    const float reference = m == -INFINITY ? 0.0f : m;
    const float rescale = exp2f(maximum - reference);
    maximum = m;
    float step_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
      const float weight = exp2f(fmaf(scores[i], p.score.factor, -reference));
      shared.weights[row()][lane() + i * kLanes] = weight;
      step_sum += weight;
    }
#pragma unroll
    for (int delta = 1; delta < kLanes; delta *= 2) {
      step_sum += __shfl_xor_sync(kWarpMask, step_sum, delta);
    }
    sum = sum * rescale + step_sum;
    __syncwarp();  // a row's weights are read by the eight threads that wrote them

#pragma unroll
    for (int i = 0; i < kChunksOfThread; ++i) {
      sums[i].x *= rescale, sums[i].y *= rescale, sums[i].z *= rescale, sums[i].w *= rescale;
    }
#pragma unroll 4
    for (int key = 0; key < kStepKeys; ++key) {
      const float weight = shared.weights[row()][key];
#pragma unroll
      for (int i = 0; i < kChunksOfThread; ++i) {
        const int chunk = lane() + i * kLanes;
        if (kChunks % kLanes != 0 && chunk >= kChunks) continue;
        const float4 v = *reinterpret_cast<const float4*>(&shared.values[key][chunk * 4]);
        sums[i].x = fmaf(weight, v.x, sums[i].x);
        sums[i].y = fmaf(weight, v.y, sums[i].y);
        sums[i].z = fmaf(weight, v.z, sums[i].z);
        sums[i].w = fmaf(weight, v.w, sums[i].w);
      }
    }
  }

  // body(row, column, state) for what this thread owns.
  template <typename Body>
  __device__ __forceinline__ void each(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kChunksOfThread; ++i) {
      const int chunk = lane() + i * kLanes;
      if (row() < block.rows && chunk < kChunks) {
        body(row(), chunk * 4, RowState{maximum, sum, sums[i]});
      }
    }
  }
};

template <int HEAD_DIM>
__global__ __launch_bounds__(kThreads,
                             2) void decode_fp32_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) char bytes[];
  auto& shared = *reinterpret_cast<SharedTiles<HEAD_DIM>*>(bytes);
  const PlanView plan(p);
  BlockRecord record = plan.blocks[blockIdx.x];
  const PartWriter<float, HEAD_DIM, kThreads> writer(p, plan);
  Fp32Attention<HEAD_DIM> attention(p, shared);

  const UnitDeal deal{record.dealt_units, static_cast<int>(gridDim.x)};
  SequenceRecord sequence = record.sequence;
  int index = record.index, unit = record.unit, tile = record.tile;
  int tiles_left = record.num_tiles, turn = 0;
  bool first_unit = true, prefix = tile == 0;
  while (tiles_left > 0) {
    // One part, or one chunk of it: see decode_kernel.
    const int range_end = smaller(sequence.num_tiles, tile + tiles_left);
    int end = range_end;
    if (record.deterministic) {
      const int chunk = chunk_tiles(sequence.num_tiles, true);
      end = smaller(end, (tile / chunk + 1) * chunk);
    }
    const int first_row = unit % p.slices * kDecodeRows;
    const UnitRows rows{
        .query_start = sequence.query_start,
        .kv_head = unit / p.slices,
        .first_row = first_row,
        .rows = smaller(kDecodeRows, sequence.query_len * p.group - first_row),
    };
    attention.start({
        .seq = sequence.seq,
        .query_start = sequence.query_start,
        .query_len = sequence.query_len,
        .seq_len = sequence.seq_len,
        .kv_head = rows.kv_head,
        .first_row = first_row,
        .rows = rows.rows,
        .key_begin = sequence.first_key,
        .key_end = sequence.seq_len,
    });
    const int end_key = smaller(sequence.seq_len, (sequence.first_tile + end) * kTileTokens);
    for (int key = (sequence.first_tile + tile) * kTileTokens; key < end_key; key += kStepKeys) {
      attention.step(key);
    }

    __syncthreads();  // K is no longer read
    float* sums = &shared.keys[0][0];
    static_assert(sizeof(shared.keys) >= WarpSums<HEAD_DIM>::kFloats * sizeof(float));
    attention.each([&](int row, int column, const RowState& state) {
      *reinterpret_cast<float4*>(sums + WarpSums<HEAD_DIM>::index(row, column)) = state.value;
      if (column == 0) shared.scales[0][row] = {state.maximum, state.sum};
    });
    __syncthreads();
    writer.write(record, sequence, rows,
                 Part{.unit = unit,
                      .tile = tile,
                      .end = end,
                      .range_end = range_end,
                      .prefix = prefix,
                      .first_unit = first_unit},
                 WarpResults<HEAD_DIM, 1>{shared.scales, sums, /*stride=*/0}, &shared.flag);
    __syncthreads();

    tiles_left -= end - tile;
    tile = end;
    if (tiles_left == 0 && record.dealt_units > 0) {
      int dealt = UnitDeal::unit(blockIdx.x, gridDim.x, ++turn);
      if (turn >= deal.own()) {
        if (threadIdx.x == 0) shared.taken_unit = take_unit(plan, deal);
        __syncthreads();
        dealt = shared.taken_unit;
      }
      if (dealt >= record.dealt_units) break;
      set_dealt_unit(record, plan.by_length, dealt, p.units);
      sequence = record.sequence, unit = record.unit, tile = 0;
      tiles_left = record.num_tiles;
    } else if (tile == sequence.num_tiles) {
      tile = 0;
      prefix = true;
      first_unit = false;
      if (++unit == p.units) {
        unit = 0;
        if (tiles_left > 0) sequence = plan.sequences[++index];
      }
    }
  }
  if (record.first_padded_row < p.op.num_tokens || record.has_zero_runs) {
    write_zero_rows<float>(p, plan, kThreads);
  }
}

template <int HEAD_DIM>
__global__ __launch_bounds__(kThreads) void prefill_fp32_kernel(
    const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) char bytes[];
  auto& shared = *reinterpret_cast<SharedTiles<HEAD_DIM>*>(bytes);
  constexpr int kSubTiles = kPrefillTileRows / kRows;
  const PlanView plan(p);
  const int sub_tile = blockIdx.x % kSubTiles;
  const int kv_head = blockIdx.x / kSubTiles % static_cast<int>(p.op.num_kv_heads);
  const int tile_index = blockIdx.x / kSubTiles / static_cast<int>(p.op.num_kv_heads);
  if (tile_index >= plan.header->num_prefill_tiles) return;
  const PrefillTile tile = plan.prefill_tiles[tile_index];
  const int first_row = tile.first_row + sub_tile * kRows;
  const int rows = smaller(kRows, tile.query_len * p.group - first_row);
  if (rows <= 0) return;
  const int before = tile.seq_len - tile.query_len;
  const int first_position = before + first_row / p.group;
  const int last_position = before + (first_row + rows - 1) / p.group;
  const RowBlock block{
      .seq = tile.seq,
      .query_start = tile.query_start,
      .query_len = tile.query_len,
      .seq_len = tile.seq_len,
      .kv_head = kv_head,
      .first_row = first_row,
      .rows = rows,
      .key_begin = p.window > 0 ? larger(0, first_position - p.window + 1) : 0,
      .key_end = last_position + 1,
  };

  Fp32Attention<HEAD_DIM> attention(p, shared);
  attention.start(block);
  for (int key = block.key_begin / kStepKeys * kStepKeys; key < block.key_end; key += kStepKeys) {
    attention.step(key);
  }
  attention.each([&](int row, int column, const RowState& state) {
    store_row(output_row<float, HEAD_DIM>(p, block.query_start, kv_head, first_row + row) + column,
              state.normalized());
  });
}

template <int HEAD_DIM, typename Kernel>
cudaError_t launch(Kernel kernel, int64_t blocks, const KernelParams& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedTiles<HEAD_DIM>);
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_decode_fp32(const KernelParams& p, cudaStream_t stream) {
  return dispatch_head_dim(p.op.head_dim, [&](auto head_dim) {
    return launch<head_dim.value>(decode_fp32_kernel<head_dim.value>, p.grid, p, stream);
  });
}

cudaError_t launch_prefill_fp32(const KernelParams& p, cudaStream_t stream) {
  const int64_t tiles =
      max_prefill_tiles(p.op.num_seqs, p.op.num_tokens, p.op.max_query_len, p.group);
  const int64_t sub_tiles = kPrefillTileRows / kRows;
  return dispatch_head_dim(p.op.head_dim, [&](auto head_dim) {
    return launch<head_dim.value>(prefill_fp32_kernel<head_dim.value>,
                                  tiles * p.op.num_kv_heads * sub_tiles, p, stream);
  });
}

}  // namespace pagedinfer::attention
