#include "layers/rotary_embedding.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/rotary_checks.h"
#include "layers/rotary_embedding_cuda.h"
#include "ops.h"

namespace pagedinfer {

void rotary_embedding(const Tensor& positions, Tensor query, std::optional<Tensor> key,
                      const Tensor& cos_sin_cache, bool interleaved) {
  ArgumentChecker check("rotary_embedding");
  check.shape("positions", positions, {"num_tokens"});
  check.shape("query", query, {"num_tokens", "num_heads", "head_dim"});
  check.shape("cos_sin_cache", cos_sin_cache, {"max_position", "rotary_dim"});
  check.dtype("positions", positions, ScalarType::Long);
  check.dtype("cos_sin_cache", cos_sin_cache, ScalarType::Float);
  const DType dtype = check.float_dtype("query", query);
  check.same_device("query", query);
  check.same_device("positions", positions);
  check.same_device("cos_sin_cache", cos_sin_cache);
  check.contiguous("positions", positions);
  check.contiguous("cos_sin_cache", cos_sin_cache);
  check.dense_inner("query", query, 1);
  if (key) {
    check.shape("key", *key, {"num_tokens", "num_kv_heads", "head_dim"});
    check.float_dtype("key", *key);
    check.same_device("key", *key);
    check.dense_inner("key", *key, 1);
  }
  const int64_t head_dim = check.size("head_dim");
  const int64_t rotary_dim = check.size("rotary_dim");
  PAGEDINFER_CHECK(
      rotary_dim % 2 == 0 && rotary_dim <= head_dim, "rotary_embedding: cos_sin_cache has shape ",
      shape_of(cos_sin_cache),
      "; expected [max_position, rotary_dim] with an even rotary_dim of at most head_dim=",
      head_dim);

  const RotaryEmbeddingParams params{
      .positions = static_cast<const int64_t*>(positions.const_data_ptr()),
      .query = query.mutable_data_ptr(),
      .key = key ? key->mutable_data_ptr() : nullptr,
      .cos_sin_cache = static_cast<const float*>(cos_sin_cache.const_data_ptr()),
      .query_stride_token = query.stride(0),
      .query_stride_head = query.stride(1),
      .key_stride_token = key ? key->stride(0) : 0,
      .key_stride_head = key ? key->stride(1) : 0,
      .num_tokens = check.size("num_tokens"),
      .num_heads = check.size("num_heads"),
      .num_kv_heads = key ? check.size("num_kv_heads") : 0,
      .head_dim = head_dim,
      .max_position = check.size("max_position"),
      .rotary_dim = rotary_dim,
      .interleaved = interleaved,
      .dtype = dtype,
  };
  if (rotary_dim == 0 || (query.numel() == 0 && (!key || key->numel() == 0))) return;

  if (is_cpu(query)) {
    for (int64_t t = 0; t < params.num_tokens; ++t) {
      check_position("rotary_embedding", params.positions, t, params.max_position);
    }
    PAGEDINFER_CPU_KERNEL(rotary_embedding_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(query);
  check_cuda("rotary_embedding", launch_rotary_embedding(params, context.stream()));
#endif
}

}  // namespace pagedinfer
