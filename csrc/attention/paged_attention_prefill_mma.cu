// Prefill: attention of sequences with many query rows (fp16, bf16), tiled along the rows, on
// tensor cores through mma.sync (sm_80 and newer).
//
//   for Q [M x D] a tile of packed rows, over tiles of 64 keys (32 if D is 256), the last first:
//     S = Q K^T;  m' = m, or rowmax S if that is far above;  P = 2^(S - m')
//     l = l 2^(m - m') + rowsum P;  O = O 2^(m - m') + P V                (softmax_rows.cuh)
//   out = O / l                                                (FlashAttention, Dao et al. 2022)
//
//   tensor        shape                                          dtype    strides (elements)
//   query         [num_tokens, num_heads, D]                     T        free, free, 1
//   kv_cache      [num_blocks, 2, num_kv_heads, block_size, D]   T        cache_stride_block, dense
//   block_table   [num_seqs, max_blocks]                         int32    block_table_stride, 1
//   plan          PrefillTile [num_prefill_tiles]                int32    the longest first
//   out           [num_tokens, num_heads, D]                     T        dense
//
// Grid: the most tiles that a batch of this shape can have x num_kv_heads; blocks past the plan's
// count leave at once. The hardware hands out blocks in order: the longest tiles start first.
//
// A block owns M packed rows of one KV head: a tile of the plan, or half of one. The query heads
// that share it lie side by side, so that a short chunk fills the tile too. Each of its four warps
// owns M / 4 rows, their softmax and their output.
//
// Shared memory: Q [M]; two buffers of a tile's (K, V); the block ids of the next tiles; what is
// kept of the block's work. One barrier a tile.
//
// Shared prefixes (SHARED; shared_prefixes.h): the members of a group are the query tokens of one
// long query that sees all keys of the prefix. Tiles come from the groups, not from the plan, and
// blockIdx.y is one of prefix_splits parts of the keys. What is written is not `out` but
// PrefixResults (partial_results.cuh), for the decode kernel to fold in.
//
// Template: T, the element type; HEAD_DIM; SHARED.
//
// Invariants: keys outside key_begin .. seq_len - 1 are never read: their shared memory is zeroed
// (0 * NaN would be NaN). Only tiles that some row does not see whole are masked.
#include "attention/dispatch.h"
#include "attention/kernel_params.cuh"
#include "attention/launchers.cuh"
#include "attention/mma_primitives.cuh"
#include "attention/partial_results.cuh"
#include "attention/prefill_work.cuh"
#include "attention/softmax_rows.cuh"

namespace pagedinfer::attention {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kMinBlockSize = 8;

template <int HEAD_DIM>
struct PrefillTraits {
  // Half a tile of the plan at a head_dim of 256: the accumulators would not fit.
  static constexpr int kRows = HEAD_DIM > 128 ? kPrefillTileRows / 2 : kPrefillTileRows;
  static constexpr int kSubTiles = kPrefillTileRows / kRows;
  static constexpr int kWarpRows = kRows / kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;  // m16 tiles of a warp
  static constexpr int kKeys = HEAD_DIM > 128 ? 32 : 64;
  static constexpr int kMaxIds = kKeys / kMinBlockSize;  // blocks that a tile of keys may lie in
  using Rows = TileRows<HEAD_DIM>;
  static constexpr int kQueryBytes = kRows * Rows::kRowBytes;
  static constexpr int kKeyBytes = kKeys * Rows::kRowBytes;
  static constexpr int kSharedBytes = kQueryBytes + 2 * 2 * kKeyBytes;
};

// The accumulator of the i-th of a row of n8 tiles.
template <int COUNT>
__device__ __forceinline__ float (&accumulator(float (&scores)[COUNT], int i))[4] {
  return reinterpret_cast<float (&)[4]>(scores[i * 4]);
}

template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load_queries(const KernelParams& p, const TileWork& work,
                                             uint32_t shared) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Rows = TileRows<HEAD_DIM>;
  for (int i = threadIdx.x; i < Traits::kRows * Rows::kChunks; i += kThreads) {
    const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
    const bool valid = row < work.rows;
    const T* from =
        static_cast<const T*>(p.op.query) +
        row_offset(p, work.tile.query_start, work.kv_head, work.tile.first_row + (valid ? row : 0),
                   p.op.query_stride_token, p.op.query_stride_head) +
        chunk * 8;
    copy_async(shared + Rows::offset(row, chunk), from, valid);
  }
}

