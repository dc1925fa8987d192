// Paged attention on the CPU: see paged_attention.h for the maths, attention_work.h for the cut
// into items, docs/attention.md for the design.
//
// A thread takes one item after another. It puts the tile's queries, transposed and scaled, into
// its scratch, then goes through the item's keys kKeyBlock at a time: gather K and V from the cache
// as float32, score, weigh, collect (tile_math_cpu.h).
#include <cstring>

#include "attention/attention_work.h"
#include "attention/tile_math_cpu.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace pagedinfer {
namespace CPU_ISA {

namespace {

static_assert(kTileRows % kLanes == 0 && kKeyBlock % kScoreKeys == 0);

struct Scratch {
  float* query;       // [head_dim, padded rows]; few rows: [rows, head_dim]
  float* key;         // [kKeyBlock, head_dim]
  float* value;       // [kKeyBlock, head_dim]
  float* scores;      // [kFewRows, kKeyBlock]; with more rows they are in weights
  float* weights;     // [kKeyBlock, padded rows]
  float* correction;  // [padded rows]
  int32_t *first_visible, *end_visible;  // [padded rows]
  SoftmaxState chunk, tile;              // [padded rows], [padded rows], [kTileRows, head_dim]
};

Scratch carve(float* memory, int64_t head_dim) {
  auto take = [&memory](int64_t count) {
    float* taken = memory;
    memory += count;
    return taken;
  };
  auto take_state = [&take, head_dim] {
    return SoftmaxState{take(kTileRows), take(kTileRows), take(kTileRows * head_dim)};
  };
  return {
      .query = take(head_dim * kTileRows),
      .key = take(kKeyBlock * head_dim),
      .value = take(kKeyBlock * head_dim),
      .scores = take(kFewRows * kKeyBlock),
      .weights = take(kKeyBlock * kTileRows),
      .correction = take(kTileRows),
      .first_visible = reinterpret_cast<int32_t*>(take(kTileRows)),
      .end_visible = reinterpret_cast<int32_t*>(take(kTileRows)),
      .chunk = take_state(),
      .tile = take_state(),
  };
}

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// One tile under one KV head, by one thread.
template <typename T>
class TileRun {
 public:
  TileRun(const PagedAttentionParams& params, const AttentionTile& tile, int64_t kv_head,
          const Scratch& scratch)
      : p_(params),
        tile_(tile),
        kv_head_(kv_head),
        s_(scratch),
        group_(params.num_heads / params.num_kv_heads),
        first_token_(params.query_start_loc[tile.seq]),
        few_(tile.num_rows <= kFewRows),
        padded_rows_(few_ ? kFewRows : round_up(tile.num_rows, kLanes)) {}

  void run(int64_t first_chunk, int64_t end_chunk) {
    load_query();
    find_visible();
    if (tile_.partials != kNoPartials) {
      for (int64_t c = first_chunk; c < end_chunk; ++c) {
        attend(c);
        save(s_.chunk, partial(c));
      }
      return;
    }
    attend(first_chunk);
    if (end_chunk == first_chunk + 1) return write(s_.chunk);
    save(s_.chunk, s_.tile);
    for (int64_t c = first_chunk + 1; c < end_chunk; ++c) {
      attend(c);
      merge(s_.tile, s_.chunk, tile_.num_rows, p_.head_dim);
    }
    write(s_.tile);
  }

  // Afterwards, for a tile whose chunks lie in the workspace.
  void merge_partials() {
    save(partial(0), s_.tile);
    for (int64_t c = 1; c < tile_.num_chunks; ++c) {
      merge(s_.tile, partial(c), tile_.num_rows, p_.head_dim);
    }
    write(s_.tile);
  }

 private:
  int64_t query_of(int64_t row) const { return (tile_.first_row + row) / group_; }
  int64_t head_of(int64_t row) const {
    return kv_head_ * group_ + (tile_.first_row + row) % group_;
  }

