// Decode: attention of sequences with few query rows (fp16, bf16), split along the keys over a
// fixed grid.
//
//   for each tile of 64 keys of a unit, on tensor cores; Q [16 x D] are the unit's packed rows:
//     S = Q K^T;  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P
//     O = O 2^(m - m') + P V
//
//   tensor        shape                                          dtype    strides (elements)
//   query         [num_tokens, num_heads, D]                     T        free, free, 1
//   kv_cache      [num_blocks, 2, num_kv_heads, block_size, D]   T        cache_stride_block, dense
//   block_table   [num_seqs, max_blocks]                         int32    block_table_stride, 1
//   plan          PlanLayout                                     int32    what each block does
//   workspace     see partial_results.cuh                        float32  results of parts
//   out           [num_tokens, num_heads, D]                     T        dense
//
// Grid: p.grid blocks (decode_grid), whatever the batch, so that a captured graph
// stays valid. A block owns the contiguous range of tiles in its BlockRecord (work_partition.h).
// The launch is dependent (dependent_launch.cuh).
//
// A block's warps share nothing but the ends of the units: warp w takes tokens 16 w .. 16 w + 15 of
// each tile, brings them in by itself and keeps a softmax of its own. So no barrier stands in the
// loop, only the warp's own wait for its copies, and the ring runs on over the ends of units and
// sequences.
//
// At a D of 256 two warps share 16 tokens: each brings in half of the columns, multiplies Q and K
// over these, adds the other's scores, which it finds in shared memory behind a barrier of the two,
// and keeps half of O.
//
// Shared memory: for each warp a ring of p.stages x (K, V of 16 tokens, or of half of their
// columns); the scores of warps that share tokens; (m, l) of each warp and row; BlockState. The
// stage that a warp has just used takes its O at the end of a unit: 16 tokens of K and V in 16 bits
// are as many bytes as 16 rows of O in 32.
//
// Template: T, the element type; HEAD_DIM.
//
// Invariants: keys outside first_key .. seq_len - 1 are never read: their shared memory is zeroed
// (0 * NaN would be NaN) and their scores are -inf.
#include "attention/dispatch.h"
#include "attention/kernel_params.cuh"
#include "attention/launchers.cuh"
#include "attention/mma_primitives.cuh"
#include "attention/partial_results.cuh"
#include "attention/warp_attention.cuh"
#include "common/dependent_launch.cuh"
#include "common/device_limits.h"

namespace pagedinfer::attention {

namespace {

constexpr int kMinStages = 2, kMaxStages = 6;

// What a block needs at the ends of its parts only; in registers it would crowd the loop.
struct BlockState {
  SequenceRecord sequence;  // of the part at hand
  int flag;
};

template <int HEAD_DIM>
constexpr int kTailBytes =
    DecodeTraits<HEAD_DIM>::kScoresBytes + DecodeTraits<HEAD_DIM>::kScalesBytes +
    static_cast<int>(sizeof(BlockState));

// Where the block's copies stand: always some steps ahead of the arithmetic. The block ids of the
// next step are fetched when the step before it is issued.
template <typename T, int HEAD_DIM>
struct TileLoader {
  using Traits = DecodeTraits<HEAD_DIM>;
  using Rows = typename Traits::Rows;
  static constexpr int kFromBytes = HEAD_DIM * 2;  // from one token's key to the next's

  // What of a SequenceRecord the copies need.
  struct Sequence {
    int seq, seq_len, first_key, first_tile, num_tiles;

    __device__ __forceinline__ void set(const SequenceRecord& s) {
      seq = s.seq, seq_len = s.seq_len, first_key = s.first_key;
      first_tile = s.first_tile, num_tiles = s.num_tiles;
    }
  };

  const KernelParams& p;
  const SequenceRecord* next_record;
  Sequence sequence, next_sequence;
  int sequences_left, kv_head, slice, tile, step;
  int tiles_left;
  int first_id, second_id;  // blocks of the warp's tokens 0..7 and 8..15

