// What the roles of the wgmma prefill kernel share: how its shared memory is laid out, the barriers
// at which they meet, and the items that a block walks.
#pragma once

#include <cstddef>

#include "attention/kernel_params.cuh"
#include "attention/prefill_work.cuh"
#include "common/hopper_primitives.cuh"
#include "common/wgmma.cuh"

namespace pagedinfer::attention::wgmma {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kWarpgroupRows = 64;
constexpr int kRows = kConsumers * kWarpgroupRows;
static_assert(kRows == kPrefillTileRows);

// The warps of the first warpgroup: one fetches K, one V, the others Q.
constexpr int kKeyWarp = 0, kValueWarp = 1, kFirstQueryWarp = 2;
constexpr int kQueryWarps = kWarpgroup / 32 - kFirstQueryWarp;

// Of the 65,536 registers of a multiprocessor; each a multiple of 8.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <= 65536);

template <int HEAD_DIM>
struct Traits {
  using Rows = PanelRows<HEAD_DIM>;
  static constexpr int kKeys = HEAD_DIM > 128 ? 64 : 128;  // of a tile
  static constexpr int kQueryBytes = kRows * Rows::kRowBytes;
  static constexpr int kKeyBytes = kKeys * Rows::kRowBytes;  // K or V of a tile
  // Whether the roles that compute hold Q in registers: then Q K^T reads a third less of shared
  // memory. At a head_dim of 256 there is no room for it.
  static constexpr bool kHoldsQueries = HEAD_DIM <= 128;
  // As many as fit.
  static constexpr int kQueryStages = kHoldsQueries ? 0 : 1;
  static constexpr int kKeyStages = kHoldsQueries ? 3 : 2;
  static constexpr int kValueStages = kHoldsQueries ? 3 : 2;
  static constexpr int kBarriers = 2 * (kQueryStages + kKeyStages + kValueStages);
  static constexpr int kTileBytes =
      kQueryStages * kQueryBytes + (kKeyStages + kValueStages) * kKeyBytes;
  static constexpr int kSharedBytes = kPanelAlignment + kTileBytes + kBarriers * 8;
};

// Addresses in shared memory: the stages of Q, of K, of V; the barriers, one (full, empty) pair for
// each stage, in the same order.
template <int HEAD_DIM>
struct SharedPlaces {
  using Sizes = Traits<HEAD_DIM>;
  static constexpr int kStages = Sizes::kBarriers / 2;
  uint32_t tiles;

  __device__ __forceinline__ explicit SharedPlaces(const void* shared)
      : tiles((shared_address(shared) + kPanelAlignment - 1) / kPanelAlignment * kPanelAlignment) {}

  __device__ __forceinline__ uint32_t queries(int stage) const {
    return tiles + stage * Sizes::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return tiles + Sizes::kQueryStages * Sizes::kQueryBytes + stage * Sizes::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return keys(Sizes::kKeyStages + stage);
  }

  __device__ __forceinline__ uint32_t queries_full(int stage) const { return full(stage); }
  __device__ __forceinline__ uint32_t queries_empty(int stage) const { return empty(stage); }
  __device__ __forceinline__ uint32_t keys_full(int stage) const {
    return full(Sizes::kQueryStages + stage);
  }
  __device__ __forceinline__ uint32_t keys_empty(int stage) const {
    return empty(Sizes::kQueryStages + stage);
  }
  __device__ __forceinline__ uint32_t values_full(int stage) const {
    return full(Sizes::kQueryStages + Sizes::kKeyStages + stage);
  }
  __device__ __forceinline__ uint32_t values_empty(int stage) const {
    return empty(Sizes::kQueryStages + Sizes::kKeyStages + stage);
  }

