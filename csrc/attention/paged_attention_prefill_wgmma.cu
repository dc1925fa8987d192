// Prefill on Hopper: attention of sequences with many query rows (fp16, bf16; head_dim 64, 128,
// 256), tiled along the rows, on tensor cores through wgmma (sm_90a).
//
//   for Q [128 x D] a tile of packed rows, over tiles of N keys, the last first:
//     S = Q K^T;  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P
//     O = O 2^(m - m') + P V
//   out = O / l
//   (FlashAttention, Dao et al. 2022; the pipeline: FlashAttention-3, Shah et al. 2024)
//
//   tensor        shape                                          dtype    strides (elements)
//   query         [num_tokens, num_heads, D]                     T        free, free, 1
//   kv_cache      [num_blocks, 2, num_kv_heads, block_size, D]   T        cache_stride_block, dense
//   block_table   [num_seqs, max_blocks]                         int32    block_table_stride, 1
//   plan          PrefillTile [num_prefill_tiles]                int32    the longest first
//   out           [num_tokens, num_heads, D]                     T        dense
//
// Grid: one block a multiprocessor, or fewer if there is less to do. An item is a tile of the plan
// with a KV head. Blocks are dealt the items in turn, forth and back, so that each has its share of
// the long and of the short ones.
//
// A block is three warpgroups. The first fetches: one warp K and V, a page and a panel at a time,
// with the copy engine; the others Q. Each of the other two owns 64 rows, their softmax and their
// output; it computes the softmax of one tile of keys while the tensor cores multiply P V of the
// tile before and, since the two take turns, the other's products. All three run ahead over the
// ends of items: the next item's keys come while the last one's output is written.
//
// Shared memory: Q; two stages of K, two of V; barriers, one pair (full, empty) for Q and each
// stage.
//
// Template: T, the element type; HEAD_DIM.
//
// Invariants: keys outside key_begin .. seq_len - 1 are never used: pages that hold none other are
// not fetched but zeroed, K of such keys is masked, V is zeroed (0 * NaN would be NaN). Only tiles
// that some row does not see whole are masked.
#include <cuda.h>

#include "attention/device_limits.h"
#include "attention/dispatch.h"
#include "attention/hopper_primitives.cuh"
#include "attention/kernel_params.cuh"
#include "attention/launchers.cuh"
#include "attention/mma_primitives.cuh"
#include "attention/partial_results.cuh"
#include "attention/prefill_work.cuh"

namespace pagedinfer::attention {

namespace {

constexpr unsigned kWarpMask = ~0u;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kQueryWarps = 3;  // that fetch Q
constexpr int kWarpgroupRows = 64;
constexpr int kRows = kConsumers * kWarpgroupRows;
static_assert(kRows == kPrefillTileRows);
constexpr int kStages = 2;

// Of the 65,536 registers of a multiprocessor; each a multiple of 8.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <= 65536);

template <int HEAD_DIM>
struct WgmmaTraits {
  static constexpr int kKeys = HEAD_DIM > 128 ? 64 : 128;
  static constexpr int kPanels = HEAD_DIM / kPanelColumns;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kSharedBytes =
      kPanelAlignment + kQueryBytes + 2 * kStages * kKeyBytes + kBarriers * 8;
};

// Addresses in shared memory.
template <int HEAD_DIM>
struct SharedPlaces {
  using Traits = WgmmaTraits<HEAD_DIM>;
  uint32_t queries, barriers;

  __device__ __forceinline__ explicit SharedPlaces(const void* shared) {
    queries = (shared_address(shared) + kPanelAlignment - 1) / kPanelAlignment * kPanelAlignment;
    barriers = queries + Traits::kQueryBytes + 2 * kStages * Traits::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return queries + Traits::kQueryBytes + stage * Traits::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t values(int stage) const { return keys(kStages + stage); }

  __device__ __forceinline__ uint32_t queries_full() const { return barriers; }
  __device__ __forceinline__ uint32_t queries_empty() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t keys_full(int stage) const {
    return barriers + 16 + stage * 8;
  }
  __device__ __forceinline__ uint32_t keys_empty(int stage) const {
    return keys_full(kStages + stage);
  }
  __device__ __forceinline__ uint32_t values_full(int stage) const {
    return keys_full(2 * kStages + stage);
  }
  __device__ __forceinline__ uint32_t values_empty(int stage) const {
    return keys_full(3 * kStages + stage);
  }
};

// Where a role is in a ring of stages.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;  // of the stage's current phase

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The items of a block: every role walks them for itself.
struct ItemWalk {
  int total, round_begin = 0, round = 0;

