// The warps of the wgmma prefill kernel that fetch: one K, one V, through the copy engine, a page
// in one box; two Q, 16 bytes a lane, so that any strides will do, where it is not loaded by the
// roles that compute.
#pragma once

#include "attention/mma_primitives.cuh"
#include "attention/prefill_wgmma_roles.cuh"
#include "common/tensor_map.h"

namespace pagedinfer::attention::wgmma {

// The cache as the copy engine sees it. A box is one head's K or V of a page, and lands as
// PanelRows lays rows out: so the dimensions are, from the inside, the 64 columns of a panel, 8
// rows, the panels, the groups of 8 rows (of all heads' K and V), the blocks.
inline cudaError_t make_page_map(const KernelParams& p, CUtensorMap* map) {
  const auto panels = static_cast<cuuint64_t>(p.op.head_dim / kPanelColumns);
  const auto groups = static_cast<cuuint64_t>(p.op.block_size / kGroupRows);
  const cuuint64_t row_bytes = panels * kPanelRowBytes;
  const cuuint64_t sizes[] = {kPanelColumns, kGroupRows, panels,
                              static_cast<cuuint64_t>(2 * p.op.num_kv_heads) * groups,
                              static_cast<cuuint64_t>(p.op.num_blocks)};
  const cuuint64_t strides[] = {row_bytes, kPanelRowBytes, row_bytes * kGroupRows,
                                static_cast<cuuint64_t>(p.op.cache_stride_block) * 2};
  const cuuint32_t box[] = {kPanelColumns, kGroupRows, static_cast<cuuint32_t>(panels),
                            static_cast<cuuint32_t>(groups), 1};
  return make_tensor_map(p.op.kv_cache, p.op.dtype, 5, sizes, strides, box, map);
}

// A lane's share of a tile of keys: one page.
struct PageShare {
  int row;      // of the page's first token in the tile
  int id;       // of the block
  bool ragged;  // it holds keys that are used, and others
};

template <typename T, int HEAD_DIM>
struct PageFetcher {
  using Sizes = Traits<HEAD_DIM>;
  using Rows = PanelRows<HEAD_DIM>;
  static constexpr int kMinBlockSize = 8;
  static_assert(Sizes::kKeys / kMinBlockSize <= 32);

  const KernelParams& p;
  const CUtensorMap* map;
  int lane, pages;

  __device__ __forceinline__ PageFetcher(const KernelParams& p, const CUtensorMap* map)
      : p(p), map(map), lane(threadIdx.x % 32), pages(Sizes::kKeys >> p.block_shift) {}

  __device__ __forceinline__ int first_token(const TileWork& work, int n) const {
    return (work.first_tile + work.num_tiles - 1 - n) * Sizes::kKeys;
  }

  // The share of this lane in the n-th tile from the end.
  __device__ __forceinline__ PageShare share(const TileWork& work, int n) const {
    const int row = lane << p.block_shift;
    const int token = first_token(work, n) + row;
    const int end = token + (1 << p.block_shift);
    const bool inside =
        lane < pages && n < work.num_tiles && token < work.tile.seq_len && end > work.key_begin;
    // Outside of the tensor the copy engine writes zeros.
    int id = static_cast<int>(p.op.num_blocks);
    if (inside) {
      id = __ldg(p.op.block_table + work.tile.seq * p.op.block_table_stride +
                 (token >> p.block_shift));
    }
    return {row, id, inside && (token < work.key_begin || end > work.tile.seq_len)};
  }

  // `matrix`: the KV head, for K; num_kv_heads more for V.
  __device__ __forceinline__ void fetch_page(uint32_t to, const PageShare& share, int matrix,
                                             uint32_t barrier) const {
    fetch_box(to + share.row * Rows::kRowBytes, map, 0, 0, 0,
              matrix << (p.block_shift - kGroupShift), share.id, barrier);
  }

  __device__ __forceinline__ void fetch_keys(uint32_t to, const TileWork& work,
                                             const PageShare& share, uint32_t barrier) const {
    if (lane == 0) arrive_expecting(barrier, Sizes::kKeyBytes);
    __syncwarp();
    if (lane < pages) fetch_page(to, share, work.kv_head, barrier);
    __syncwarp();
  }