  void load_query() {
    const int64_t row_stride = few_ ? p_.head_dim : 1, dim_stride = few_ ? 1 : padded_rows_;
    for (int64_t r = 0; r < tile_.num_rows; ++r) {
      const T* from = static_cast<const T*>(p_.query) +
                      (first_token_ + query_of(r)) * p_.query_stride_token +
                      head_of(r) * p_.query_stride_head;
      float* to = s_.query + r * row_stride;
      for (int64_t d = 0; d < p_.head_dim; ++d) to[d * dim_stride] = to_float(from[d]) * p_.scale;
    }
    if (few_) return;
    for (int64_t d = 0; d < p_.head_dim; ++d) {
      for (int64_t r = tile_.num_rows; r < padded_rows_; ++r) s_.query[d * padded_rows_ + r] = 0;
    }
  }

  void find_visible() {
    const int64_t before =
        p_.seq_lens[tile_.seq] - (p_.query_start_loc[tile_.seq + 1] - first_token_);
    last_first_ = 0;
    first_end_ = tile_.end_key;
    for (int64_t r = 0; r < padded_rows_; ++r) {
      // Rows of padding do as the last row does.
      const int64_t position = before + query_of(r < tile_.num_rows ? r : tile_.num_rows - 1);
      const int64_t first = p_.sliding_window > 0 ? position - p_.sliding_window + 1 : 0;
      s_.first_visible[r] = static_cast<int32_t>(first);
      s_.end_visible[r] = static_cast<int32_t>(position + 1);
      if (first > last_first_) last_first_ = first;
      if (position + 1 < first_end_) first_end_ = position + 1;
    }
  }

  // s_.chunk: the softmax over the keys of one chunk.
  void attend(int64_t chunk) {
    clear(s_.chunk, tile_.num_rows, padded_rows_, p_.head_dim);
    const int64_t aligned = tile_.first_key / kKeyBlock * kKeyBlock + chunk * tile_.chunk_len;
    const int64_t end =
        aligned + tile_.chunk_len < tile_.end_key ? aligned + tile_.chunk_len : tile_.end_key;
    for (int64_t key = aligned > tile_.first_key ? aligned : tile_.first_key; key < end;) {
      const int64_t next = (key / kKeyBlock + 1) * kKeyBlock;
      const int64_t num_keys = (next < end ? next : end) - key;
      gather(key, num_keys);
      const Visible visible{s_.first_visible, s_.end_visible};
      if (few_) {
        score_few(s_.query, s_.key, num_keys, tile_.num_rows, p_.head_dim, s_.scores);
        weigh_few(s_.scores, key, num_keys, tile_.num_rows, visible, p_.logit_cap, s_.chunk,
                  s_.correction, s_.weights);
      } else {
        const bool all_visible = key >= last_first_ && key + num_keys <= first_end_;
        score(s_.query, s_.key, num_keys, padded_rows_, p_.head_dim, s_.weights);
        weigh(s_.weights, key, num_keys, padded_rows_, all_visible ? nullptr : &visible,
              p_.logit_cap, s_.chunk, s_.correction);
      }
      collect(s_.weights, s_.value, s_.correction, num_keys, tile_.num_rows, padded_rows_,
              p_.head_dim, s_.chunk.out);
      key += num_keys;
    }
  }

  // K and V of these keys and no others: what lies beside them in a block may be anything.
  void gather(int64_t first_key, int64_t num_keys) {
    const int64_t head_elements = p_.block_size * p_.head_dim;
    const int64_t value_offset = p_.num_kv_heads * head_elements;
    const int64_t last_block = (tile_.end_key - 1) / p_.block_size;
    for (int64_t done = 0; done < num_keys;) {
      const int64_t block = (first_key + done) / p_.block_size;
      const int64_t offset = (first_key + done) % p_.block_size;
      const int64_t left = num_keys - done;
      const int64_t count = p_.block_size - offset < left ? p_.block_size - offset : left;
      if (block < last_block) {
        prefetch(keys_of(block + 1), head_elements);
        prefetch(keys_of(block + 1) + value_offset, head_elements);
      }
      const T* keys = keys_of(block) + offset * p_.head_dim;
      convert_row(keys, s_.key + done * p_.head_dim, count * p_.head_dim);
      convert_row(keys + value_offset, s_.value + done * p_.head_dim, count * p_.head_dim);
      done += count;
    }
    const int64_t filled = num_keys * p_.head_dim;
    const int64_t scored = round_up(num_keys, kScoreKeys) * p_.head_dim;
    std::memset(s_.key + filled, 0, (scored - filled) * sizeof(float));
  }

