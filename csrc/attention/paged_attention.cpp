#include "attention/paged_attention.h"

#include "attention/attention_plan.h"
#include "attention/attention_plan_cuda.h"
#include "attention/attention_work.h"
#include "attention/check_prefixes.h"
#include "attention/paged_attention_cuda.h"
#include "common/check.h"
#include "common/cuda_context.h"
#include "ops.h"

namespace pagedinfer {

namespace {

constexpr const char* kOp = "paged_attention";

void check_buffers(const PagedAttentionParams& params, const AttentionPlanSizes& sizes) {
  PAGEDINFER_CHECK(params.plan_length >= sizes.plan, kOp, ": plan has ", params.plan_length,
                   " elements; expected at least ", sizes.plan, " for this batch");
  PAGEDINFER_CHECK(params.workspace_length >= sizes.workspace, kOp, ": workspace has ",
                   params.workspace_length, " elements; expected at least ", sizes.workspace,
                   " for this batch");
}

// What can be looked at when the tensors lie in CPU memory: the plan's batch, lengths, block ids.
void check_contents(const PagedAttentionParams& p, const AttentionPlanShape& shape) {
  check_attention_lengths(kOp, p.query_start_loc, p.seq_lens, shape);
  check_shared_prefixes(kOp, p.prefixes, p.query_start_loc, p.seq_lens, shape);
  const uint64_t planned = static_cast<uint32_t>(p.plan[0]) |
                           static_cast<uint64_t>(static_cast<uint32_t>(p.plan[1])) << 32;
  PAGEDINFER_CHECK(
      planned ==
          attention_fingerprint(p.query_start_loc, p.seq_lens, shape, p.sliding_window, p.prefixes),
      kOp,
      ": plan was made for another batch; expected attention_plan over this query_start_loc, "
      "seq_lens, prefixes, sliding_window=",
      p.sliding_window, " and shapes (num_tokens=", p.num_tokens, ", num_heads=", p.num_heads,
      ", num_kv_heads=", p.num_kv_heads, ", head_dim=", p.head_dim, ", block_size=", p.block_size,
      ")");
  for (int64_t i = 0; i < p.num_seqs; ++i) {
    const int64_t query_len = int64_t{p.query_start_loc[i + 1]} - p.query_start_loc[i];
    const int64_t seq_len = p.seq_lens[i];
    if (query_len == 0 || seq_len == 0) continue;
    const int64_t blocks = (seq_len + p.block_size - 1) / p.block_size;
    PAGEDINFER_CHECK(blocks <= p.max_blocks, kOp, ": seq_lens[", i, "] is ", seq_len,
                     "; expected at most ", p.max_blocks * p.block_size, ", as block_table has ",
                     p.max_blocks, " columns and block_size is ", p.block_size);
    const int64_t first_key = p.sliding_window > 0 ? seq_len - query_len - p.sliding_window + 1 : 0;
    const int32_t* table = p.block_table + i * p.block_table_stride;
    for (int64_t b = first_key > 0 ? first_key / p.block_size : 0; b < blocks; ++b) {
      PAGEDINFER_CHECK(table[b] >= 0 && table[b] < p.num_blocks, kOp, ": block_table[", i, ", ", b,
                       "] is ", table[b], "; expected a block id below num_blocks=", p.num_blocks);
    }
  }
  // The CPU does not read a prefix apart, but what a GPU would compute must be the same.
  for (int64_t g = 0; g < p.prefixes.num_groups; ++g) {
    const int64_t first = p.prefixes.start[g];
    const int32_t* shared = p.block_table + first * p.block_table_stride;
    for (int64_t i = first; i < p.prefixes.start[g + 1]; ++i) {
      const int32_t* table = p.block_table + i * p.block_table_stride;
      for (int64_t b = 0; b < p.prefixes.lens[g] / p.block_size; ++b) {
        PAGEDINFER_CHECK(table[b] == shared[b], kOp, ": block_table[", i, ", ", b, "] is ",
                         table[b], "; expected ", shared[b], ", as in row ", first,
                         " of the same shared prefix");
      }
    }
  }
}

// How many parts each prefix is computed in: as many as there is room for.
int64_t checked_prefix_splits(ArgumentChecker& check, const SharedPrefixes& prefixes,
                              const std::optional<Tensor>& results, const AttentionPlanShape& shape,
                              DType dtype) {
  if (prefixes.num_groups == 0) return 0;
  PAGEDINFER_CHECK(results.has_value(), kOp, ": prefix_results is missing");
  check.dtype("prefix_results", *results, ScalarType::Float);
  check.same_device("prefix_results", *results);
  check.contiguous("prefix_results", *results);
  PAGEDINFER_CHECK(
      results->dim() == 4 && results->size(0) >= 1 && results->size(1) == shape.num_tokens &&
          results->size(2) == shape.num_heads && results->size(3) == shape.head_dim + 2,
      kOp, ": prefix_results has shape ", shape_of(*results),
      "; expected [splits, num_tokens=", shape.num_tokens, ", num_heads=", shape.num_heads,
      ", head_dim + 2=", shape.head_dim + 2, "], splits at least 1");
  PAGEDINFER_CHECK(is_cpu(*results) || dtype != DType::float32, kOp,
                   ": shared prefixes in float32 are for the CPU; a GPU reads them in float16 and "
                   "bfloat16");
  return results->size(0);
}

}  // namespace

void paged_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& block_table,
                     const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& plan,
                     Tensor workspace, Tensor out, int64_t max_query_len, double scale,
                     int64_t sliding_window, double logit_cap, std::optional<Tensor> prefix_start,
                     std::optional<Tensor> prefix_lens, std::optional<Tensor> prefix_results) {
  ArgumentChecker check(kOp);
  check.shape("query", query, {"num_tokens", "num_heads", "head_dim"});
  check.shape("kv_cache", kv_cache, {"num_blocks", "2", "num_kv_heads", "block_size", "head_dim"});
  check.shape("block_table", block_table, {"num_seqs", "max_blocks"});
  check.shape("seq_lens", seq_lens, {"num_seqs"});
  check.shape("query_start_loc", query_start_loc, {"num_seqs + 1"});
  check.shape("plan", plan, {"plan_length"});
  check.shape("workspace", workspace, {"workspace_length"});
  check.shape("out", out, {"num_tokens", "num_heads", "head_dim"});
  PAGEDINFER_CHECK(check.size("num_seqs + 1") == check.size("num_seqs") + 1, kOp,
                   ": query_start_loc has shape ", shape_of(query_start_loc),
                   "; expected [num_seqs + 1=", check.size("num_seqs") + 1, "]");
  const DType dtype = check.float_dtype("query", query);
  check.float_dtype("kv_cache", kv_cache);
  check.float_dtype("out", out);
  check.dtype("block_table", block_table, ScalarType::Int);
  check.dtype("query_start_loc", query_start_loc, ScalarType::Int);
  check.dtype("seq_lens", seq_lens, ScalarType::Int);
  check.dtype("plan", plan, ScalarType::Int);
  check.dtype("workspace", workspace, ScalarType::Float);
  check.same_device("query", query);
  check.same_device("kv_cache", kv_cache);
  check.same_device("block_table", block_table);
  check.same_device("query_start_loc", query_start_loc);
  check.same_device("seq_lens", seq_lens);
  check.same_device("plan", plan);
  check.same_device("workspace", workspace);
  check.same_device("out", out);
  check.dense_inner("query", query, 1);
  check.dense_inner("kv_cache", kv_cache, 4);
  check.dense_inner("block_table", block_table, 1);
  check.contiguous("query_start_loc", query_start_loc);
  check.contiguous("seq_lens", seq_lens);
  check.contiguous("plan", plan);
  check.contiguous("workspace", workspace);
  check.contiguous("out", out);

  const AttentionPlanShape shape{
      .num_seqs = check.size("num_seqs"),
      .num_tokens = check.size("num_tokens"),
      .max_query_len = max_query_len,
      .num_heads = check.size("num_heads"),
      .num_kv_heads = check.size("num_kv_heads"),
      .head_dim = check.size("head_dim"),
      .block_size = check.size("block_size"),
  };
  check_attention_shape(kOp, shape);
  check_scores(kOp, scale, logit_cap);
  sliding_window = checked_sliding_window(kOp, sliding_window);

  const SharedPrefixes prefixes =
      checked_shared_prefixes(check, kOp, prefix_start, prefix_lens, max_query_len, sliding_window);
  const int64_t prefix_splits =
      checked_prefix_splits(check, prefixes, prefix_results, shape, dtype);

  const PagedAttentionParams params{
      .query = query.const_data_ptr(),
      .kv_cache = kv_cache.const_data_ptr(),
      .block_table = static_cast<const int32_t*>(block_table.const_data_ptr()),
      .query_start_loc = static_cast<const int32_t*>(query_start_loc.const_data_ptr()),
      .seq_lens = static_cast<const int32_t*>(seq_lens.const_data_ptr()),
      .plan = static_cast<const int32_t*>(plan.const_data_ptr()),
      .workspace = static_cast<float*>(workspace.mutable_data_ptr()),
      .out = out.mutable_data_ptr(),
      .query_stride_token = query.stride(0),
      .query_stride_head = query.stride(1),
      .cache_stride_block = kv_cache.stride(0),
      .block_table_stride = block_table.stride(0),
      .plan_length = check.size("plan_length"),
      .workspace_length = check.size("workspace_length"),
      .num_tokens = shape.num_tokens,
      .num_seqs = shape.num_seqs,
      .num_heads = shape.num_heads,
      .num_kv_heads = shape.num_kv_heads,
      .head_dim = shape.head_dim,
      .num_blocks = check.size("num_blocks"),
      .block_size = shape.block_size,
      .max_blocks = check.size("max_blocks"),
      .max_query_len = max_query_len,
      .sliding_window = sliding_window,
      .scale = static_cast<float>(scale),
      .logit_cap = static_cast<float>(logit_cap),
      .dtype = dtype,
      .prefixes = prefixes,
      .prefix_results =
          prefix_splits == 0 ? nullptr : static_cast<float*>(prefix_results->mutable_data_ptr()),
      .prefix_splits = prefix_splits,
  };
  if (params.num_tokens == 0) return;

  if (is_cpu(query)) {
    check_buffers(params, attention_plan_sizes_cpu());
    check_contents(params, shape);
    run_paged_attention_cpu(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(query);
  AttentionPlanSizes sizes{};
  check_cuda(kOp, attention_plan_sizes_cuda(shape, &sizes));
  check_buffers(params, sizes);
  check.aligned("query", query, 16);
  check.aligned("kv_cache", kv_cache, 16);
  check.aligned("out", out, 16);
  check_cuda(kOp, launch_paged_attention(params, context.stream()));
#endif
}

}  // namespace pagedinfer