  // The same, but ragged pages are copied row by row, with zeros for tokens that are not used.
  __device__ __forceinline__ void fetch_values(uint32_t to, const TileWork& work,
                                               const PageShare& share, int n,
                                               uint32_t barrier) const {
    unsigned ragged = __ballot_sync(kWarpMask, share.ragged);
    const int copied = __popc(ragged) << p.block_shift;  // rows
    if (ragged != 0) {
      const HeadPages<T, HEAD_DIM> head(p, work.kv_head);
      for (unsigned left = ragged; left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const int row = __shfl_sync(kWarpMask, share.row, owner);
        const int id = __shfl_sync(kWarpMask, share.id, owner);
        copy_ragged(to, row, head.page(p, id) + head.value_bytes, work, first_token(work, n));
      }
      fence_shared_for_async();
      __syncwarp();
    }
    if (lane == 0) arrive_expecting(barrier, Sizes::kKeyBytes - copied * Rows::kRowBytes);
    __syncwarp();
    if (lane < pages && !share.ragged) {
      fetch_page(to, share, static_cast<int>(p.op.num_kv_heads) + work.kv_head, barrier);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy_ragged(uint32_t tile, int first, const char* page,
                                              const TileWork& work, int tile_token) const {
    constexpr int kChunks = HEAD_DIM / 8;
    for (int i = lane; i < kChunks << p.block_shift; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int token = tile_token + first + row;
      uint4 value = {0, 0, 0, 0};
      if (token >= work.key_begin && token < work.tile.seq_len) {
        value = __ldg(reinterpret_cast<const uint4*>(page + row * (HEAD_DIM * 2) + chunk * 16));
      }
      store_shared(tile + Rows::offset(first + row, chunk), value);
    }
  }
};

// One warp: all K (or all V) of the block's items, as fast as stages become empty. The block ids
// are fetched a tile ahead.
template <typename T, int HEAD_DIM, bool VALUES>
__device__ __forceinline__ void fetch_all_pages(const KernelParams& p, const CUtensorMap* map,
                                                const PlanView& plan,
                                                const SharedPlaces<HEAD_DIM>& shared) {
  const PageFetcher<T, HEAD_DIM> fetcher(p, map);
  RingPosition<VALUES ? Traits<HEAD_DIM>::kValueStages : Traits<HEAD_DIM>::kKeyStages> at;
  ItemWalk items(p, plan);
  for (int item = items.next(); item >= 0; item = items.next()) {
    const TileWork work = work_of<HEAD_DIM>(p, plan, item);
    PageShare next = fetcher.share(work, 0);
    for (int n = 0; n < work.num_tiles; ++n) {
      const PageShare share = next;
      next = fetcher.share(work, n + 1);
      if constexpr (VALUES) {
        wait_barrier(shared.values_empty(at.stage), at.parity ^ 1);
        fetcher.fetch_values(shared.values(at.stage), work, share, n, shared.values_full(at.stage));
      } else {
        wait_barrier(shared.keys_empty(at.stage), at.parity ^ 1);
        fetcher.fetch_keys(shared.keys(at.stage), work, share, shared.keys_full(at.stage));
      }
      at.advance();
    }
  }
}

// One of kQueryWarps warps: its rows of Q of all the block's items. Of tiles that see no key it
// writes the output, zeros; the others pass over them.
template <typename T, int HEAD_DIM>
struct QueryFetcher {
  static constexpr int kChunks = HEAD_DIM / 8;
  static constexpr int kRowsAtOnce = 32 / kChunks;
  static constexpr int kStep = kQueryWarps * kRowsAtOnce;

  const KernelParams& p;
  int warp, chunk, first_row;

  __device__ __forceinline__ QueryFetcher(const KernelParams& p, int warp)
      : p(p),
        warp(warp),
        chunk(threadIdx.x % kChunks),
        first_row(warp * kRowsAtOnce + static_cast<int>(threadIdx.x) % 32 / kChunks) {}

  __device__ __forceinline__ void fetch(uint32_t to, const TileWork& work) const {
    const int first_token = work.tile.query_start + work.first_token;
    const int first_head = work.kv_head * p.group;
#pragma unroll 4
    for (int row = first_row; row < kRows; row += kStep) {
      const bool valid = row < work.rows;
      const RowPlace place(p, work.first_head, valid ? row : 0);
      const T* from = static_cast<const T*>(p.op.query) +
                      (first_token + place.token) * p.op.query_stride_token +
                      (first_head + place.head) * p.op.query_stride_head + chunk * 8;
      copy_async(to + PanelRows<HEAD_DIM>::offset(row, chunk), from, valid);
    }
    commit_copies();
    wait_copies<0>();
    fence_shared_for_async();
  }

  __device__ __forceinline__ void write_zeros(const TileWork& work) const {
    for (int row = first_row; row < work.rows; row += kStep) {
      const RowPlace place(p, work.first_head, row);
      T* to = output_of<T, HEAD_DIM>(p, work.tile.query_start + work.first_token + place.token,
                                     work.kv_head * p.group + place.head);
      *reinterpret_cast<uint4*>(to + chunk * 8) = uint4{0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void fetch_all(const PlanView& plan,
                                            const SharedPlaces<HEAD_DIM>& shared) const {
    [[maybe_unused]] RingPosition<Traits<HEAD_DIM>::kQueryStages> at;
    ItemWalk items(p, plan);
    for (int item = items.next(); item >= 0; item = items.next()) {
      const TileWork work = work_of<HEAD_DIM>(p, plan, item);
      if (work.num_tiles == 0) {
        write_zeros(work);
      } else if constexpr (!Traits<HEAD_DIM>::kHoldsQueries) {
        wait_barrier(shared.queries_empty(at.stage), at.parity ^ 1);
        fetch(shared.queries(at.stage), work);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.queries_full(at.stage));
        at.advance();
      }
    }
  }
};

}  // namespace pagedinfer::attention::wgmma
