// rotary_store_kv: what happens to a step's query, key and value between the projection and the
// attention, in one pass over them.
//
//   query[t, h, :] = rotated(normed(query[t, h, :]))
//   kv_cache[block, 0, h, row, :] = rotated(normed(key[t, h, :]))
//   kv_cache[block, 1, h, row, :] = value[t, h, :]
//
// for each token t and head h; the cache only where slot = slot_mapping[t] >= 0, with block =
// slot / block_size and row = slot % block_size.
//
// normed(x): rms_norm.h over head_dim, where there is a weight (QK-norm); else x. rotated(x):
// rotary_embedding.h. Both round where the ops of those names do.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

// The longest head that the kernels have room for.
constexpr int64_t kMaxRotaryStoreHeadDim = 256;

// Strides are in elements; the last dimension of every tensor has stride 1.
struct RotaryStoreKvParams {
  const int64_t* positions;       // [num_tokens]; outside the table: not rotated
  const int64_t* slot_mapping;    // [num_tokens]; -1: padding, nothing is stored
  void* query;                    // [num_tokens, num_heads, head_dim], rotated in place
  const void* key;                // [num_tokens, num_kv_heads, head_dim]
  const void* value;              // [num_tokens, num_kv_heads, head_dim]
  void* kv_cache;                 // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const float* cos_sin_cache;     // [max_position, rotary_dim], contiguous
  const void* query_norm_weight;  // [head_dim], or null: no norm
  const void* key_norm_weight;    // [head_dim], or null: no norm
  int64_t query_stride_token, query_stride_head;
  int64_t key_stride_token, key_stride_head;
  int64_t value_stride_token, value_stride_head;
  int64_t cache_stride_block;  // within a block the cache is dense
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size;
  int64_t max_position, rotary_dim;
  float epsilon;
  bool interleaved;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void rotary_store_kv_cpu(const RotaryStoreKvParams& params);)

}  // namespace pagedinfer
