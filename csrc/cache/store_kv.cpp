#include "cache/store_kv.h"

#include "cache/cache_checks.h"
#include "cache/store_kv_cuda.h"
#include "common/check.h"
#include "common/cuda_context.h"
#include "ops.h"

namespace pagedinfer {

void store_kv(const Tensor& key, const Tensor& value, Tensor kv_cache, const Tensor& slot_mapping) {
  ArgumentChecker check("store_kv");
  check.shape("key", key, {"num_tokens", "num_kv_heads", "head_dim"});
  check.shape("value", value, {"num_tokens", "num_kv_heads", "head_dim"});
  check.shape("kv_cache", kv_cache, {"num_blocks", "2", "num_kv_heads", "block_size", "head_dim"});
  check.shape("slot_mapping", slot_mapping, {"num_tokens"});
  const DType dtype = check.float_dtype("key", key);
  check.float_dtype("value", value);
  check.float_dtype("kv_cache", kv_cache);
  check.dtype("slot_mapping", slot_mapping, ScalarType::Long);
  check.same_device("key", key);
  check.same_device("value", value);
  check.same_device("kv_cache", kv_cache);
  check.same_device("slot_mapping", slot_mapping);
  check.dense_inner("key", key, 1);
  check.dense_inner("value", value, 1);
  check.dense_inner("kv_cache", kv_cache, 4);
  check.contiguous("slot_mapping", slot_mapping);

  const StoreKvParams params{
      .key = key.const_data_ptr(),
      .value = value.const_data_ptr(),
      .kv_cache = kv_cache.mutable_data_ptr(),
      .slot_mapping = static_cast<const int64_t*>(slot_mapping.const_data_ptr()),
      .key_stride_token = key.stride(0),
      .key_stride_head = key.stride(1),
      .value_stride_token = value.stride(0),
      .value_stride_head = value.stride(1),
      .cache_stride_block = kv_cache.stride(0),
      .num_tokens = check.size("num_tokens"),
      .num_blocks = check.size("num_blocks"),
      .num_kv_heads = check.size("num_kv_heads"),
      .block_size = check.size("block_size"),
      .head_dim = check.size("head_dim"),
      .dtype = dtype,
  };
  if (key.numel() == 0) return;

  if (is_cpu(key)) {
    const int64_t num_slots = params.num_blocks * params.block_size;
    for (int64_t t = 0; t < params.num_tokens; ++t) {
      check_slot("store_kv", params.slot_mapping, t, num_slots);
    }
    PAGEDINFER_CPU_KERNEL(store_kv_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(key);
  check_cuda("store_kv", launch_store_kv(params, context.stream()));
#endif
}

}  // namespace pagedinfer