  __device__ __forceinline__ ItemWalk(const KernelParams& p, const PlanView& plan)
      : total(plan.header->num_prefill_tiles * static_cast<int>(p.op.num_kv_heads)) {}

  // -1: there is none left.
  __device__ __forceinline__ int next() {
    const int blocks = gridDim.x;
    const int place = round & 1 ? blocks - 1 - blockIdx.x : blockIdx.x;
    const int item = round_begin + place;
    round_begin += blocks;
    ++round;
    return item < total ? item : -1;
  }
};

template <int HEAD_DIM>
__device__ __forceinline__ TileWork work_of(const KernelParams& p, const PlanView& plan, int item) {
  const int heads = static_cast<int>(p.op.num_kv_heads);
  return TileWork(p, plan.prefill_tiles[item / heads], item % heads, kRows,
                  WgmmaTraits<HEAD_DIM>::kKeys);
}

// ---- the warp that fetches K and V ----

// A lane's share of a tile of keys: one panel of one page.
struct PageShare {
  int panel;
  int row;      // of the page's first token in the tile
  int id;       // of the block
  bool inside;  // the page holds keys that are used
  bool ragged;  // and others
};

template <typename T, int HEAD_DIM>
struct PageFetcher {
  using Traits = WgmmaTraits<HEAD_DIM>;
  static constexpr int kMinBlockSize = 8;
  static_assert(Traits::kKeys / kMinBlockSize * Traits::kPanels <= 32);

  const KernelParams& p;
  const CUtensorMap* map;
  int lane, pages;

  __device__ __forceinline__ PageFetcher(const KernelParams& p, const CUtensorMap* map)
      : p(p), map(map), lane(threadIdx.x % 32), pages(Traits::kKeys >> p.block_shift) {}

  __device__ __forceinline__ bool has_share() const { return lane < pages * Traits::kPanels; }

  // The share of this lane in the n-th tile from the end.
  __device__ __forceinline__ PageShare share(const TileWork& work, int n) const {
    const int page = lane & (pages - 1);
    const int row = page << p.block_shift;
    const int token = (work.first_tile + work.num_tiles - 1 - n) * Traits::kKeys + row;
    const int end = token + (1 << p.block_shift);
    const bool inside =
        has_share() && n < work.num_tiles && token < work.tile.seq_len && end > work.key_begin;
    // Outside of the tensor the copy engine writes zeros.
    int id = static_cast<int>(p.op.num_blocks);
    if (inside) {
      id = __ldg(p.op.block_table + work.tile.seq * p.op.block_table_stride +
                 (token >> p.block_shift));
    }
    return {lane / pages, row, id, inside,
            inside && (token < work.key_begin || end > work.tile.seq_len)};
  }

  __device__ __forceinline__ void fetch(uint32_t to, const PageShare& share, int matrix,
                                        uint32_t barrier) const {
    fetch_box(to + share.panel * Traits::kKeyPanelBytes + share.row * kPanelRowBytes, map,
              share.panel * kPanelColumns, 0, matrix, share.id, barrier);
  }