  const T* keys_of(int64_t block) const {
    const int64_t id = p_.block_table[tile_.seq * p_.block_table_stride + block];
    return static_cast<const T*>(p_.kv_cache) + id * p_.cache_stride_block +
           kv_head_ * p_.block_size * p_.head_dim;
  }

  // Blocks lie anywhere, so that the hardware's own prefetching ends with each.
  static void prefetch(const T* from, int64_t count) {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
  }

  SoftmaxState partial(int64_t chunk) const {
    float* at = p_.workspace + tile_.partials +
                (kv_head_ * tile_.num_chunks + chunk) * partial_size(tile_.num_rows, p_.head_dim);
    return {.max = at, .sum = at + tile_.num_rows, .out = at + 2 * tile_.num_rows};
  }

  void save(const SoftmaxState& from, const SoftmaxState& to) const {
    std::memcpy(to.max, from.max, tile_.num_rows * sizeof(float));
    std::memcpy(to.sum, from.sum, tile_.num_rows * sizeof(float));
    std::memcpy(to.out, from.out, tile_.num_rows * p_.head_dim * sizeof(float));
  }

  void write(const SoftmaxState& state) const {
    normalize(state, tile_.num_rows, p_.head_dim);
    for (int64_t r = 0; r < tile_.num_rows; ++r) {
      T* row = static_cast<T*>(p_.out) +
               ((first_token_ + query_of(r)) * p_.num_heads + head_of(r)) * p_.head_dim;
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        from_float(state.out[r * p_.head_dim + d], row + d);
      }
    }
  }

  const PagedAttentionParams& p_;
  const AttentionTile& tile_;
  const int64_t kv_head_;
  const Scratch& s_;
  const int64_t group_;
  const int64_t first_token_;
  const bool few_;
  const int64_t padded_rows_;
  int64_t last_first_, first_end_;  // from the one to the other, all rows see all keys
};

// Threads take the next item until there is none, so that a slow one does not hold up the rest.
template <typename Body>
void for_each_item(int64_t count, int64_t num_workers, int64_t head_dim, const Body& body) {
  int64_t next = 0;
  parallel_for(num_workers < count ? num_workers : count, /*grain=*/1, [&](int64_t, int64_t) {
    const Scratch scratch = carve(attention_scratch(scratch_size(head_dim)), head_dim);
    for (;;) {
      const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (i >= count) return;
      body(i, scratch);
    }
  });
}

template <typename T>
void attend_all(const PagedAttentionParams& p, const AttentionWork& work) {
  for_each_item(work.num_items, work.num_workers, p.head_dim, [&](int64_t i, const Scratch& s) {
    const AttentionItem& item = work.items[i];
    TileRun<T>(p, work.tiles[item.tile], item.kv_head, s).run(item.first_chunk, item.end_chunk);
  });
  for_each_item(work.num_merges, work.num_workers, p.head_dim, [&](int64_t i, const Scratch& s) {
    const AttentionItem& item = work.merges[i];
    TileRun<T>(p, work.tiles[item.tile], item.kv_head, s).merge_partials();
  });
  const int64_t row_size = p.num_heads * p.head_dim;
  const int64_t used = p.query_start_loc[p.num_seqs];
  std::memset(static_cast<T*>(p.out) + used * row_size, 0,
              (p.num_tokens - used) * row_size * sizeof(T));
}

}  // namespace

void paged_attention_cpu(const PagedAttentionParams& params, const AttentionWork& work) {
  switch (params.dtype) {
    case DType::float32:
      return attend_all<float>(params, work);
    case DType::float16:
      return attend_all<Half>(params, work);
    case DType::bfloat16:
      return attend_all<BFloat16>(params, work);
  }
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