// The copies of K and V of a tile of keys, in steps of one 16-byte chunk a thread, which the loop
// starts between the products: computing their addresses then costs nothing.
template <typename T, int HEAD_DIM>
struct KeyCopier {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Rows = TileRows<HEAD_DIM>;
  using Walk = ChunkWalk<kThreads, Rows::kChunks>;
  static_assert(Traits::kKeys * Rows::kChunks % kThreads == 0);
  static constexpr int kSteps = Traits::kKeys * Rows::kChunks / kThreads;
  static constexpr int kStepRows = kThreads / Rows::kChunks;
  // The rows of a step lie in one block of the cache, which is then the same for all threads.
  static constexpr bool kStepInBlock = Walk::kWholeRows && kStepRows <= kMinBlockSize;

  const KernelParams& p;
  const uint4* keys;      // of the head, in block 0
  int64_t value_vectors;  // from there to its values

  __device__ __forceinline__ KeyCopier(const KernelParams& p, const TileWork& work) : p(p) {
    const HeadPages<T, HEAD_DIM> pages(p, work.kv_head);
    keys = reinterpret_cast<const uint4*>(pages.base);
    value_vectors = pages.value_bytes / 16;
  }

  // Step j of the tile that begins with key `first`, the from_begin-th of `seen` that are used, in
  // the blocks `ids`. Others are not read; with none, `ids` may be anything.
  __device__ __forceinline__ void start(int j, int from_begin, unsigned seen, int first,
                                        const int* ids, uint32_t shared) const {
    int thread = threadIdx.x;
    // Where rows are not whole, what follows from it is computed each time: kept, it would spill.
    if constexpr (!Walk::kWholeRows) asm volatile("" : "+r"(thread));
    const int row = Walk::row(thread, j), chunk = Walk::chunk(thread, j);
    const bool valid = static_cast<unsigned>(from_begin + row) < seen;
    const int in_block = kStepInBlock ? j * kStepRows : row;
    const int row_of_block = (first + in_block) & ((1 << p.block_shift) - 1);
    const auto chunk_of_block =
        static_cast<uint32_t>((row_of_block + row - in_block) * Rows::kChunks + chunk);
    const auto id = static_cast<uint32_t>(ids[in_block >> p.block_shift]);
    const uint64_t from = static_cast<uint64_t>(id) * p.block_vectors + chunk_of_block;
    // Eight rows on everything repeats.
    const uint32_t to =
        kStepRows % 8 == 0 && Walk::kWholeRows
            ? shared + Rows::offset(Walk::row(thread, 0), chunk) + j * kStepRows * Rows::kRowBytes
            : shared + Rows::offset(row, chunk);
    copy_async(to, keys + from, valid);
    copy_async(to + Traits::kKeyBytes, keys + from + value_vectors, valid);
  }
};

// The `index`th tile of rows of the groups; false: there are not so many. The grid has room for as
// many as there may be, so most blocks find none: a lane of each warp looks at a group, and all at
// once.
__device__ bool shared_tile(const KernelParams& p, int index, PrefillTile* tile) {
  const SharedPrefixes& prefixes = p.op.prefixes;
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < prefixes.num_groups; base += 32) {
    const int g = base + lane;
    int first = 0, members = 0, len = 0;
    if (g < prefixes.num_groups) {
      first = prefixes.start[g];
      members = prefixes.start[g + 1] - first;
      len = prefixes.lens[g];
    }
    const int tiles = len > 0 ? ceil_div(members * p.group, kPrefillTileRows) : 0;
    int end = tiles;  // of the group's tiles
    for (int delta = 1; delta < 32; delta *= 2) {
      const int before = __shfl_up_sync(kWarpMask, end, delta);
      if (lane >= delta) end += before;
    }
    const unsigned behind = __ballot_sync(kWarpMask, index < end);
    if (behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      first = __shfl_sync(kWarpMask, first, owner);
      *tile = {
          .seq = first,
          .query_start = p.op.query_start_loc[first],
          .query_len = __shfl_sync(kWarpMask, members, owner),
          .seq_len = __shfl_sync(kWarpMask, len, owner),
          .first_row = (index - __shfl_sync(kWarpMask, end - tiles, owner)) * kPrefillTileRows};
      return true;
    }
    index -= __shfl_sync(kWarpMask, end, 31);
  }
  return false;
}

