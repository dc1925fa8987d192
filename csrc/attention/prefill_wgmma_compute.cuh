// The warpgroups of the wgmma prefill kernel that compute: 64 rows each, their softmax and their
// output.
#pragma once

#include "attention/mma_primitives.cuh"
#include "attention/prefill_wgmma_roles.cuh"

namespace pagedinfer::attention::wgmma {

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
  using Rows = PanelRows<HEAD_DIM>;
  using Sizes = Traits<HEAD_DIM>;
  static constexpr int kKeys = Sizes::kKeys;

  const KernelParams& p;
  const SharedPlaces<HEAD_DIM>& shared;
  int warpgroup, lane;
  int first_row;  // of this thread in the tile; the other is 8 rows on
  // The item whose scores are computed:
  int first_key, tiles_left;     // of the tile at hand; tiles after it
  int all_see_from, all_see_to;  // keys in between are seen by every row
  int last_key[2];               // that the rows see
  float sums[HEAD_DIM / 2];
  float scores[kKeys / 2];
  uint32_t weights[kKeys / 16][4];
  float maximum[2], sum[2], rescale[2];
  RingPosition<Sizes::kQueryStages> at_queries;
  RingPosition<Sizes::kKeyStages> at_keys;
  RingPosition<Sizes::kValueStages> at_values;

  __device__ __forceinline__ Consumer(const KernelParams& p, const SharedPlaces<HEAD_DIM>& shared)
      : p(p),
        shared(shared),
        warpgroup(threadIdx.x / kWarpgroup - 1),
        lane(threadIdx.x % 32),
        first_row((threadIdx.x - kWarpgroup) / 32 * 16 + lane / 4) {}

  // Before the first tile of an item.
  __device__ __forceinline__ void begin(const ItemRecord& item) {
    tiles_left = item.num_tiles;
    first_key = (item.first_tile + item.num_tiles) * kKeys;
    all_see_from = item.all_see_from;
    all_see_to = item.all_see_to;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      last_key[half] =
          item.first_position + RowPlace(p, item.first_head, first_row + half * 8).token;
      maximum[half] = -INFINITY;
      sum[half] = 0.0f;
    }
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0.0f;
  }

  // Starts the products of the next tile of the item.
  __device__ __forceinline__ void multiply_keys() {
    first_key -= kKeys;
    --tiles_left;
    const uint64_t queries = Rows::descriptor(shared.queries(at_queries.stage) +
                                              warpgroup * kWarpgroupRows * Rows::kRowBytes);
    const uint64_t keys = Rows::descriptor(shared.keys(at_keys.stage));
    fence_products();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      const int columns = Rows::columns(i);
      multiply_rows<T, kKeys>(scores, queries + columns, keys + columns, i > 0);
    }
    commit_products();
  }

  __device__ __forceinline__ void multiply_values() {
    const uint64_t values = Rows::descriptor(shared.values(at_values.stage));
    fence_products();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      multiply_columns<T, HEAD_DIM>(sums, weights[i], values + Rows::rows(i));
    }
    commit_products();
  }

  // The scores of the tile become weights.
  __device__ __forceinline__ void weigh() {
    if (p.score.capped) {
#pragma unroll
      for (float& s : scores) s = capped_score(s, p.score.inner);
    } else if (p.score.negated) {
#pragma unroll
      for (float& s : scores) s = -s;
    }
    if (first_key + kKeys - 1 > all_see_to || first_key < all_see_from) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int end = last_key[i / 2 % 2];
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
  __device__ __forceinline__ void rescale_sums(bool begins) {
    if (__any_sync(kWarpMask, begins || rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) {
        sums[i] = begins ? 0.0f : sums[i] * rescale[i / 2 % 2];
      }
    }
  }

  __device__ __forceinline__ void wait_for_queries() const {
    wait_barrier(shared.queries_full(at_queries.stage), at_queries.parity);
  }
  __device__ __forceinline__ void wait_for_keys() const {
    wait_barrier(shared.keys_full(at_keys.stage), at_keys.parity);
  }
  __device__ __forceinline__ void wait_for_values() const {
    wait_barrier(shared.values_full(at_values.stage), at_values.parity);
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // K of the tile has been read, and with the item's last one Q.
  __device__ __forceinline__ void keys_done() {
    release(shared.keys_empty(at_keys.stage));
    at_keys.advance();
    if (tiles_left == 0) {
      release(shared.queries_empty(at_queries.stage));
      at_queries.advance();
    }
  }

  __device__ __forceinline__ void values_done() {
    release(shared.values_empty(at_values.stage));
    at_values.advance();
  }

  __device__ __forceinline__ void write_rows(const ItemRecord& item,
                                             const float (&weight_sum)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = weight_sum[half];
      l += __shfl_xor_sync(kWarpMask, l, 1);
      l += __shfl_xor_sync(kWarpMask, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int row = first_row + half * 8;
      const RowPlace place(p, item.first_head, row);
      T* to = output_of<T, HEAD_DIM>(p, item.first_token + place.token,
                                     item.kv_head * p.group + place.head);
      const float* o = sums + half * 2;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i += 16) {
        auto word = [&](int j) {
          return pack<T>(o[i + j * 4] * inverse, o[i + j * 4 + 1] * inverse);
        };
        const uint4 v = transpose_in_fours({word(0), word(1), word(2), word(3)}, lane);
        if (row < item.rows) *reinterpret_cast<uint4*>(to + i * 2 + lane % 4 * 8) = v;
      }
    }
  }
};