  __device__ TileLoader(const KernelParams& p, const PlanView& plan, const BlockRecord& record)
      : p(p),
        next_record(plan.sequences + record.index + 1),
        sequences_left(record.sequences_after),
        kv_head(p.slices == 1 ? record.unit : record.unit / p.slices),
        slice(p.slices == 1 ? 0 : record.unit % p.slices),
        tile(record.tile),
        step(0),
        tiles_left(record.num_tiles) {
    if (tiles_left == 0) return;
    sequence.set(record.sequence);
    fetch_ids();
    fetch_next_sequence();
  }

  __device__ __forceinline__ int first_token() const {
    return (sequence.first_tile + tile) * kTileTokens + step * Traits::kStepTokens +
           Traits::token_warp() * kWarpTokens;
  }

  __device__ __forceinline__ void fetch_next_sequence() {
    if (sequences_left-- > 0) next_sequence.set(*next_record++);
  }

  __device__ __forceinline__ void fetch_ids() {
    const int32_t* table = p.op.block_table + sequence.seq * p.op.block_table_stride;
    // Tokens outside the sequence take the id of one inside: it is not used, and no other may be
    // read.
    auto id_of = [&](int token) {
      token = larger(sequence.first_key, smaller(token, sequence.seq_len - 1));
      return table[token >> p.block_shift];
    };
    first_id = id_of(first_token());
    second_id = id_of(first_token() + 8);
  }

  // Starts the copies of this warp's tokens of the current step, and moves on to the next one.
  __device__ __forceinline__ void issue(uint32_t stage) {
    const int lane = threadIdx.x % 32;
    const int first = first_token();
    using Walk = ChunkWalk<32, Rows::kChunks>;
    const HeadPages<T, HEAD_DIM> pages(p, kv_head);
    const char* first_page = pages.page(p, first_id);
    const char* second_page = pages.page(p, second_id);
    const int offset_mask = (1 << p.block_shift) - 1;
    if (first >= sequence.first_key && first + kWarpTokens <= sequence.seq_len) {
      // All rows: four base addresses, everything else is a constant offset.
      static_assert(Traits::kHeadWarps == 1 || Walk::kWholeRows);
      constexpr bool kDense = Traits::kHeadWarps == 1;  // the warp's rows are one piece
      constexpr int kJump = kDense ? 512 : 32 / Rows::kChunks * kFromBytes;
      const int mine = kDense ? lane * 16
                              : Walk::row(lane, 0) * kFromBytes + Walk::chunk(lane, 0) * 16 +
                                    Traits::first_column() * 2;
      const char* low = first_page + (first & offset_mask) * kFromBytes + mine;
      const char* high =
          second_page + ((first + 8) & offset_mask) * kFromBytes - 8 * kFromBytes + mine;
      const char* low_values = low + pages.value_bytes;
      const char* high_values = high + pages.value_bytes;
#pragma unroll
      for (int j = 0; j < kWarpTokens * Rows::kChunks / 32; ++j) {
        const int row = Walk::row(lane, j);
        const uint32_t to = stage + Rows::offset(row, Walk::chunk(lane, j));
        copy_async_once(to, (row < 8 ? low : high) + j * kJump);
        copy_async_once(to + Traits::kRowsBytes, (row < 8 ? low_values : high_values) + j * kJump);
      }
      advance();
      return;
    }
    const unsigned seen_keys = sequence.seq_len - sequence.first_key;
#pragma unroll 1
    for (int j = 0; j < kWarpTokens * Rows::kChunks / 32; ++j) {
      const int row = Walk::row(lane, j), chunk = Walk::chunk(lane, j);
      const bool valid = static_cast<unsigned>(first + row - sequence.first_key) < seen_keys;
      const char* from = (row < 8 ? first_page : second_page) +
                         ((first + row) & offset_mask) * kFromBytes + chunk * 16 +
                         Traits::first_column() * 2;
      const uint32_t to = stage + Rows::offset(row, chunk);
      copy_async(to, from, valid);
      copy_async(to + Traits::kRowsBytes, from + pages.value_bytes, valid);
    }
    advance();
  }

