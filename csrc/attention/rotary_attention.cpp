#include "attention/rotary_attention.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "attention/attention_plan.h"
#include "attention/attention_work.h"
#include "attention/rotary_attention_cuda.h"
#include "cache/rotary_store_kv.h"
#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/rotary_checks.h"
#include "ops.h"

namespace pagedinfer {

namespace {

constexpr const char* kOp = "rotary_attention";
constexpr int64_t kMostHeadsOfGroup = 16;

// What can be looked at when the tensors lie in CPU memory.
void check_contents(const RotaryAttentionParams& p) {
  for (int64_t i = 0; i < p.num_seqs; ++i) {
    const int64_t seq_len = p.seq_lens[i], slot = p.slot_mapping[i];
    PAGEDINFER_CHECK(seq_len >= 0 && seq_len <= p.max_blocks * p.block_size, kOp, ": seq_lens[", i,
                     "] is ", seq_len, "; expected one in [0, ", p.max_blocks * p.block_size,
                     "], as block_table has ", p.max_blocks, " columns and block_size is ",
                     p.block_size);
    check_position(kOp, p.positions, i, p.max_position);
    const int32_t* table = p.block_table + i * p.block_table_stride;
    const int64_t first_key = p.sliding_window > 0 ? seq_len - p.sliding_window : 0;
    for (int64_t b = std::max<int64_t>(first_key, 0) / p.block_size; b * p.block_size < seq_len;
         ++b) {
      PAGEDINFER_CHECK(table[b] >= 0 && table[b] < p.num_blocks, kOp, ": block_table[", i, ", ", b,
                       "] is ", table[b], "; expected a block id below num_blocks=", p.num_blocks);
    }
    const int64_t newest = seq_len == 0 ? -1
                                        : table[(seq_len - 1) / p.block_size] * p.block_size +
                                              (seq_len - 1) % p.block_size;
    PAGEDINFER_CHECK(slot == newest, kOp, ": slot_mapping[", i, "] is ", slot, "; expected ",
                     newest, ", where block_table has the newest of ", seq_len, " tokens");
  }
}

// By the kernels of the two ops.
void run_on_cpu(const RotaryAttentionParams& p) {
  const int64_t row_bytes = p.num_heads * p.head_dim * size_of(p.dtype);
  std::vector<char> query(p.num_seqs * row_bytes);
  const int64_t head_bytes = p.head_dim * size_of(p.dtype);
  for (int64_t i = 0; i < p.num_seqs; ++i) {
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const int64_t from = i * p.query_stride_token + h * p.query_stride_head;
      std::memcpy(query.data() + i * row_bytes + h * head_bytes,
                  static_cast<const char*>(p.query) + from * size_of(p.dtype), head_bytes);
    }
  }
  const RotaryStoreKvParams store{
      .positions = p.positions,
      .slot_mapping = p.slot_mapping,
      .query = query.data(),
      .key = p.key,
      .value = p.value,
      .kv_cache = p.kv_cache,
      .cos_sin_cache = p.cos_sin_cache,
      .query_norm_weight = p.query_norm_weight,
      .key_norm_weight = p.key_norm_weight,
      .query_stride_token = p.num_heads * p.head_dim,
      .query_stride_head = p.head_dim,
      .key_stride_token = p.key_stride_token,
      .key_stride_head = p.key_stride_head,
      .value_stride_token = p.value_stride_token,
      .value_stride_head = p.value_stride_head,
      .cache_stride_block = p.cache_stride_block,
      .num_tokens = p.num_seqs,
      .num_heads = p.num_heads,
      .num_kv_heads = p.num_kv_heads,
      .head_dim = p.head_dim,
      .num_blocks = p.num_blocks,
      .block_size = p.block_size,
      .max_position = p.max_position,
      .rotary_dim = p.head_dim,
      .epsilon = p.epsilon,
      .interleaved = false,
      .dtype = p.dtype,
  };
  PAGEDINFER_CPU_KERNEL(rotary_store_kv_cpu)(store);
  std::vector<int32_t> query_start_loc(p.num_seqs + 1);
  std::iota(query_start_loc.begin(), query_start_loc.end(), 0);
  run_paged_attention_cpu({
      .query = query.data(),
      .kv_cache = p.kv_cache,
      .block_table = p.block_table,
      .query_start_loc = query_start_loc.data(),
      .seq_lens = p.seq_lens,
      .plan = nullptr,
      .workspace = nullptr,
      .out = p.out,
      .query_stride_token = p.num_heads * p.head_dim,
      .query_stride_head = p.head_dim,
      .cache_stride_block = p.cache_stride_block,
      .block_table_stride = p.block_table_stride,
      .plan_length = 0,
      .workspace_length = 0,
      .num_tokens = p.num_seqs,
      .num_seqs = p.num_seqs,
      .num_heads = p.num_heads,
      .num_kv_heads = p.num_kv_heads,
      .head_dim = p.head_dim,
      .num_blocks = p.num_blocks,
      .block_size = p.block_size,
      .max_blocks = p.max_blocks,
      .max_query_len = 1,
      .sliding_window = p.sliding_window,
      .scale = p.scale,
      .logit_cap = p.logit_cap,
      .dtype = p.dtype,
      .prefixes = {},
      .prefix_results = nullptr,
      .prefix_splits = 0,
  });
}

}  // namespace

