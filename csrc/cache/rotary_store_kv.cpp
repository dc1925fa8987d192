#include "cache/rotary_store_kv.h"

#include "cache/cache_checks.h"
#include "cache/rotary_store_kv_cuda.h"
#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/rotary_checks.h"
#include "ops.h"

namespace pagedinfer {

void rotary_store_kv(const Tensor& positions, Tensor query, const Tensor& key, const Tensor& value,
                     const Tensor& cos_sin_cache, Tensor kv_cache, const Tensor& slot_mapping,
                     bool interleaved, std::optional<Tensor> query_norm_weight,
                     std::optional<Tensor> key_norm_weight, double epsilon) {
  ArgumentChecker check("rotary_store_kv");
  check.shape("query", query, {"num_tokens", "num_heads", "head_dim"});
  check.shape("key", key, {"num_tokens", "num_kv_heads", "head_dim"});
  check.shape("value", value, {"num_tokens", "num_kv_heads", "head_dim"});
  check.shape("kv_cache", kv_cache, {"num_blocks", "2", "num_kv_heads", "block_size", "head_dim"});
  check.shape("positions", positions, {"num_tokens"});
  check.shape("slot_mapping", slot_mapping, {"num_tokens"});
  check.shape("cos_sin_cache", cos_sin_cache, {"max_position", "rotary_dim"});
  const DType dtype = check.float_dtype("query", query);
  check.float_dtype("key", key);
  check.float_dtype("value", value);
  check.float_dtype("kv_cache", kv_cache);
  check.dtype("positions", positions, ScalarType::Long);
  check.dtype("slot_mapping", slot_mapping, ScalarType::Long);
  check.dtype("cos_sin_cache", cos_sin_cache, ScalarType::Float);
  check.same_device("query", query);
  check.same_device("key", key);
  check.same_device("value", value);
  check.same_device("kv_cache", kv_cache);
  check.same_device("positions", positions);
  check.same_device("slot_mapping", slot_mapping);
  check.same_device("cos_sin_cache", cos_sin_cache);
  check.dense_inner("query", query, 1);
  check.dense_inner("key", key, 1);
  check.dense_inner("value", value, 1);
  check.dense_inner("kv_cache", kv_cache, 4);
  check.contiguous("positions", positions);
  check.contiguous("slot_mapping", slot_mapping);
  check.contiguous("cos_sin_cache", cos_sin_cache);
  check_head_norm(check, "query_norm_weight", query_norm_weight);
  check_head_norm(check, "key_norm_weight", key_norm_weight);
  const int64_t head_dim = check.size("head_dim");
  const int64_t rotary_dim = check.size("rotary_dim");
  PAGEDINFER_CHECK(head_dim <= kMaxRotaryStoreHeadDim, "rotary_store_kv: query has shape ",
                   shape_of(query), "; expected a head_dim of at most ", kMaxRotaryStoreHeadDim);
  PAGEDINFER_CHECK(rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                   "rotary_store_kv: cos_sin_cache has shape ", shape_of(cos_sin_cache),
                   "; expected [max_position, rotary_dim] with an even rotary_dim of at most "
                   "head_dim=",
                   head_dim);

  const RotaryStoreKvParams params{
      .positions = static_cast<const int64_t*>(positions.const_data_ptr()),
      .slot_mapping = static_cast<const int64_t*>(slot_mapping.const_data_ptr()),
      .query = query.mutable_data_ptr(),
      .key = key.const_data_ptr(),
      .value = value.const_data_ptr(),
      .kv_cache = kv_cache.mutable_data_ptr(),
      .cos_sin_cache = static_cast<const float*>(cos_sin_cache.const_data_ptr()),
      .query_norm_weight = query_norm_weight ? query_norm_weight->const_data_ptr() : nullptr,
      .key_norm_weight = key_norm_weight ? key_norm_weight->const_data_ptr() : nullptr,
      .query_stride_token = query.stride(0),
      .query_stride_head = query.stride(1),
      .key_stride_token = key.stride(0),
      .key_stride_head = key.stride(1),
      .value_stride_token = value.stride(0),
      .value_stride_head = value.stride(1),
      .cache_stride_block = kv_cache.stride(0),
      .num_tokens = check.size("num_tokens"),
      .num_heads = check.size("num_heads"),
      .num_kv_heads = check.size("num_kv_heads"),
      .head_dim = head_dim,
      .num_blocks = check.size("num_blocks"),
      .block_size = check.size("block_size"),
      .max_position = check.size("max_position"),
      .rotary_dim = rotary_dim,
      .epsilon = checked_epsilon("rotary_store_kv", epsilon),
      .interleaved = interleaved,
      .dtype = dtype,
  };
  if (query.numel() + key.numel() == 0) return;

  if (is_cpu(query)) {
    const int64_t num_slots = params.num_blocks * params.block_size;
    for (int64_t t = 0; t < params.num_tokens; ++t) {
      check_position("rotary_store_kv", params.positions, t, params.max_position);
      check_slot("rotary_store_kv", params.slot_mapping, t, num_slots);
    }
    PAGEDINFER_CPU_KERNEL(rotary_store_kv_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(query);
  check_cuda("rotary_store_kv", launch_rotary_store_kv(params, context.stream()));
#endif
}

}  // namespace pagedinfer
