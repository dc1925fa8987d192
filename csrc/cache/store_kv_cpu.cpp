#include <cstring>

#include "cache/store_kv.h"
#include "common/parallel.h"

namespace pagedinfer {
namespace CPU_ISA {

void store_kv_cpu(const StoreKvParams& p) {
  const int64_t element = size_of(p.dtype);
  const int64_t row_bytes = p.head_dim * element;
  const int64_t head_bytes = p.block_size * row_bytes;
  const auto* key = static_cast<const char*>(p.key);
  const auto* value = static_cast<const char*>(p.value);
  auto* cache = static_cast<char*>(p.kv_cache);

  parallel_for(p.num_tokens, /*grain=*/64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = p.slot_mapping[t];
      if (slot < 0) continue;
      char* k = cache + slot / p.block_size * p.cache_stride_block * element +
                slot % p.block_size * row_bytes;
      char* v = k + p.num_kv_heads * head_bytes;
      for (int64_t h = 0; h < p.num_kv_heads; ++h) {
        std::memcpy(k + h * head_bytes,
                    key + (t * p.key_stride_token + h * p.key_stride_head) * element, row_bytes);
        std::memcpy(v + h * head_bytes,
                    value + (t * p.value_stride_token + h * p.value_stride_head) * element,
                    row_bytes);
      }
    }
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