  // One thread, before the block's first barrier.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(full(stage), stage < Sizes::kQueryStages ? kQueryWarps : 1);
      init_barrier(empty(stage), kConsumerWarps);
    }
    publish_barriers();
  }

 private:
  __device__ __forceinline__ uint32_t full(int stage) const {
    return tiles + Sizes::kTileBytes + stage * 16;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

// Where a role is in a ring of stages.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;  // of the stage's current phase

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The items of a block. Every role walks them for itself.
struct ItemWalk {
  int total, blocks;
  int item, step;  // the next one; from there to the one after

  __device__ __forceinline__ ItemWalk(const KernelParams& p, const PlanView& plan)
      : total(plan.header->num_prefill_tiles * static_cast<int>(p.op.num_kv_heads)),
        blocks(smaller(gridDim.x, plan.header->prefill_blocks)),
        item(blockIdx.x),
        step(2 * (blocks - blockIdx.x) - 1) {}

  // -1: there is none left.
  __device__ __forceinline__ int next() {
    const int found = item < total ? item : -1;
    item += step;
    step = 2 * blocks - step;
    return found;
  }
};

template <int HEAD_DIM>
__device__ __forceinline__ TileWork work_of(const KernelParams& p, const PlanView& plan, int item) {
  const int heads = static_cast<int>(p.op.num_kv_heads);
  return TileWork(p, plan.prefill_tiles[item / heads], item % heads, kRows,
                  Traits<HEAD_DIM>::kKeys);
}

// What the roles that compute need to know of an item.
struct ItemRecord {
  int num_tiles;  // of keys
  int first_tile;
  int all_see_from, all_see_to;  // see TileWork
  int first_token, first_head;   // of its first row: see RowPlace; the token counted in the batch
  int first_position;            // of that token in its sequence
  int kv_head, rows;

  __device__ __forceinline__ explicit ItemRecord(const TileWork& work)
      : num_tiles(work.num_tiles),
        first_tile(work.first_tile),
        all_see_from(work.all_see_from),
        all_see_to(work.all_see_to),
        first_token(work.tile.query_start + work.first_token),
        first_head(work.first_head),
        first_position(work.tile.seq_len - work.tile.query_len + work.first_token),
        kv_head(work.kv_head),
        rows(work.rows) {}
};

// An item as a warp of a role that computes keeps it: a word of the plan's tile a lane. That takes
// two registers, and what is computed from shuffled words is known to be the same in all lanes, so
// that addresses of products and branches are uniform too.
struct Item {
  int word;
  int kv_head = -1;  // -1: there is none

  __device__ __forceinline__ bool exists() const { return kv_head >= 0; }

  template <int HEAD_DIM>
  __device__ __forceinline__ ItemRecord record(const KernelParams& p) const {
    static_assert(offsetof(PrefillTile, query_start) == 4 &&
                  offsetof(PrefillTile, query_len) == 8 && offsetof(PrefillTile, seq_len) == 12 &&
                  offsetof(PrefillTile, first_row) == 16);
    const auto at = [this](int i) { return __shfl_sync(kWarpMask, word, i); };
    const PrefillTile tile{.seq = at(0),
                           .query_start = at(1),
                           .query_len = at(2),
                           .seq_len = at(3),
                           .first_row = at(4)};
    return ItemRecord(TileWork(p, tile, kv_head, kRows, Traits<HEAD_DIM>::kKeys));
  }
};

// The items of a block that see keys. The next one is fetched ahead.
template <int HEAD_DIM>
struct ItemReader {
  const KernelParams& p;
  const PrefillTile* tiles;
  ItemWalk walk;
  Item ahead;

  __device__ __forceinline__ ItemReader(const KernelParams& p, const PlanView& plan)
      : p(p), tiles(plan.prefill_tiles), walk(p, plan) {
    fetch();
  }

  __device__ __forceinline__ Item next() {
    while (true) {
      const Item item = ahead;
      if (!item.exists()) return item;
      fetch();
      if (item.record<HEAD_DIM>(p).num_tiles > 0) return item;
    }
  }

 private:
  __device__ __forceinline__ void fetch() {
    const int item = walk.next();
    if (item < 0) {
      ahead.kv_head = -1;
      return;
    }
    const int heads = static_cast<int>(p.op.num_kv_heads);
    constexpr int kWords = sizeof(PrefillTile) / sizeof(int);
    ahead.kv_head = item % heads;
    ahead.word = __ldg(reinterpret_cast<const int*>(tiles + item / heads) + threadIdx.x % kWords);
  }
};

}  // namespace pagedinfer::attention::wgmma
