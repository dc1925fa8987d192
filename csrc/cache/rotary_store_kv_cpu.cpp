#include "cache/rotary_store_kv.h"

#include <cstring>

#include "common/parallel.h"
#include "layers/cpu_elements.h"
#include "layers/row_math_cpu.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kElementsPerTask = 16384;

// One token of a batch of T.
template <typename T>
class TokenWriter {
 public:
  TokenWriter(const RotaryStoreKvParams& params, int64_t token) : p_(params), token_(token) {
    const int64_t position = p_.positions[token];
    if (position >= 0 && position < p_.max_position) {
      cos_sin_ = p_.cos_sin_cache + position * p_.rotary_dim;
    }
  }

  void rotate_query() const {
    T* query = static_cast<T*>(p_.query) + token_ * p_.query_stride_token;
    for (int64_t h = 0; h < p_.num_heads; ++h) {
      norm_and_rotate(query + h * p_.query_stride_head, p_.query_norm_weight);
    }
  }

  void store() const {
    const int64_t slot = p_.slot_mapping[token_];
    if (slot < 0) return;
    const T* key = static_cast<const T*>(p_.key) + token_ * p_.key_stride_token;
    const T* value = static_cast<const T*>(p_.value) + token_ * p_.value_stride_token;
    T* stored_key = static_cast<T*>(p_.kv_cache) + slot / p_.block_size * p_.cache_stride_block +
                    slot % p_.block_size * p_.head_dim;
    T* stored_value = stored_key + p_.num_kv_heads * p_.block_size * p_.head_dim;
    for (int64_t h = 0; h < p_.num_kv_heads; ++h) {
      T head[kMaxRotaryStoreHeadDim];
      std::memcpy(head, key + h * p_.key_stride_head, p_.head_dim * sizeof(T));
      norm_and_rotate(head, p_.key_norm_weight);
      const int64_t offset = h * p_.block_size * p_.head_dim;
      std::memcpy(stored_key + offset, head, p_.head_dim * sizeof(T));
      std::memcpy(stored_value + offset, value + h * p_.value_stride_head, p_.head_dim * sizeof(T));
    }
  }

 private:
  void norm_and_rotate(T* head, const void* weight) const {
    if (weight != nullptr) {
      normalise_row(head, static_cast<const T*>(weight), p_.epsilon, p_.head_dim, head);
    }
    if (cos_sin_ != nullptr) rotate_row(head, cos_sin_, p_.rotary_dim / 2, p_.interleaved);
  }

  const RotaryStoreKvParams& p_;
  int64_t token_;
  const float* cos_sin_ = nullptr;  // null: the position is outside the table
};

}  // namespace

void rotary_store_kv_cpu(const RotaryStoreKvParams& p) {
  const int64_t elements = (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.num_tokens, kElementsPerTask / elements + 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const TokenWriter<T> token(p, t);
        token.rotate_query();
        token.store();
      }
    });
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