  __device__ __forceinline__ void advance() {
    if (++step < Traits::kSteps) {
      fetch_ids();
      return;
    }
    step = 0;
    if (--tiles_left == 0) return;
    if (++tile == sequence.num_tiles) {
      tile = 0;
      if (++slice == p.slices) {
        slice = 0;
        ++kv_head;
      }
      if (kv_head == p.op.num_kv_heads) {
        kv_head = 0;
        sequence = next_sequence;
        fetch_next_sequence();
      }
    }
    fetch_ids();
  }
};

template <typename T, int HEAD_DIM>
__global__ __launch_bounds__(
    DecodeTraits<HEAD_DIM>::kThreads,
    decode_blocks_per_sm(HEAD_DIM)) void decode_kernel(const __grid_constant__ KernelParams p) {
  using Traits = DecodeTraits<HEAD_DIM>;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32;
  char* ring = shared + warp * p.stages * Traits::kWarpStageBytes;
  const uint32_t ring_address = shared_address(ring);
  auto* warp_scores = reinterpret_cast<float4*>(shared + p.stages * Traits::kStageBytes);
  char* tail = shared + p.stages * Traits::kStageBytes + Traits::kScoresBytes;
  auto* scales = reinterpret_cast<float2(*)[kDecodeRows]>(tail);
  auto& state = *reinterpret_cast<BlockState*>(tail + Traits::kScalesBytes);
  const SequenceRecord& sequence = state.sequence;

  const PlanView plan(p);
  if (p.beside_prefill) {
    let_successor_start();
  } else {
    begin_dependent();
  }
  const BlockRecord record = plan.blocks[blockIdx.x];
  if (record.num_tiles > 0) {
    TileLoader<T, HEAD_DIM> loader(p, plan, record);
    if (threadIdx.x == 0) state.sequence = record.sequence;
    __syncthreads();
    WarpAttention<T, HEAD_DIM> attention;
    attention.clear();
    const PartWriter<T, HEAD_DIM, Traits::kThreads> writer(p, plan);

    int index = record.index, tile = record.tile, tiles_left = record.num_tiles;
    int kv_head = loader.kv_head, slice = loader.slice;
    bool first_unit = true, prefix = tile == 0;
    int issue_stage = 0, stage = 0;
    int lead = p.stages - 1;  // steps by which the copies are still to get ahead of the arithmetic
    int steps = 0;            // left of the part at hand, or of the chunk
    int first = 0, end = 0, range_end = 0;
    UnitRows rows{};
    // One round is one step. A single place issues copies: it is most of the loop's code.
    while (true) {
      if (loader.tiles_left > 0) {
        loader.issue(ring_address + issue_stage * Traits::kWarpStageBytes);
        issue_stage = issue_stage + 1 == p.stages ? 0 : issue_stage + 1;
      }
      commit_copies();  // also when there is nothing left: the waits count groups
      if (lead > 0) {
        --lead;
        continue;
      }
      if (steps == 0) {
        range_end = end = smaller(sequence.num_tiles, tile + tiles_left);
        if (record.deterministic) {
          const int chunk = chunk_tiles(sequence.num_tiles, true);
          end = smaller(end, (tile / chunk + 1) * chunk);
        }
        steps = (end - tile) * Traits::kSteps;
        first = (sequence.first_tile + tile) * kTileTokens + Traits::token_warp() * kWarpTokens;
        const int first_row = slice * kDecodeRows;
        rows = {.query_start = sequence.query_start,
                .kv_head = kv_head,
                .first_row = first_row,
                .rows = smaller(kDecodeRows, sequence.query_len * p.group - first_row),
                .has_prefix = p.op.prefixes.num_groups > 0 && sequence.first_key > 0};
        attention.start(p, sequence, rows);
      }
      if (p.stages == 3) {
        wait_copies<2>();
      } else {
        wait_copies(p.stages - 1);
      }
      __syncwarp();  // every lane's copies are there
      // Skipped are steps at a part's begin or end only: of two that follow each other the parity
      // of `steps` differs.
      if (first < sequence.seq_len && first + kWarpTokens > sequence.first_key) {
        attention.step(p, ring_address + stage * Traits::kWarpStageBytes, first,
                       warp_scores + (steps & 1) * Traits::kScoreVectors);
      } else {
        attention.meet();  // so that no warp has passed fewer barriers: racecheck needs that
      }
      __syncwarp();  // every lane is done with the stage
      first += Traits::kStepTokens;
      const int last_stage = stage;
      stage = stage + 1 == p.stages ? 0 : stage + 1;
      if (--steps > 0) continue;

      // The next copy into last_stage is issued after the barriers in here.
      attention.leave(reinterpret_cast<float*>(ring + last_stage * Traits::kWarpStageBytes),
                      scales[warp], rows.rows);
      __syncthreads();
      writer.write(
          record, sequence, rows,
          Part{.unit = kv_head * p.slices + slice,
               .tile = tile,
               .end = end,
               .range_end = range_end,
               .prefix = prefix,
               .first_unit = first_unit},
          WarpResults<HEAD_DIM, Traits::kWarps, Traits::kHeadWarps>{
              scales, reinterpret_cast<const float*>(shared + last_stage * Traits::kWarpStageBytes),
              p.stages * Traits::kWarpStageBytes / 4},
          &state.flag);

      const bool complete = end == sequence.num_tiles;
      tiles_left -= end - tile;
      if (tiles_left == 0) break;
      __syncthreads();  // the stage and the scales may be written again
      attention.clear();
      tile = end;
      if (complete) {
        tile = 0;
        prefix = true;
        first_unit = false;
        if (++slice == p.slices) {
          slice = 0;
          ++kv_head;
        }
        if (kv_head == p.op.num_kv_heads) {
          kv_head = 0;
          ++index;
          if (threadIdx.x < sizeof(SequenceRecord) / kInts) {
            reinterpret_cast<int32_t*>(&state.sequence)[threadIdx.x] =
                reinterpret_cast<const int32_t*>(plan.sequences + index)[threadIdx.x];
          }
          __syncthreads();
        }
      }
    }
  }
  if (record.first_padded_row < p.op.num_tokens || record.has_zero_runs) {
    write_zero_rows<T>(p, plan, Traits::kThreads);
  }
  // One block only, of the last to start: others would keep their places from blocks that have not.
  if (p.beside_prefill && blockIdx.x == gridDim.x - 1) wait_for_predecessor();
}

template <typename T, int HEAD_DIM>
cudaError_t launch(KernelParams p, cudaStream_t stream) {
  using Traits = DecodeTraits<HEAD_DIM>;
  const auto kernel = decode_kernel<T, HEAD_DIM>;
  DeviceLimits limits;
  if (cudaError_t status = device_limits(&limits); status != cudaSuccess) return status;
  // As many stages as leave room for decode_blocks_per_sm blocks; three even if that is one block
  // only.
  auto stages_in = [](int bytes) { return (bytes - kTailBytes<HEAD_DIM>) / Traits::kStageBytes; };
  const int shared_out =
      stages_in(limits.shared_per_sm / decode_blocks_per_sm(HEAD_DIM) - limits.shared_reserved);
  const int alone = stages_in(limits.shared_per_block);
  p.stages = larger(smaller(shared_out, kMaxStages), smaller(alone, 3));
  if (p.stages < kMinStages) return cudaErrorInvalidConfiguration;
  const int bytes = p.stages * Traits::kStageBytes + kTailBytes<HEAD_DIM>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return launch_dependent(kernel, p.grid, Traits::kThreads, bytes, stream, p);
}

}  // namespace

cudaError_t launch_decode(const KernelParams& p, cudaStream_t stream) {
  return dispatch_half_type(p.op.dtype, [&](auto type) {
    return dispatch_head_dim(p.op.head_dim, [&](auto head_dim) {
      return launch<typename decltype(type)::Type, head_dim.value>(p, stream);
    });
  });
}

}  // namespace pagedinfer::attention