// The work of this block; false if there is none.
template <int HEAD_DIM, bool SHARED>
__device__ bool find_tile(const KernelParams& p, PrefillTile* tile) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int sub_tile = blockIdx.x / static_cast<int>(p.op.num_kv_heads);
  const int index = sub_tile / Traits::kSubTiles;
  if constexpr (SHARED) {
    if (!shared_tile(p, index, tile)) return false;
  } else {
    const PlanView plan(p);
    if (index >= plan.header->num_prefill_tiles) return false;
    *tile = plan.prefill_tiles[index];
  }
  tile->first_row += sub_tile % Traits::kSubTiles * Traits::kRows;
  return tile->first_row < tile->query_len * p.group;
}

// What is looked at once a tile of keys, and after them all: registers are short in between.
struct Kept {
  PrefillTile tile;
  int kv_head, rows, all_see_from, all_see_to;  // as in TileWork
};

template <typename T, int HEAD_DIM, bool SHARED>
__global__ __launch_bounds__(kThreads,
                             2) void prefill_mma_kernel(const __grid_constant__ KernelParams p) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Rows = TileRows<HEAD_DIM>;
  using Copier = KeyCopier<T, HEAD_DIM>;
  constexpr int kRowTiles = Traits::kRowTiles;
  constexpr int kKeys = Traits::kKeys;
  constexpr int kKeyTiles = kKeys / 8;  // n8 tiles of S
  extern __shared__ __align__(128) char shared[];
  __shared__ int ids[2][Traits::kMaxIds];
  __shared__ Kept kept;
  __shared__ int last_keys[Traits::kRows];  // that the rows see

  PrefillTile tile;
  if (!find_tile<HEAD_DIM, SHARED>(p, &tile)) return;
  const int kv_head = blockIdx.x % static_cast<int>(p.op.num_kv_heads);
  const TileWork work = SHARED ? TileWork(p, tile, kv_head, Traits::kRows, kKeys, blockIdx.y,
                                          static_cast<int>(p.op.prefix_splits))
                               : TileWork(p, tile, kv_head, Traits::kRows, kKeys);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t queries = shared_address(shared);
  const uint32_t keys = queries + Traits::kQueryBytes;
  // Where a lane's rows of the matrices that it loads lie: of Q and V, 16 by 16; of K, 16 by 16
  // with the quarters in another order.
  const uint32_t own_queries = queries + warp * Traits::kWarpRows * Rows::kRowBytes;
  const uint32_t lane_rows = Rows::offset(lane % 16, lane / 16);
  const uint32_t lane_keys = Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 & 1);
  const Copier copier(p, work);
  const int key_begin = work.key_begin;
  const int first_of_last = (work.first_tile + work.num_tiles - 1) * kKeys;
  if (threadIdx.x == 0) {
    kept = {work.tile, kv_head, work.rows, work.all_see_from, work.all_see_to};
  }
  if (threadIdx.x < Traits::kRows) last_keys[threadIdx.x] = work.last_key(p, threadIdx.x);
  load_queries<T, HEAD_DIM>(p, work, queries);
  __syncthreads();

  auto buffer = [](int first_key) { return first_key / kKeys & 1; };
  // Of the tile that begins with this key: thread i fetches the id of its i-th block. Tokens
  // outside the sequence take the id of one inside: it is not used, and no other may be read.
  auto fetch_ids = [&](int first_key) {
    if (static_cast<int>(threadIdx.x) >= larger(1, kKeys >> p.block_shift)) return;
    int token = first_key + (static_cast<int>(threadIdx.x) << p.block_shift);
    token = larger(key_begin, smaller(token, kept.tile.seq_len - 1));
    const int32_t* table = p.op.block_table + kept.tile.seq * p.op.block_table_stride;
    copy_async_int(shared_address(&ids[buffer(first_key)][threadIdx.x]),
                   table + (token >> p.block_shift));
  };
  auto start_copies = [&](int step, int first_key) {
    const int seen = first_key + kKeys > key_begin ? kept.tile.seq_len - key_begin : 0;
    copier.start(step, first_key - key_begin, seen, first_key, ids[buffer(first_key)],
                 keys + buffer(first_key) * 2 * Traits::kKeyBytes);
  };

  if (work.num_tiles > 0) {
    fetch_ids(first_of_last);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < Copier::kSteps; ++j) start_copies(j, first_of_last);
    if (work.num_tiles > 1) fetch_ids(first_of_last - kKeys);
  }
  commit_copies();

  float sums[kRowTiles][HEAD_DIM / 8][4] = {};
  SoftmaxRows softmax[kRowTiles];
