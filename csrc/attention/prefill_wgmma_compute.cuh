// The warpgroups of the wgmma prefill kernel that compute: 64 rows each, their softmax and their
// output.
#pragma once

#include "attention/mma_primitives.cuh"
#include "attention/prefill_wgmma_roles.cuh"
#include "attention/softmax_rows.cuh"

namespace pagedinfer::attention::wgmma {

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
  uint32_t queries[Sizes::kHoldsQueries ? HEAD_DIM / 16 : 1][4];  // as the products take them
  SoftmaxRows rows;
  bool rescales;     // whether references were raised with the tile at hand: then the sums before
  float rescale[2];  // it are to be multiplied by these
  RingPosition<Sizes::kQueryStages> at_queries;
  RingPosition<Sizes::kKeyStages> at_keys;
  RingPosition<Sizes::kValueStages> at_values;
  bool keys_there = false, values_there = false;  // seen in look_ahead

  __device__ __forceinline__ Consumer(const KernelParams& p, const SharedPlaces<HEAD_DIM>& shared)
      : p(p),
        shared(shared),
        warpgroup(__shfl_sync(kWarpMask, static_cast<int>(threadIdx.x / kWarpgroup) - 1, 0)),
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
    }
    rows.clear();
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0.0f;
  }

  // Starts the loads of Q of an item: of a lane's two rows every fourth chunk of 16 bytes, from the
  // (lane % 4)-th on. For rows that do not exist the first one is read.
  __device__ __forceinline__ void load_queries(const ItemRecord& item) {
    if constexpr (Sizes::kHoldsQueries) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8;
        const RowPlace place(p, item.first_head, row < item.rows ? row : 0);
        const T* from = static_cast<const T*>(p.op.query) +
                        (item.first_token + place.token) * p.op.query_stride_token +
                        (item.kv_head * p.group + place.head) * p.op.query_stride_head +
                        lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i) {
          // Each row is read once, and an earlier kernel has just written it.
          const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from + i * 32));
          queries[i * 2][half] = v.x;
          queries[i * 2][half + 2] = v.y;
          queries[i * 2 + 1][half] = v.z;
          queries[i * 2 + 1][half + 2] = v.w;
        }
      }
    }
  }

  // Waits for Q of the item. In registers it is then as the products take it: of each chunk the
  // (lane % 4)-th word.
  __device__ __forceinline__ void take_queries() {
    if constexpr (Sizes::kHoldsQueries) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i += 2) {
          uint32_t (&a)[4] = queries[i];
          uint32_t (&b)[4] = queries[i + 1];
          const uint4 v = transpose_in_fours({a[half], a[half + 2], b[half], b[half + 2]}, lane);
          a[half] = v.x, a[half + 2] = v.y, b[half] = v.z, b[half + 2] = v.w;
        }
      }
    } else {
      wait_barrier(shared.queries_full(at_queries.stage), at_queries.parity);
    }
  }

  // Starts the products of the next tile of the item.
  __device__ __forceinline__ void multiply_keys() {
    first_key -= kKeys;
    --tiles_left;
    const uint64_t keys = Rows::descriptor(shared.keys(at_keys.stage));
    // Where Q is in shared memory. Shuffled, so that it is not computed before the loop, for all i:
    // there are no registers left to keep that.
    [[maybe_unused]] uint64_t query_rows;
    if constexpr (!Sizes::kHoldsQueries) {
      const int own = __shfl_sync(kWarpMask, warpgroup, 0);
      query_rows = Rows::descriptor(shared.queries(at_queries.stage) +
                                    own * kWarpgroupRows * Rows::kRowBytes);
    }
    fence_products();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      const int columns = Rows::columns(i);
      if constexpr (Sizes::kHoldsQueries) {
        multiply_rows<T, kKeys>(scores, queries[i], keys + columns, i > 0);
      } else {
        multiply_rows<T, kKeys>(scores, query_rows + columns, keys + columns, i > 0);
      }
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

  // Takes out the scores of keys that a row does not see: sees(key, the last key of the row), both
  // counted from this lane's first.
  template <typename Sees>
  __device__ __forceinline__ void mask(const Sees& sees) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = last_key[half] - first_key - lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& s = scores[i / 2 * 4 + half * 2 + i % 2];
        if (!sees(i / 2 * 8 + i % 2, last)) s = -INFINITY;
      }
    }
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
      mask([](int key, int last) { return key <= last; });
      if (p.window > 0) mask([this](int key, int last) { return key > last - p.window; });
    }
    rescales = rows.raise(scores, p.score, rescale);
    rows.weigh(scores, p.score);
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      weights[i / 4][i % 4] = pack<T>(scores[i * 2], scores[i * 2 + 1]);
    }
  }

  __device__ __forceinline__ void rescale_sums(bool begins) {
    if (begins) {
      clear_sums();
    } else if (rescales) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] *= rescale[i / 2 % 2];
    }
  }

  __device__ __forceinline__ void wait_for_keys() const {
    if (!keys_there) wait_barrier(shared.keys_full(at_keys.stage), at_keys.parity);
  }
  __device__ __forceinline__ void wait_for_values() const {
    if (!values_there) wait_barrier(shared.values_full(at_values.stage), at_values.parity);
  }
  // A look at barriers takes its time; one look ahead, beside other work, mostly saves the waits.
  __device__ __forceinline__ void look_ahead() {
    keys_there =
        __all_sync(kWarpMask, test_barrier(shared.keys_full(at_keys.stage), at_keys.parity));
    values_there =
        __all_sync(kWarpMask, test_barrier(shared.values_full(at_values.stage), at_values.parity));
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // K of the tile has been read, and with the item's last one Q.
  __device__ __forceinline__ void keys_done() {
    release(shared.keys_empty(at_keys.stage));
    at_keys.advance();
    if constexpr (!Sizes::kHoldsQueries) {
      if (tiles_left == 0) {
        release(shared.queries_empty(at_queries.stage));
        at_queries.advance();
      }
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
      const float inverse = l == 0.0f ? 0.0f : __fdividef(1.0f, l);
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
__device__ __forceinline__ void compute_all(const KernelParams& p, const PlanView& plan,
                                            const SharedPlaces<HEAD_DIM>& shared) {
  Consumer<T, HEAD_DIM> c(p, shared);
  constexpr int kTurnThreads = kConsumers * kWarpgroup;
  const int my_turn = kTurns + c.warpgroup, other_turn = kTurns + 1 - c.warpgroup;
  if (c.warpgroup == 1) arrive_named(other_turn, kTurnThreads);

  ItemReader<HEAD_DIM> items(p, plan);
  Item item = items.next(), next, last;
  constexpr bool kHoldsQueries = Traits<HEAD_DIM>::kHoldsQueries;
  // Once the last Q K^T of an item is done: the softmax falls on the loads of the next item's Q.
  auto load_next = [&] {
    next = items.next();
    if (next.exists()) c.load_queries(next.record<HEAD_DIM>(p));
  };
  if (item.exists()) {
    c.begin(item.record<HEAD_DIM>(p));
    c.load_queries(item.record<HEAD_DIM>(p));
    c.take_queries();
    c.clear_sums();
    c.wait_for_keys();
    c.multiply_keys();
    wait_products<0>();
    pin(c.scores);
    c.keys_done();
    if (kHoldsQueries && c.tiles_left == 0) load_next();
    c.weigh();
    c.look_ahead();
    c.pack_weights();

    float weight_sum[2];  // of the item at hand, once its weights are complete
    while (true) {
      const bool ends = c.tiles_left == 0;  // the weights at hand are the item's last
      if (ends) {
        weight_sum[0] = c.rows.sum[0], weight_sum[1] = c.rows.sum[1];
        if (!kHoldsQueries) next = items.next();
        if (!next.exists()) break;
        last = item;
        item = next;
        c.begin(item.record<HEAD_DIM>(p));
        c.take_queries();
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
      if (kHoldsQueries && c.tiles_left == 0) load_next();
      c.weigh();
      // The softmax is to be computed before the wait for P V, but ptxas would move the wait up
      // over it. Not over a branch that depends on it.
      if (__any_sync(kWarpMask, c.rows.sum[0] + c.rows.sum[1] < 0.0f)) __trap();
      wait_products<0>();
      pin(c.sums);
      c.values_done();
      c.look_ahead();
      if (ends) c.write_rows(last.record<HEAD_DIM>(p), weight_sum);
      c.rescale_sums(ends);
      c.pack_weights();
    }

    c.wait_for_values();
    c.multiply_values();
    wait_products<0>();
    pin(c.sums);
    c.write_rows(item.record<HEAD_DIM>(p), weight_sum);
  }
  if (c.warpgroup == 0) sync_named(my_turn, kTurnThreads);
}

}  // namespace pagedinfer::attention::wgmma