// Named barriers: the turn of warpgroup 0, of warpgroup 1.
constexpr int kTurns = 1;

// One warpgroup. Tile after tile, over the ends of items, the products Q K^T of the next tile are
// started together with P V of the one at hand; the softmax of the next falls on the latter.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void compute_all(const KernelParams& p,
                                            const SharedPlaces<HEAD_DIM>& shared,
                                            const ItemRecord* records) {
  Consumer<T, HEAD_DIM> c(p, shared);
  constexpr int kTurnThreads = kConsumers * kWarpgroup;
  const int my_turn = kTurns + c.warpgroup, other_turn = kTurns + 1 - c.warpgroup;
  if (c.warpgroup == 1) arrive_named(other_turn, kTurnThreads);

  int item = 0;
  c.wait_for_queries();
  c.begin(records[0]);
  if (c.tiles_left > 0) {
    c.clear_sums();
    c.wait_for_keys();
    c.multiply_keys();
    wait_products<0>();
    pin(c.scores);
    c.keys_done();
    c.weigh();
    c.pack_weights();

    float weight_sum[2];  // of the item at hand, once its weights are complete
    while (true) {
      const bool ends = c.tiles_left == 0;  // the weights at hand are the item's last
      if (ends) {
        weight_sum[0] = c.sum[0], weight_sum[1] = c.sum[1];
        c.wait_for_queries();
        c.begin(records[(item + 1) % kRecords]);
        if (c.tiles_left == 0) break;
      }
      c.wait_for_keys();
      sync_named(my_turn, kTurnThreads);
      c.multiply_keys();
      c.wait_for_values();
      c.multiply_values();
      arrive_named(other_turn, kTurnThreads);
      wait_products<1>();
      pin(c.scores);
      c.keys_done();
      c.weigh();
      // The softmax is to be computed before the wait for P V, but ptxas would move the wait up
      // over it. Not over a branch, such as the one in this wait, which is over as it begins.
      pin(c.scores);
      c.wait_for_values();
      wait_products<0>();
      pin(c.sums);
      c.values_done();
      if (ends) c.write_rows(records[item++ % kRecords], weight_sum);
      c.rescale_sums(ends);
      c.pack_weights();
    }

    c.wait_for_values();
    c.multiply_values();
    wait_products<0>();
    pin(c.sums);
    c.write_rows(records[item % kRecords], weight_sum);
  }
  if (c.warpgroup == 0) sync_named(my_turn, kTurnThreads);
}

}  // namespace pagedinfer::attention::wgmma