  __device__ __forceinline__ void fetch_keys(uint32_t to, const TileWork& work,
                                             const PageShare& share, uint32_t barrier) const {
    if (lane == 0) expect_bytes(barrier, Traits::kKeyBytes);
    __syncwarp();
    if (has_share()) fetch(to, share, work.kv_head, barrier);
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // The same, but ragged pages are copied row by row, with zeros for tokens that are not used.
  __device__ __forceinline__ void fetch_values(uint32_t to, const TileWork& work,
                                               const PageShare& share, int n,
                                               uint32_t barrier) const {
    unsigned ragged = __ballot_sync(kWarpMask, share.ragged);
    if (lane == 0) {
      expect_bytes(barrier, Traits::kKeyBytes - (__popc(ragged) << p.block_shift) * kPanelRowBytes);
    }
    __syncwarp();
    if (has_share() && !share.ragged) {
      fetch(to, share, static_cast<int>(p.op.num_kv_heads) + work.kv_head, barrier);
    }
    if (ragged != 0) {
      const HeadPages<T, HEAD_DIM> head(p, work.kv_head);
      for (; ragged != 0; ragged &= ragged - 1) {
        const int owner = __ffs(ragged) - 1;
        const int panel = __shfl_sync(kWarpMask, share.panel, owner);
        const int first = __shfl_sync(kWarpMask, share.row, owner);
        const char* page = head.page(p, __shfl_sync(kWarpMask, share.id, owner)) + head.value_bytes;
        copy_ragged(to + panel * Traits::kKeyPanelBytes, first, page + panel * kPanelRowBytes, work,
                    n);
      }
      fence_shared_for_async();
    }
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  __device__ __forceinline__ void copy_ragged(uint32_t panel, int first, const char* page,
                                              const TileWork& work, int n) const {
    const int token = (work.first_tile + work.num_tiles - 1 - n) * Traits::kKeys + first;
    for (int i = lane; i < 8 << p.block_shift; i += 32) {
      const int row = i / 8, chunk = i % 8;
      uint4 value = {0, 0, 0, 0};
      if (token + row >= work.key_begin && token + row < work.tile.seq_len) {
        value = __ldg(reinterpret_cast<const uint4*>(page + row * (HEAD_DIM * 2) + chunk * 16));
      }
      store_shared(panel + (first + row) * kPanelRowBytes + (chunk ^ ((first + row) & 7)) * 16,
                   value);
    }
  }
};

template <typename T, int HEAD_DIM>
__device__ __forceinline__ void fetch_all_keys(const KernelParams& p, const CUtensorMap* map,
                                               const PlanView& plan,
                                               const SharedPlaces<HEAD_DIM>& shared) {
  const PageFetcher<T, HEAD_DIM> fetcher(p, map);
  RingPosition at_keys, at_values;
  ItemWalk items(p, plan);
  for (int item = items.next(); item >= 0; item = items.next()) {
    const TileWork work = work_of<HEAD_DIM>(p, plan, item);
    PageShare next = fetcher.share(work, 0);
    PageShare before = next;
    // In the order of use: K 0, K 1, V 0, K 2, V 1, ...
    for (int n = 0; n <= work.num_tiles; ++n) {
      const PageShare share = next;
      if (n < work.num_tiles) {
        next = fetcher.share(work, n + 1);
        wait_barrier(shared.keys_empty(at_keys.stage), at_keys.parity ^ 1);
        fetcher.fetch_keys(shared.keys(at_keys.stage), work, share,
                           shared.keys_full(at_keys.stage));
        at_keys.advance();
      }
      if (n > 0) {
        wait_barrier(shared.values_empty(at_values.stage), at_values.parity ^ 1);
        fetcher.fetch_values(shared.values(at_values.stage), work, before, n - 1,
                             shared.values_full(at_values.stage));
        at_values.advance();
      }
      before = share;
    }
  }
}

// ---- the warps that fetch Q ----

template <typename T, int HEAD_DIM>
__device__ __forceinline__ void fetch_all_queries(const KernelParams& p, const PlanView& plan,
                                                  const SharedPlaces<HEAD_DIM>& shared, int warp) {
  using Traits = WgmmaTraits<HEAD_DIM>;
  constexpr int kChunks = HEAD_DIM / 8;
  constexpr int kRowsAtOnce = 32 / kChunks;
  const int lane = threadIdx.x % 32;
  const int chunk = lane % kChunks;
  const uint32_t column = shared.queries + chunk / 8 * Traits::kQueryPanelBytes;
  uint32_t parity = 0;
  ItemWalk items(p, plan);
  for (int item = items.next(); item >= 0; item = items.next()) {
    const TileWork work = work_of<HEAD_DIM>(p, plan, item);
    wait_barrier(shared.queries_empty(), parity ^ 1);
    parity ^= 1;
#pragma unroll 4
    for (int row = warp * kRowsAtOnce + lane / kChunks; row < kRows;
         row += kQueryWarps * kRowsAtOnce) {
      const bool valid = row < work.rows;
      const T* from = static_cast<const T*>(p.op.query) +
                      row_offset(p, work.tile.query_start, work.kv_head,
                                 work.tile.first_row + (valid ? row : 0), p.op.query_stride_token,
                                 p.op.query_stride_head) +
                      chunk * 8;
      copy_async(column + row * kPanelRowBytes + ((chunk ^ row) & 7) * 16, from, valid);
    }
    commit_copies();
    wait_copies<0>();
    fence_shared_for_async();
    __syncwarp();
    if (lane == 0) arrive(shared.queries_full());
  }
}

// ---- the warpgroups that compute ----

// Turns scores into weights. Returns in `rescale` what the sums so far are to be multiplied by.
template <int COUNT>
__device__ __forceinline__ void softmax(float (&scores)[COUNT], float factor, float (&maximum)[2],
                                        float (&sum)[2], float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m = -INFINITY;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      m = fmaxf(m, fmaxf(scores[i + half * 2], scores[i + half * 2 + 1]));
    }
    m = fmaxf(m, __shfl_xor_sync(kWarpMask, m, 1));
    m = fmaxf(m, __shfl_xor_sync(kWarpMask, m, 2));
    m = fmaxf(maximum[half], m * factor);
    const float reference = m == -INFINITY ? 0.0f : m;
    rescale[half] = exp2_fast(maximum[half] - reference);
    maximum[half] = m;
    float tile_sum[2] = {};
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& s = scores[i + half * 2 + j];
        s = exp2_fast(fmaf(s, factor, -reference));
        tile_sum[j] += s;
      }
    }
    sum[half] = sum[half] * rescale[half] + (tile_sum[0] + tile_sum[1]);
  }
}

// Lane t of each four gives words t of four vectors and gets vector t: word k from lane k.
__device__ __forceinline__ uint4 transpose_in_fours(uint4 v, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  uint32_t x = __shfl_xor_sync(kWarpMask, odd ? v.x : v.y, 1);
  uint32_t y = __shfl_xor_sync(kWarpMask, odd ? v.z : v.w, 1);
  (odd ? v.x : v.y) = x;
  (odd ? v.z : v.w) = y;
  x = __shfl_xor_sync(kWarpMask, upper ? v.x : v.z, 2);
  y = __shfl_xor_sync(kWarpMask, upper ? v.y : v.w, 2);
  (upper ? v.x : v.z) = x;
  (upper ? v.y : v.w) = y;
  return v;
}

template <typename T, int HEAD_DIM>
struct Consumer {
  using Traits = WgmmaTraits<HEAD_DIM>;
  static constexpr int kKeys = Traits::kKeys;

