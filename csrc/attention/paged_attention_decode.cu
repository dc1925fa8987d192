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
// Grid: p.grid blocks (decode_grid), whatever the batch, so that a captured graph stays valid. A
// block owns the contiguous range of tiles in its BlockRecord; or, where the plan deals units,
// those whole units that fall to it, and once it is done with these it takes more
// (work_partition.h: UnitDeal). The launch is dependent (dependent_launch.cuh).
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
// Template: T, the element type; HEAD_DIM; MAY_DEAL, whether the plan may deal units, and DEALS,
// whether it does.
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
constexpr int kRecordInts = sizeof(SequenceRecord) / kInts;

// The unit that the block has in that turn, where units are dealt.
__device__ __forceinline__ unsigned own_unit(int turn) {
  return UnitDeal::unit(blockIdx.x, gridDim.x, turn);
}

// What a block needs at the ends of its parts only; in registers it would crowd the loop.
struct BlockState {
  SequenceRecord sequences[2];  // of the part at hand; and of the next unit, where units are dealt
  int flag;
  int taken_unit;
};

template <int HEAD_DIM>
constexpr int kTailBytes =
    DecodeTraits<HEAD_DIM>::kScoresBytes + DecodeTraits<HEAD_DIM>::kScalesBytes +
    static_cast<int>(sizeof(BlockState));

// Where the block's copies stand: always some steps ahead of the arithmetic. The block ids of the
// next step are fetched when the step before it is issued.
template <typename T, int HEAD_DIM, bool DEALS>
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
  const PlanView& plan;
  const SequenceRecord* next_record;
  Sequence sequence, next_sequence;
  int left;             // sequences, or own units, after the next; negative: there is no next
  int turn, next_unit;  // of next_sequence, where units are dealt
  int kv_head, slice, tile, step;
  int tiles_left;           // of the range, or of the unit
  int first_id, second_id;  // blocks of the warp's tokens 0..7 and 8..15

  // `turns`: how many units of its own the block has, from `record` on, where units are dealt.
  __device__ TileLoader(const KernelParams& p, const PlanView& plan, const BlockRecord& record,
                        int turns)
      : p(p),
        plan(plan),
        next_record(plan.sequences + record.index + 1),
        left(DEALS ? turns - 1 : record.sequences_after),
        turn(0),
        tile(record.tile),
        step(0),
        tiles_left(record.num_tiles) {
    set_unit(record.unit);
    sequence.set(record.sequence);
    fetch_ids();
    fetch_next_sequence();
  }

  __device__ __forceinline__ void set_unit(int unit) {
    kv_head = p.slices == 1 ? unit : unit / p.slices;
    slice = p.slices == 1 ? 0 : unit % p.slices;
  }

  __device__ __forceinline__ int first_token() const {
    return (sequence.first_tile + tile) * kTileTokens + step * Traits::kStepTokens +
           Traits::token_warp() * kWarpTokens;
  }

  __device__ __forceinline__ void fetch_next_sequence() {
    if (left-- <= 0) return;
    if constexpr (DEALS) {
      const int unit = own_unit(++turn);
      next_unit = unit % p.units;
      next_sequence.set(plan.by_length[unit / p.units]);
    } else {
      next_sequence.set(*next_record++);
    }
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
    if (--tiles_left == 0 && !(DEALS && left >= 0)) return;
    if (++tile == sequence.num_tiles) {
      tile = 0;
      bool ends = true;
      if constexpr (DEALS) {
        set_unit(next_unit);
        tiles_left = next_sequence.num_tiles;
      } else {
        if (++slice == p.slices) {
          slice = 0;
          ++kv_head;
        }
        ends = kv_head == p.op.num_kv_heads;
        if (ends) kv_head = 0;
      }
      if (ends) {
        sequence = next_sequence;
        fetch_next_sequence();
      }
    }
    fetch_ids();
  }
};