#pragma unroll
  for (SoftmaxRows& rows : softmax) rows.clear();

  for (int first_key = first_of_last; first_key + kKeys > key_begin; first_key -= kKeys) {
    wait_copies<0>();
    __syncthreads();  // this tile and the ids of the next are there, all are done with the last
    // Into the place of this tile's ids, which have served.
    if (first_key - kKeys > key_begin) fetch_ids(first_key - 2 * kKeys);
    const uint32_t k_tile = keys + buffer(first_key) * 2 * Traits::kKeyBytes;
    const uint32_t v_tile = k_tile + Traits::kKeyBytes;

    // S = Q K^T
    float scores[kRowTiles][kKeyTiles * 4] = {};
#pragma unroll
    for (int slice = 0; slice < HEAD_DIM / 16; ++slice) {
      static_assert(Copier::kSteps <= HEAD_DIM / 16);
      if (slice < Copier::kSteps) start_copies(slice, first_key - kKeys);
      uint32_t q[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        load_matrices(q[r], Rows::slice(own_queries + lane_rows, slice) + r * 16 * Rows::kRowBytes);
      }
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        uint32_t k[4];
        load_matrices(k, Rows::slice(k_tile + lane_keys, slice) + pair * 16 * Rows::kRowBytes);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          multiply_add<T>(accumulator(scores[r], pair * 2), q[r], k[0], k[1]);
          multiply_add<T>(accumulator(scores[r], pair * 2 + 1), q[r], k[2], k[3]);
        }
      }
    }
    commit_copies();

    if (p.score.capped || p.score.negated) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (float& s : scores[r]) s = transformed_score(s, p.score);
      }
    }
    if (!SHARED && (first_key < kept.all_see_from || first_key + kKeys - 1 > kept.all_see_to)) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp * Traits::kWarpRows + r * 16 + half * 8 + lane / 4;
          // Counted from this lane's first key.
          const int last = last_keys[row] - first_key - lane % 4 * 2;
#pragma unroll
          for (int i = 0; i < kKeys / 4; ++i) {
            const int key = i / 2 * 8 + i % 2;
            const bool seen = key <= last && (p.window == 0 || key > last - p.window);
            if (!seen) scores[r][i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
          }
        }
      }
    }

#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float rescale[2];
      if (softmax[r].raise(scores[r], p.score, rescale)) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) sums[r][i / 4][i % 4] *= rescale[i / 2 % 2];
      }
      softmax[r].weigh(scores[r], p.score);
    }

    // O += P V
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c) {
      uint32_t weights[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* s = scores[r] + c * 8 + i * 2;
          weights[r][i] = pack<T>(s[0], s[1]);
        }
      }