  const KernelParams& p;
  const SharedPlaces<HEAD_DIM>& shared;
  int warpgroup, lane;
  int first_row;  // of this thread in the tile; the other is 8 rows on
  uint64_t queries;
  float sums[HEAD_DIM / 2];
  float scores[kKeys / 2];
  uint32_t weights[kKeys / 16][4];
  float maximum[2], sum[2], rescale[2];

  __device__ __forceinline__ Consumer(const KernelParams& p, const SharedPlaces<HEAD_DIM>& shared)
      : p(p),
        shared(shared),
        warpgroup(threadIdx.x / kWarpgroup - 1),
        lane(threadIdx.x % 32),
        first_row((threadIdx.x - kWarpgroup) / 32 * 16 + lane / 4),
        queries(tile_descriptor(shared.queries + warpgroup * kWarpgroupRows * kPanelRowBytes, 0)) {}

  __device__ __forceinline__ void multiply_keys(int stage) {
    const uint64_t keys = tile_descriptor(shared.keys(stage), 0);
    fence_products();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      const int panel = i / 4, bytes = i % 4 * 32;
      multiply_rows<T, kKeys>(scores, queries + (panel * Traits::kQueryPanelBytes + bytes) / 16,
                              keys + (panel * Traits::kKeyPanelBytes + bytes) / 16, i > 0);
    }
    commit_products();
  }

  __device__ __forceinline__ void multiply_values(int stage) {
    const uint64_t values = tile_descriptor(shared.values(stage), Traits::kKeyPanelBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      multiply_columns<T, HEAD_DIM>(sums, weights[i], values + i * 16 * kPanelRowBytes / 16);
    }
    commit_products();
  }

