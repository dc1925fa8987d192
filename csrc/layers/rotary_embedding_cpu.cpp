#include "common/parallel.h"
#include "layers/cpu_elements.h"
#include "layers/rotary_embedding.h"
#include "layers/row_math_cpu.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename T>
void rotate_heads(T* heads, int64_t num_heads, int64_t stride, const float* cos, int64_t half,
                  bool interleaved) {
  for (int64_t h = 0; h < num_heads; ++h) rotate_row(heads + h * stride, cos, half, interleaved);
}

}  // namespace

void rotary_embedding_cpu(const RotaryEmbeddingParams& p) {
  const int64_t half = p.rotary_dim / 2;
  const int64_t grain = kElementsPerTask / ((p.num_heads + p.num_kv_heads) * p.head_dim + 1) + 1;
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* query = static_cast<T*>(p.query);
    T* key = static_cast<T*>(p.key);
    parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        if (p.positions[t] < 0 || p.positions[t] >= p.max_position) continue;
        const float* cos = p.cos_sin_cache + p.positions[t] * p.rotary_dim;
        rotate_heads(query + t * p.query_stride_token, p.num_heads, p.query_stride_head, cos, half,
                     p.interleaved);
        if (key != nullptr) {
          rotate_heads(key + t * p.key_stride_token, p.num_kv_heads, p.key_stride_head, cos, half,
                       p.interleaved);
        }
      }
    });
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