// All that a block does: its range or, where units are dealt, its own ones and those that it takes.
template <typename T, int HEAD_DIM, bool DEALS>
__device__ __forceinline__ void decode_block(const KernelParams& p, const PlanView& plan,
                                             BlockRecord record) {
  using Traits = DecodeTraits<HEAD_DIM>;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32;
  char* ring = shared + warp * p.stages * Traits::kWarpStageBytes;
  const uint32_t ring_address = shared_address(ring);
  auto* warp_scores = reinterpret_cast<float4*>(shared + p.stages * Traits::kStageBytes);
  char* tail = shared + p.stages * Traits::kStageBytes + Traits::kScoresBytes;
  auto* scales = reinterpret_cast<float2(*)[kDecodeRows]>(tail);
  auto& state = *reinterpret_cast<BlockState*>(tail + Traits::kScalesBytes);
  const UnitDeal deal{record.dealt_units, static_cast<int>(gridDim.x)};
  // The next unit's queries are on their way while one is written, where there are registers.
  constexpr bool kEarlyQueries = DEALS && decode_blocks_per_sm(HEAD_DIM) <= 2;
  const PartWriter<T, HEAD_DIM, Traits::kThreads> writer(p, plan);

  int turns = DEALS ? deal.own() : 0;
  bool has_more = true;
  // Once for a range. Once for the block's own units, and once for each that it takes.
  while (has_more) {
    TileLoader<T, HEAD_DIM, DEALS> loader(p, plan, record, turns);
    int at_hand = 0;  // which of state.sequences
    // Of the next unit, where units are dealt: thread i has its sequence's ith int.
    int ahead = 0, turn = 0;
    const auto look_ahead = [&](int unit) {
      if (threadIdx.x >= kRecordInts) return;
      ahead = reinterpret_cast<const int32_t*>(plan.by_length + unit / p.units)[threadIdx.x];
    };
    const auto leave_ahead = [&](SequenceRecord& to) {
      if (threadIdx.x < kRecordInts) reinterpret_cast<int32_t*>(&to)[threadIdx.x] = ahead;
    };
    if (threadIdx.x == 0) state.sequences[0] = record.sequence;
    __syncthreads();
    WarpAttention<T, HEAD_DIM> attention;
    attention.clear();

    int index = record.index, tile = record.tile, tiles_left = record.num_tiles;
    int kv_head = loader.kv_head, slice = loader.slice;
    bool first_unit = true, prefix = tile == 0;
    int issue_stage = 0, stage = 0;
    int lead = p.stages - 1;  // steps by which the copies are still to get ahead of the arithmetic
    int steps = 0;            // left of the part at hand, or of the chunk
    int first = 0, end = 0, range_end = 0;
    int taken_unit = 0;  // in thread 0
    UnitRows rows{};
    // Begins the part at `tile`, or the chunk.
    const auto begin = [&](const SequenceRecord& sequence) {
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
    };
    // One round is one step. A single place issues copies: it is most of the loop's code.
    while (true) {
      if (loader.tiles_left > 0) {
        loader.issue(ring_address + issue_stage * Traits::kWarpStageBytes);
        issue_stage = issue_stage + 1 == p.stages ? 0 : issue_stage + 1;
        if (DEALS && loader.tiles_left == 0 && threadIdx.x == 0) taken_unit = take_unit(plan, deal);
      }
      commit_copies();  // also when there is nothing left: the waits count groups
      if (lead > 0) {
        --lead;
        continue;
      }
      const SequenceRecord& sequence = state.sequences[at_hand];
      if (steps == 0) {
        begin(sequence);
        if (DEALS && turn + 1 < turns) look_ahead(own_unit(turn + 1));
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
      if constexpr (DEALS) {
        if (threadIdx.x == 0) state.taken_unit = taken_unit;
        leave_ahead(state.sequences[at_hand ^ 1]);
      }
      __syncthreads();
      const UnitRows done = rows;
      const Part part{.unit = kv_head * p.slices + slice,
                      .tile = tile,
                      .end = end,
                      .range_end = range_end,
                      .prefix = prefix,
                      .first_unit = first_unit};
      const bool complete = end == sequence.num_tiles;
      tiles_left -= end - tile;
      bool ends = tiles_left == 0;
      int next = at_hand;
      if constexpr (DEALS) {
        ends = ends && turn + 1 >= turns;
        tile = complete ? 0 : end;
        if (complete && !ends) {
          const int unit = own_unit(++turn) % p.units;
          kv_head = p.slices == 1 ? unit : unit / p.slices;
          slice = p.slices == 1 ? 0 : unit % p.slices;
          next ^= 1;
          tiles_left = state.sequences[next].num_tiles;
        }
        if (kEarlyQueries && !ends) begin(state.sequences[next]);
        has_more = state.taken_unit < record.dealt_units;
        if (ends && has_more) look_ahead(state.taken_unit);
      }
      writer.write(
          record, sequence, done, part,
          WarpResults<HEAD_DIM, Traits::kWarps, Traits::kHeadWarps>{
              scales, reinterpret_cast<const float*>(shared + last_stage * Traits::kWarpStageBytes),
              p.stages * Traits::kWarpStageBytes / 4},
          &state.flag);
      if (ends) break;
      __syncthreads();  // the stage, the scales and the record may be written again
      attention.clear();
      if constexpr (DEALS) {
        if (next != at_hand && turn + 1 < turns && kEarlyQueries) look_ahead(own_unit(turn + 1));
        at_hand = next;
        continue;
      }
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
          if (threadIdx.x < kRecordInts) {
            reinterpret_cast<int32_t*>(&state.sequences[0])[threadIdx.x] =
                reinterpret_cast<const int32_t*>(plan.sequences + index)[threadIdx.x];
          }
          __syncthreads();
        }
      }
    }
    if (!DEALS || !has_more) break;
    __syncthreads();  // the ring and the state may be written again
    leave_ahead(state.sequences[1]);
    __syncthreads();
    turns = 1;
    record.unit = state.taken_unit % p.units;
    record.sequence = state.sequences[1];
    record.num_tiles = record.sequence.num_tiles;
  }
}