#pragma unroll
      for (int slice = 0; slice < HEAD_DIM / 16; ++slice) {
        uint32_t v[4];
        load_matrices_transposed(v,
                                 Rows::slice(v_tile + lane_rows, slice) + c * 16 * Rows::kRowBytes);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          multiply_add<T>(sums[r][slice * 2], weights[r], v[0], v[1]);
          multiply_add<T>(sums[r][slice * 2 + 1], weights[r], v[2], v[3]);
        }
      }
    }
  }

  if constexpr (SHARED) {
    wait_copies<0>();  // of Q, if there was no tile of keys
    __syncthreads();
    const PrefixResults<HEAD_DIM> results(p);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float l = softmax[r].sum[half];
        l += __shfl_xor_sync(kWarpMask, l, 1);
        l += __shfl_xor_sync(kWarpMask, l, 2);
        const int row = warp * Traits::kWarpRows + r * 16 + half * 8 + lane / 4;
        if (row >= kept.rows) continue;
        const int64_t at =
            blockIdx.y * results.rows + row_offset(p, kept.tile.query_start, kept.kv_head,
                                                   kept.tile.first_row + row, p.op.num_heads, 1);
        if (lane % 4 == 0) results.scales[at] = {softmax[r].reference[half], l};
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 8; ++d) {
          *reinterpret_cast<float2*>(results.sums + at * HEAD_DIM + d * 8 + lane % 4 * 2) = {
              sums[r][d][half * 2], sums[r][d][half * 2 + 1]};
        }
      }
    }
    return;
  }

  // Out, through the warp's own rows of Q's place, so that whole rows are written 16 bytes at a
  // time. (Without a tile of keys the copies of Q may still be under way.)
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = softmax[r].sum[half];
      l += __shfl_xor_sync(kWarpMask, l, 1);
      l += __shfl_xor_sync(kWarpMask, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int row = warp * Traits::kWarpRows + r * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
        *reinterpret_cast<uint32_t*>(shared + Rows::offset(row, d) + lane % 4 * 4) =
            pack<T>(sums[r][d][half * 2] * inverse, sums[r][d][half * 2 + 1] * inverse);
      }
    }
  }
  __syncwarp();
  for (int i = lane; i < Traits::kWarpRows * Rows::kChunks; i += 32) {
    const int row = warp * Traits::kWarpRows + i / Rows::kChunks, chunk = i % Rows::kChunks;
    if (row >= kept.rows) break;
    T* to =
        output_row<T, HEAD_DIM>(p, kept.tile.query_start, kept.kv_head, kept.tile.first_row + row);
    *reinterpret_cast<uint4*>(to + chunk * 8) =
        *reinterpret_cast<const uint4*>(shared + Rows::offset(row, chunk));
  }
}

template <typename T, int HEAD_DIM, bool SHARED>
cudaError_t launch(const KernelParams& p, int64_t tiles, int splits, cudaStream_t stream) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const auto kernel = prefill_mma_kernel<T, HEAD_DIM, SHARED>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>(tiles * Traits::kSubTiles * p.op.num_kv_heads);
  kernel<<<dim3(blocks, splits), kThreads, Traits::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_prefill_mma(const KernelParams& p, cudaStream_t stream) {
  const int64_t tiles =
      max_prefill_tiles(p.op.num_seqs, p.op.num_tokens, p.op.max_query_len, p.group);
  return dispatch_half_type(p.op.dtype, [&](auto type) {
    return dispatch_head_dim(p.op.head_dim, [&](auto head_dim) {
      return launch<typename decltype(type)::Type, head_dim.value, false>(p, tiles, 1, stream);
    });
  });
}

cudaError_t launch_shared_prefixes(const KernelParams& p, cudaStream_t stream) {
  // As many as there may be: each group may fill its last tile in part.
  const int64_t tiles = p.op.num_tokens * p.group / kPrefillTileRows + p.op.prefixes.num_groups;
  const auto splits = static_cast<int>(p.op.prefix_splits);
  return dispatch_half_type(p.op.dtype, [&](auto type) {
    return dispatch_head_dim(p.op.head_dim, [&](auto head_dim) {
      return launch<typename decltype(type)::Type, head_dim.value, true>(p, tiles, splits, stream);
    });
  });
}

}  // namespace pagedinfer::attention
