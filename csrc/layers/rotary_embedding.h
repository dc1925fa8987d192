// rotary_embedding: turns pairs of a head's elements by angles that grow with the token's position.
//
//   half = rotary_dim / 2
//   cos = cos_sin_cache[positions[t], :half];  sin = cos_sin_cache[positions[t], half:]
//   for each head and i < half, (x, y) = elements (i, i + half), or (2i, 2i + 1) if interleaved:
//     x' = round(x cos[i] - y sin[i]);  y' = round(y cos[i] + x sin[i])
//
// Arithmetic is in float32 without fused multiply-adds, so that every device gives the same bits.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

// Strides are in elements; the last dimension of every tensor has stride 1.
struct RotaryEmbeddingParams {
  const int64_t* positions;    // [num_tokens]; one outside the table leaves its token as it is
  void* query;                 // [num_tokens, num_heads, head_dim], rotated in place
  void* key;                   // [num_tokens, num_kv_heads, head_dim], rotated in place, or null
  const float* cos_sin_cache;  // [max_position, rotary_dim], contiguous
  int64_t query_stride_token, query_stride_head;
  int64_t key_stride_token, key_stride_head;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
  int64_t max_position, rotary_dim;
  bool interleaved;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void rotary_embedding_cpu(const RotaryEmbeddingParams& params);)

}  // namespace pagedinfer
