// rotary_attention: for each of few sequences, its newest token's way from the projection to the
// attention's output, in one pass: rotary_store_kv.h, then paged_attention.h.
//
//   for each sequence i, with n = seq_lens[i] > 0 tokens, the newest of which is row i:
//     q[h], k[g], v[g]   = rotated(normed(query[i, h])), rotated(normed(key[i, g])), value[i, g]
//     kv_cache at slot_mapping[i] takes k, v; slot_mapping[i] is where block_table has token n - 1
//     out[i, h] = attention of q[h] over the sequence's last sliding_window (0: all) keys
//   n = 0: out[i] = 0, and slot_mapping[i] is -1
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pagedinfer {

// Strides are in elements; the last dimension of every tensor has stride 1.
struct RotaryAttentionParams {
  const int64_t* positions;       // [num_seqs]; outside the table: not rotated
  const int64_t* slot_mapping;    // [num_seqs]; -1: nothing is stored
  const int32_t* block_table;     // [num_seqs, max_blocks]
  const int32_t* seq_lens;        // [num_seqs], the newest token included
  const void* query;              // [num_seqs, num_heads, head_dim]
  const void* key;                // [num_seqs, num_kv_heads, head_dim]
  const void* value;              // [num_seqs, num_kv_heads, head_dim]
  void* kv_cache;                 // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const float* cos_sin_cache;     // [max_position, head_dim], contiguous
  const void* query_norm_weight;  // [head_dim], or null: no norm
  const void* key_norm_weight;    // [head_dim], or null: no norm
  void* out;                      // [num_seqs, num_heads, head_dim], contiguous
  int64_t query_stride_token, query_stride_head;
  int64_t key_stride_token, key_stride_head;
  int64_t value_stride_token, value_stride_head;
  int64_t cache_stride_block;  // within a block the cache is dense
  int64_t block_table_stride;
  int64_t num_seqs, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks, max_position;
  int64_t sliding_window;
  float scale, logit_cap, epsilon;
  DType dtype;
};

}  // namespace pagedinfer
