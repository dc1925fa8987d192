// How paged attention on the CPU is cut into work for threads: tiles of query rows, and items of
// one tile, one KV head and one or more chunks of the keys.
//
// Under one KV head, a sequence's row r is its query r / group and the head r % group of that KV
// head (group = num_heads / num_kv_heads). So a tile holds whatever queries and heads read the same
// keys, in decode as in prefill. How a tile's keys are cut into chunks follows from its own
// sequence alone. Which chunks go to different threads depends on the batch, but their results are
// merged in order in any case: the sums are the same, bit for bit, in every batch and with every
// number of threads.
#pragma once

#include <cstdint>

#include "attention/paged_attention.h"
#include "common/cpu_isa.h"

namespace pagedinfer {

constexpr int64_t kTileRows = 96;
constexpr int64_t kKeyBlock = 64;  // keys handled at a time; chunks begin at multiples of it

struct AttentionTile {
  int64_t seq;
  int64_t first_row, num_rows;
  int64_t first_key, end_key;  // of any of its rows
  int64_t chunk_len, num_chunks;
  int64_t partials;  // where the chunks' results go in the workspace, or kNoPartials
};
constexpr int64_t kNoPartials = -1;  // one item has all of the tile's chunks

struct AttentionItem {
  int32_t tile, kv_head;
  int32_t first_chunk, end_chunk;
};

struct AttentionWork {
  const AttentionTile* tiles;
  const AttentionItem* items;  // independent of each other; the long ones first
  int64_t num_items;
  const AttentionItem* merges;  // after all items: what has its chunks in the workspace
  int64_t num_merges;
  int64_t num_workers;  // threads that are worth waking
};

// The result of one chunk of a tile: for each row the running softmax's maximum and sum, then the
// weighted sum of V.
constexpr int64_t partial_size(int64_t num_rows, int64_t head_dim) {
  return num_rows * (head_dim + 2);
}

// float32s that a thread needs beside the tensors: the tile's queries, a block of K and V as
// float32, its weights, two softmax states.
constexpr int64_t scratch_size(int64_t head_dim) {
  return kTileRows * (3 * head_dim + 7) + kKeyBlock * (2 * head_dim + kTileRows + 4);
}

// Memory of the calling thread for so many floats, at a multiple of 64 bytes; kept until the thread
// ends.
float* attention_scratch(int64_t count);

// Cuts the batch and runs the kernel of this machine's instruction set. Everything in `params` is
// checked.
void run_paged_attention_cpu(const PagedAttentionParams& params);

PAGEDINFER_FOR_EACH_ISA(void paged_attention_cpu(const PagedAttentionParams& params,
                                                 const AttentionWork& work);)

}  // namespace pagedinfer
