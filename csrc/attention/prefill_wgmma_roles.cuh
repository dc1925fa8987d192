// What the roles of the wgmma prefill kernel share: how its shared memory is laid out, the barriers
// at which they meet, and the items that a block walks.
#pragma once

#include "attention/hopper_primitives.cuh"
#include "attention/kernel_params.cuh"
#include "attention/prefill_work.cuh"

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
  // As many as fit. Q of the next item is there when the last of this one's is read.
  static constexpr int kQueryStages = HEAD_DIM > 128 ? 1 : 2;
  static constexpr int kKeyStages = HEAD_DIM > 128 ? 2 : 3;
  static constexpr int kValueStages = 2;
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

// The items of a block: the roles that fetch walk them for themselves.
struct ItemWalk {
  int total, blocks, round_begin = 0, round = 0;

  __device__ __forceinline__ ItemWalk(const KernelParams& p, const PlanView& plan)
      : total(plan.header->num_prefill_tiles * static_cast<int>(p.op.num_kv_heads)),
        blocks(smaller(gridDim.x, plan.header->prefill_blocks)) {}

  // -1: there is none left.
  __device__ __forceinline__ int next() {
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
                  Traits<HEAD_DIM>::kKeys);
}

// What the roles that compute need to know of an item. It comes with Q: it is there when Q is.
struct alignas(16) ItemRecord {
  int num_tiles;  // of keys; 0: there are no more items
  int first_tile;
  int all_see_from, all_see_to;  // see TileWork
  int first_token, first_head;   // of its first row: see RowPlace; the token counted in the batch
  int first_position;            // of that token in its sequence
  int kv_head, rows;

  ItemRecord() = default;
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

// The record of the n-th item of a block lies at n % kRecords. It is read until the item's output
// is written, when Q of the next item has gone and the one after that is there.
constexpr int kRecords = 4;

}  // namespace pagedinfer::attention::wgmma