void rotary_attention(const Tensor& positions, const Tensor& query, const Tensor& key,
                      const Tensor& value, const Tensor& cos_sin_cache, Tensor kv_cache,
                      const Tensor& slot_mapping, const Tensor& block_table, const Tensor& seq_lens,
                      Tensor out, std::optional<Tensor> query_norm_weight,
                      std::optional<Tensor> key_norm_weight, double epsilon, double scale,
                      int64_t sliding_window, double logit_cap) {
  ArgumentChecker check(kOp);
  check.shape("query", query, {"num_seqs", "num_heads", "head_dim"});
  check.shape("key", key, {"num_seqs", "num_kv_heads", "head_dim"});
  check.shape("value", value, {"num_seqs", "num_kv_heads", "head_dim"});
  check.shape("kv_cache", kv_cache, {"num_blocks", "2", "num_kv_heads", "block_size", "head_dim"});
  check.shape("positions", positions, {"num_seqs"});
  check.shape("slot_mapping", slot_mapping, {"num_seqs"});
  check.shape("block_table", block_table, {"num_seqs", "max_blocks"});
  check.shape("seq_lens", seq_lens, {"num_seqs"});
  check.shape("cos_sin_cache", cos_sin_cache, {"max_position", "head_dim"});
  check.shape("out", out, {"num_seqs", "num_heads", "head_dim"});
  const DType dtype = check.float_dtype("query", query);
  check.dtype("positions", positions, ScalarType::Long);
  check.dtype("slot_mapping", slot_mapping, ScalarType::Long);
  check.dtype("block_table", block_table, ScalarType::Int);
  check.dtype("seq_lens", seq_lens, ScalarType::Int);
  check.dtype("cos_sin_cache", cos_sin_cache, ScalarType::Float);
  check.same_device("query", query);
  constexpr int64_t kAlignment = 16;
  for (const auto& [name, tensor] :
       {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    check.float_dtype(name, *tensor);
    check.same_device(name, *tensor);
    check.dense_inner(name, *tensor, 1);
    check.aligned(name, *tensor, kAlignment);
  }
  check.float_dtype("kv_cache", kv_cache);
  check.same_device("kv_cache", kv_cache);
  check.dense_inner("kv_cache", kv_cache, 4);
  check.aligned("kv_cache", kv_cache, kAlignment);
  check.same_device("block_table", block_table);
  check.dense_inner("block_table", block_table, 1);
  check.float_dtype("out", out);
  for (const auto& [name, tensor] : {std::pair{"positions", &positions},
                                     {"slot_mapping", &slot_mapping},
                                     {"seq_lens", &seq_lens},
                                     {"cos_sin_cache", &cos_sin_cache},
                                     {"out", static_cast<const Tensor*>(&out)}}) {
    check.same_device(name, *tensor);
    check.contiguous(name, *tensor);
  }
  check_head_norm(check, "query_norm_weight", query_norm_weight);
  check_head_norm(check, "key_norm_weight", key_norm_weight);
  const AttentionPlanShape shape{
      .num_seqs = check.size("num_seqs"),
      .num_tokens = check.size("num_seqs"),
      .max_query_len = 1,
      .num_heads = check.size("num_heads"),
      .num_kv_heads = check.size("num_kv_heads"),
      .head_dim = check.size("head_dim"),
      .block_size = check.size("block_size"),
  };
  check_attention_shape(kOp, shape);
  check_scores(kOp, scale, logit_cap);

  const auto pointer = [](const std::optional<Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr() : nullptr;
  };
  const RotaryAttentionParams params{
      .positions = static_cast<const int64_t*>(positions.const_data_ptr()),
      .slot_mapping = static_cast<const int64_t*>(slot_mapping.const_data_ptr()),
      .block_table = static_cast<const int32_t*>(block_table.const_data_ptr()),
      .seq_lens = static_cast<const int32_t*>(seq_lens.const_data_ptr()),
      .query = query.const_data_ptr(),
      .key = key.const_data_ptr(),
      .value = value.const_data_ptr(),
      .kv_cache = kv_cache.mutable_data_ptr(),
      .cos_sin_cache = static_cast<const float*>(cos_sin_cache.const_data_ptr()),
      .query_norm_weight = pointer(query_norm_weight),
      .key_norm_weight = pointer(key_norm_weight),
      .out = out.mutable_data_ptr(),
      .query_stride_token = query.stride(0),
      .query_stride_head = query.stride(1),
      .key_stride_token = key.stride(0),
      .key_stride_head = key.stride(1),
      .value_stride_token = value.stride(0),
      .value_stride_head = value.stride(1),
      .cache_stride_block = kv_cache.stride(0),
      .block_table_stride = block_table.stride(0),
      .num_seqs = shape.num_seqs,
      .num_heads = shape.num_heads,
      .num_kv_heads = shape.num_kv_heads,
      .head_dim = shape.head_dim,
      .num_blocks = check.size("num_blocks"),
      .block_size = shape.block_size,
      .max_blocks = check.size("max_blocks"),
      .max_position = check.size("max_position"),
      .sliding_window = checked_sliding_window(kOp, sliding_window),
      .scale = static_cast<float>(scale),
      .logit_cap = static_cast<float>(logit_cap),
      .epsilon = checked_epsilon(kOp, epsilon),
      .dtype = dtype,
  };
  if (params.num_seqs == 0) return;
  if (is_cpu(query)) {
    check_contents(params);
    run_on_cpu(params);
    return;
  }
  PAGEDINFER_CHECK(dtype != DType::float32, kOp,
                   ": query has dtype float32; expected float16 or bfloat16 on a GPU");
  PAGEDINFER_CHECK(params.head_dim == 64 || params.head_dim == 128, kOp, ": head_dim is ",
                   params.head_dim, "; expected 64 or 128 on a GPU");
  PAGEDINFER_CHECK(params.num_heads / params.num_kv_heads <= kMostHeadsOfGroup, kOp, ": ",
                   params.num_heads, " query heads share ", params.num_kv_heads,
                   " KV heads; expected at most ", kMostHeadsOfGroup, " to one on a GPU");
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(query);
  check_cuda(kOp, launch_rotary_attention(params, context.stream()));
#endif
}

}  // namespace pagedinfer