  // Scores of the tile that begins at `first_key` become weights.
  __device__ __forceinline__ void weigh(const TileWork& work, const int (&last)[2], int first_key) {
    if (p.score.capped) {
#pragma unroll
      for (float& s : scores) s = capped_score(s, p.score.inner);
    } else if (p.score.negated) {
#pragma unroll
      for (float& s : scores) s = -s;
    }
    if (work.is_masked(first_key, kKeys)) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int end = last[i / 2 % 2];
        const bool seen = key <= end && (p.window == 0 || key > end - p.window);
        if (!seen) scores[i] = -INFINITY;
      }
    }
    softmax(scores, p.score.factor, maximum, sum, rescale);
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      weights[i / 4][i % 4] = pack<T>(scores[i * 2], scores[i * 2 + 1]);
    }
  }

  // The maxima settle after a few tiles; from then on there is nothing to do.
  __device__ __forceinline__ void rescale_sums() {
    if (__any_sync(kWarpMask, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] *= rescale[i / 2 % 2];
    }
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  __device__ __forceinline__ void write_rows(const TileWork& work) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = sum[half];
      l += __shfl_xor_sync(kWarpMask, l, 1);
      l += __shfl_xor_sync(kWarpMask, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int row = first_row + half * 8;
      T* to = output_row<T, HEAD_DIM>(p, work.tile.query_start, work.kv_head,
                                      work.tile.first_row + row);
      const float* o = sums + half * 2;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i += 16) {
        auto word = [&](int j) {
          return pack<T>(o[i + j * 4] * inverse, o[i + j * 4 + 1] * inverse);
        };
        const uint4 v = transpose_in_fours({word(0), word(1), word(2), word(3)}, lane);
        if (row < work.rows) *reinterpret_cast<uint4*>(to + i * 2 + lane % 4 * 8) = v;
      }
    }
  }
};

// Named barriers: the turn of warpgroup 0, of warpgroup 1.
constexpr int kTurns = 1;

template <typename T, int HEAD_DIM>
__device__ __forceinline__ void compute_all(const KernelParams& p, const PlanView& plan,
                                            const SharedPlaces<HEAD_DIM>& shared) {
  constexpr int kKeys = WgmmaTraits<HEAD_DIM>::kKeys;
  Consumer<T, HEAD_DIM> c(p, shared);
  RingPosition at_keys, at_values;
  uint32_t query_parity = 0;
  const int my_turn = kTurns + c.warpgroup, other_turn = kTurns + 1 - c.warpgroup;
  constexpr int kTurnThreads = kConsumers * kWarpgroup;
  if (c.warpgroup == 1) arrive_named(other_turn, kTurnThreads);

  ItemWalk items(p, plan);
  for (int item = items.next(); item >= 0; item = items.next()) {
    const TileWork work = work_of<HEAD_DIM>(p, plan, item);
    const int last[2] = {work.last_key(p, c.first_row), work.last_key(p, c.first_row + 8)};
#pragma unroll
    for (float& s : c.sums) s = 0.0f;
    c.maximum[0] = c.maximum[1] = -INFINITY;
    c.sum[0] = c.sum[1] = 0.0f;

    wait_barrier(shared.queries_full(), query_parity);
    query_parity ^= 1;
    auto keys_done = [&](int n) {
      c.release(shared.keys_empty(at_keys.stage));
      at_keys.advance();
      if (n == work.num_tiles - 1) c.release(shared.queries_empty());
    };
    auto values_done = [&] {
      c.release(shared.values_empty(at_values.stage));
      at_values.advance();
    };
    if (work.num_tiles > 0) {
      int first_key = (work.first_tile + work.num_tiles - 1) * kKeys;
      wait_barrier(shared.keys_full(at_keys.stage), at_keys.parity);
      c.multiply_keys(at_keys.stage);
      wait_products<0>();
      pin(c.scores);
      keys_done(0);
      c.weigh(work, last, first_key);
      c.pack_weights();

      for (int n = 1; n < work.num_tiles; ++n) {
        first_key -= kKeys;
        wait_barrier(shared.keys_full(at_keys.stage), at_keys.parity);
        sync_named(my_turn, kTurnThreads);
        c.multiply_keys(at_keys.stage);
        wait_barrier(shared.values_full(at_values.stage), at_values.parity);
        c.multiply_values(at_values.stage);
        arrive_named(other_turn, kTurnThreads);
        wait_products<1>();
        pin(c.scores);
        keys_done(n);
        c.weigh(work, last, first_key);
        wait_products<0>();
        pin(c.sums);
        values_done();
        c.rescale_sums();
        c.pack_weights();
      }

      wait_barrier(shared.values_full(at_values.stage), at_values.parity);
      c.multiply_values(at_values.stage);
      wait_products<0>();
      pin(c.sums);
      values_done();
    } else {
      c.release(shared.queries_empty());
    }
    c.write_rows(work);
  }
  if (c.warpgroup == 0) sync_named(my_turn, kTurnThreads);
}

