// store_kv: K and V of a step's tokens into their slots of one layer's cache.
//
//   kv_cache[block, 0, h, row, :] = key[t, h, :]
//   kv_cache[block, 1, h, row, :] = value[t, h, :]
//
// for each token t with slot = slot_mapping[t] >= 0 and each head h, with block = slot / block_size
// and row = slot % block_size.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

// Strides are in elements; the last dimension of every tensor has stride 1.
struct StoreKvParams {
  const void* key;              // [num_tokens, num_kv_heads, head_dim]
  const void* value;            // [num_tokens, num_kv_heads, head_dim]
  void* kv_cache;               // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const int64_t* slot_mapping;  // [num_tokens]; -1: padding, nothing is written
  int64_t key_stride_token, key_stride_head;
  int64_t value_stride_token, value_stride_head;
  int64_t cache_stride_block;  // within a block the cache is dense
  int64_t num_tokens, num_blocks, num_kv_heads, block_size, head_dim;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void store_kv_cpu(const StoreKvParams& params);)

}  // namespace pagedinfer
