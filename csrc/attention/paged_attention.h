// paged_attention: causal attention of ragged queries over one layer's paged KV cache.
//
//   for each sequence i, with query_len = query_start_loc[i + 1] - query_start_loc[i], and each of
//   its queries j:
//     row      = query_start_loc[i] + j
//     position = seq_lens[i] - query_len + j                        (bottom-right causal)
//     keys     = max(0, position - sliding_window + 1) .. position  (from 0 on without a window)
//     for each head h, with g = h / (num_heads / num_kv_heads):
//       k[t], v[t] = kv_cache[block_table[i, t / block_size], 0 or 1, g, t % block_size, :]
//       s[t]       = scale * dot(query[row, h], k[t]);  logit_cap > 0: s = cap * tanh(s / cap)
//       out[row, h] = sum over keys of softmax(s)[t] * v[t]
//
// A query with no key (a sequence of length 0) and rows from query_start_loc[num_seqs] on are
// zeros. Nothing is read from slots or block-table entries that hold no key of the sums above.
#pragma once

#include <cstdint>

#include "attention/shared_prefixes.h"
#include "common/dtype.h"

namespace pagedinfer {

// Strides are in elements; the last dimension of every tensor has stride 1.
struct PagedAttentionParams {
  const void* query;               // [num_tokens, num_heads, head_dim]
  const void* kv_cache;            // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const int32_t* block_table;      // [num_seqs, max_blocks]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* plan;             // [plan_length], from attention_plan
  float* workspace;                // [workspace_length]
  void* out;                       // [num_tokens, num_heads, head_dim], contiguous
  int64_t query_stride_token, query_stride_head;
  int64_t cache_stride_block;  // within a block the cache is dense
  int64_t block_table_stride;
  int64_t plan_length, workspace_length;  // at least what attention_plan_sizes says
  int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks;
  int64_t max_query_len;  // as the plan's buffers were sized for: no sequence has more query tokens
  int64_t sliding_window;  // keys that a query sees, itself included; 0: all
  float scale;
  float logit_cap;          // 0: none
  DType dtype;              // of query, kv_cache and out
  SharedPrefixes prefixes;  // as in the plan
  // [prefix_splits, num_tokens, num_heads, head_dim + 2]: room for the prefixes' partial results
  float* prefix_results;
  int64_t prefix_splits;
};

}  // namespace pagedinfer