template <typename T, int HEAD_DIM>
__global__ __launch_bounds__(kThreads, 1) void prefill_wgmma_kernel(
    const __grid_constant__ KernelParams p, const __grid_constant__ CUtensorMap pages) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(kPanelAlignment) char shared_memory[];
  const SharedPlaces<HEAD_DIM> shared(shared_memory);
  const PlanView plan(p);
  if (threadIdx.x == 0) {
    prefetch_map(&pages);
    init_barrier(shared.queries_full(), kQueryWarps);
    init_barrier(shared.queries_empty(), kConsumerWarps);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared.keys_full(stage), 1);
      init_barrier(shared.values_full(stage), 1);
      init_barrier(shared.keys_empty(stage), kConsumerWarps);
      init_barrier(shared.values_empty(stage), kConsumerWarps);
    }
    publish_barriers();
  }
  __syncthreads();

  const int warp = __shfl_sync(kWarpMask, static_cast<int>(threadIdx.x / 32), 0);
  if (warp < kWarpgroup / 32) {
    give_registers_back<kProducerRegisters>();
    if (warp == 0) {
      fetch_all_keys<T, HEAD_DIM>(p, &pages, plan, shared);
    } else {
      fetch_all_queries<T, HEAD_DIM>(p, plan, shared, warp - 1);
    }
  } else {
    take_registers<kConsumerRegisters>();
    compute_all<T, HEAD_DIM>(p, plan, shared);
  }
#endif
}

// The cache as the copy engine sees it: [num_blocks, 2 * num_kv_heads, block_size, D], fetched in
// boxes of one panel of one page.
cudaError_t make_page_map(const KernelParams& p, CUtensorMap* map) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto head_dim = static_cast<cuuint64_t>(p.op.head_dim);
  const auto block_size = static_cast<cuuint64_t>(p.op.block_size);
  const cuuint64_t row_bytes = head_dim * 2;
  const cuuint64_t sizes[] = {head_dim, block_size, static_cast<cuuint64_t>(2 * p.op.num_kv_heads),
                              static_cast<cuuint64_t>(p.op.num_blocks)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * block_size,
                                static_cast<cuuint64_t>(p.op.cache_stride_block) * 2};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(block_size), 1, 1};
  const cuuint32_t element_strides[] = {1, 1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map,
      p.op.dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, const_cast<void*>(p.op.kv_cache), sizes, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, int HEAD_DIM>
cudaError_t launch(const KernelParams& p, cudaStream_t stream) {
  using Traits = WgmmaTraits<HEAD_DIM>;
  const auto kernel = prefill_wgmma_kernel<T, HEAD_DIM>;
  DeviceLimits limits;
  CUtensorMap map;
  cudaError_t status = device_limits(&limits);
  if (status == cudaSuccess) status = make_page_map(p, &map);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits::kSharedBytes);
  }
  if (status != cudaSuccess) return status;
  const int64_t items = p.op.num_kv_heads * max_prefill_tiles(p.op.num_seqs, p.op.num_tokens,
                                                              p.op.max_query_len, p.group);
  const auto blocks = static_cast<unsigned>(items < limits.num_sms ? items : limits.num_sms);
  kernel<<<blocks, kThreads, Traits::kSharedBytes, stream>>>(p, map);
  return cudaGetLastError();
}

}  // namespace

bool prefill_wgmma_serves(const KernelParams& p, const DeviceLimits& limits) {
#ifdef PAGEDINFER_WITH_SM90A
  const bool built_for = limits.compute_capability == 90;
#else
  const bool built_for = false;
#endif
  const bool head_dim = p.op.head_dim == 64 || p.op.head_dim == 128 || p.op.head_dim == 256;
  return built_for && head_dim && p.op.dtype != DType::float32;
}

cudaError_t launch_prefill_wgmma(const KernelParams& p, cudaStream_t stream) {
  return dispatch_half_type(p.op.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    switch (p.op.head_dim) {
      case 64:
        return launch<T, 64>(p, stream);
      case 128:
        return launch<T, 128>(p, stream);
      case 256:
        return launch<T, 256>(p, stream);
      default:
        throw std::invalid_argument("paged_attention: no wgmma kernel for head_dim " +
                                    std::to_string(p.op.head_dim) + "; supported are 64, 128, 256");
    }
  });
}

}  // namespace pagedinfer::attention