// MAY_DEAL: units may have been dealt; only the plan knows whether they are.
template <typename T, int HEAD_DIM, bool MAY_DEAL>
__global__ __launch_bounds__(
    DecodeTraits<HEAD_DIM>::kThreads,
    decode_blocks_per_sm(HEAD_DIM)) void decode_kernel(const __grid_constant__ KernelParams p) {
  const PlanView plan(p);
  if (p.beside_prefill) {
    let_successor_start();
  } else {
    begin_dependent();
  }
  const BlockRecord record = plan.blocks[blockIdx.x];
  if (MAY_DEAL && record.dealt_units > 0) {
    decode_block<T, HEAD_DIM, true>(p, plan, record);
  } else if (record.num_tiles > 0) {
    decode_block<T, HEAD_DIM, false>(p, plan, record);
  }
  if (record.first_padded_row < p.op.num_tokens || record.has_zero_runs) {
    write_zero_rows<T>(p, plan, DecodeTraits<HEAD_DIM>::kThreads);
  }
  // One block only, of the last to start: others would keep their places from blocks that have not.
  if (p.beside_prefill && blockIdx.x == gridDim.x - 1) wait_for_predecessor();
}

template <typename T, int HEAD_DIM>
cudaError_t launch(KernelParams p, cudaStream_t stream) {
  using Traits = DecodeTraits<HEAD_DIM>;
  // Few units are never dealt, and their time is short: the kernel for them is the smaller one.
  const bool may_deal = UnitDeal::may_pay(p.op.num_seqs * p.units, p.grid);
  const auto kernel =
      may_deal ? decode_kernel<T, HEAD_DIM, true> : decode_kernel<T, HEAD_DIM, false>;
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
