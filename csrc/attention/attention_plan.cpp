#include "attention/attention_plan.h"

#include <algorithm>
#include <cmath>

#include "attention/attention_plan_cuda.h"
#include "attention/check_prefixes.h"
#include "common/check.h"
#include "common/cuda_context.h"
#include "ops.h"

namespace pagedinfer {

namespace {

constexpr int64_t kHeadDims[] = {64, 80, 96, 112, 128, 256};
constexpr int64_t kBlockSizes[] = {8, 16, 32, 64};

// 4 MiB: partial results enough to keep a hundred threads busy.
constexpr int64_t kCpuWorkspace = int64_t{1} << 20;

template <typename Values>
void check_listed(const char* op, const char* name, int64_t value, const Values& supported) {
  std::ostringstream list;
  bool found = false, first = true;
  for (int64_t each : supported) {
    found |= each == value;
    list << (first ? "" : ", ") << each;
    first = false;
  }
  PAGEDINFER_CHECK(found, op, ": ", name, " is ", value, "; supported are ", list.str());
}

void check_query_start_loc(ArgumentChecker& check, const char* op, const Tensor& query_start_loc) {
  check.dtype("query_start_loc", query_start_loc, ScalarType::Int);
  check.same_device("query_start_loc", query_start_loc);
  check.contiguous("query_start_loc", query_start_loc);
  PAGEDINFER_CHECK(query_start_loc.dim() == 1 && query_start_loc.size(0) >= 1, op,
                   ": query_start_loc has shape ", shape_of(query_start_loc),
                   "; expected [num_seqs + 1]");
}

AttentionPlanSizes plan_sizes(const char* op, const Tensor& on_device,
                              const AttentionPlanShape& shape) {
  if (is_cpu(on_device)) return attention_plan_sizes_cpu();
  AttentionPlanSizes sizes{};
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(on_device);
  check_cuda(op, attention_plan_sizes_cuda(shape, &sizes));
#else
  (void)op, (void)shape;
#endif
  return sizes;
}

}  // namespace

void check_attention_shape(const char* op, const AttentionPlanShape& shape) {
  check_listed(op, "head_dim", shape.head_dim, kHeadDims);
  check_listed(op, "block_size", shape.block_size, kBlockSizes);
  PAGEDINFER_CHECK(
      shape.num_kv_heads > 0 && shape.num_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
      op, ": num_heads is ", shape.num_heads, " and num_kv_heads ", shape.num_kv_heads,
      "; expected num_heads to be a positive multiple of num_kv_heads");
  PAGEDINFER_CHECK(shape.num_tokens >= 0, op, ": num_tokens is ", shape.num_tokens,
                   "; expected >= 0");
  PAGEDINFER_CHECK(shape.max_query_len >= 0, op, ": max_query_len is ", shape.max_query_len,
                   "; expected >= 0");
}

int64_t checked_sliding_window(const char* op, int64_t sliding_window) {
  PAGEDINFER_CHECK(sliding_window >= 0, op, ": sliding_window is ", sliding_window,
                   "; expected >= 0 (0: no window)");
  return std::min<int64_t>(sliding_window, INT32_MAX);
}

void check_scores(const char* op, double scale, double logit_cap) {
  PAGEDINFER_CHECK(std::isfinite(scale), op, ": scale is ", scale, "; expected a finite number");
  PAGEDINFER_CHECK(std::isfinite(logit_cap) && logit_cap >= 0, op, ": logit_cap is ", logit_cap,
                   "; expected a finite number >= 0 (0: no cap)");
}

AttentionPlanSizes attention_plan_sizes_cpu() {
  return {.plan = sizeof(uint64_t) / sizeof(int32_t), .workspace = kCpuWorkspace};
}

void check_attention_lengths(const char* op, const int32_t* query_start_loc,
                             const int32_t* seq_lens, const AttentionPlanShape& shape) {
  PAGEDINFER_CHECK(query_start_loc[0] == 0, op, ": query_start_loc[0] is ", query_start_loc[0],
                   "; expected 0");
  for (int64_t i = 0; i < shape.num_seqs; ++i) {
    const int64_t query_len = int64_t{query_start_loc[i + 1]} - query_start_loc[i];
    PAGEDINFER_CHECK(query_len >= 0, op, ": query_start_loc[", i, ":", i + 2, "] is [",
                     query_start_loc[i], ", ", query_start_loc[i + 1], "]; expected it to ascend");
    PAGEDINFER_CHECK(query_len <= shape.max_query_len, op, ": sequence ", i, " has ", query_len,
                     " query tokens; expected at most max_query_len=", shape.max_query_len);
    PAGEDINFER_CHECK(seq_lens[i] >= 0, op, ": seq_lens[", i, "] is ", seq_lens[i],
                     "; expected >= 0");
  }
  PAGEDINFER_CHECK(query_start_loc[shape.num_seqs] <= shape.num_tokens, op,
                   ": query_start_loc[-1] is ", query_start_loc[shape.num_seqs],
                   "; expected at most num_tokens=", shape.num_tokens);
}

void check_shared_prefixes(const char* op, const SharedPrefixes& prefixes,
                           const int32_t* query_start_loc, const int32_t* seq_lens,
                           const AttentionPlanShape& shape) {
  if (prefixes.num_groups == 0) return;
  PAGEDINFER_CHECK(prefixes.start[0] == 0, op, ": prefix_start[0] is ", prefixes.start[0],
                   "; expected 0");
  for (int64_t g = 0; g < prefixes.num_groups; ++g) {
    const int64_t begin = prefixes.start[g], end = prefixes.start[g + 1], len = prefixes.lens[g];
    PAGEDINFER_CHECK(begin <= end && end <= shape.num_seqs, op, ": prefix_start[", g, ":", g + 2,
                     "] is [", begin, ", ", end,
                     "]; expected it to ascend up to num_seqs=", shape.num_seqs);
    PAGEDINFER_CHECK(len >= 0 && len % kPrefixLenMultiple == 0, op, ": prefix_lens[", g, "] is ",
                     len, "; expected a multiple of ", kPrefixLenMultiple);
    for (int64_t i = begin; i < end; ++i) {
      PAGEDINFER_CHECK(len < seq_lens[i] || len == 0, op, ": prefix_lens[", g, "] is ", len,
                       "; expected less than seq_lens[", i, "]=", seq_lens[i], " of its member");
      PAGEDINFER_CHECK(query_start_loc[i + 1] - query_start_loc[i] == 1, op, ": sequence ", i,
                       " of a shared prefix has ", query_start_loc[i + 1] - query_start_loc[i],
                       " query tokens; expected one");
    }
  }
}

uint64_t attention_fingerprint(const int32_t* query_start_loc, const int32_t* seq_lens,
                               const AttentionPlanShape& shape, int64_t sliding_window,
                               const SharedPrefixes& prefixes) {
  // The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) over a running sum.
  uint64_t hash = 0;
  auto add = [&hash](int64_t value) {
    hash += static_cast<uint64_t>(value) + 0x9e3779b97f4a7c15u;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
    hash ^= hash >> 31;
  };
  for (int64_t value : {shape.num_seqs, shape.num_tokens, shape.num_heads, shape.num_kv_heads,
                        shape.head_dim, shape.block_size, sliding_window}) {
    add(value);
  }
  for (int64_t i = 0; i < shape.num_seqs; ++i) {
    add(query_start_loc[i + 1]);
    add(seq_lens[i]);
  }
  for (int64_t g = 0; g < prefixes.num_groups; ++g) {
    add(prefixes.start[g + 1]);
    add(prefixes.lens[g]);
  }
  return hash;
}

std::tuple<int64_t, int64_t> attention_plan_sizes(const Tensor& query_start_loc, int64_t num_tokens,
                                                  int64_t max_query_len, int64_t num_heads,
                                                  int64_t num_kv_heads, int64_t head_dim,
                                                  int64_t block_size) {
  const char* op = "attention_plan_sizes";
  ArgumentChecker check(op);
  check_query_start_loc(check, op, query_start_loc);
  const AttentionPlanShape shape{
      .num_seqs = query_start_loc.size(0) - 1,
      .num_tokens = num_tokens,
      .max_query_len = max_query_len,
      .num_heads = num_heads,
      .num_kv_heads = num_kv_heads,
      .head_dim = head_dim,
      .block_size = block_size,
  };
  check_attention_shape(op, shape);
  const AttentionPlanSizes sizes = plan_sizes(op, query_start_loc, shape);
  return {sizes.plan, sizes.workspace};
}

void attention_plan(const Tensor& query_start_loc, const Tensor& seq_lens, Tensor plan,
                    int64_t num_tokens, int64_t max_query_len, int64_t num_heads,
                    int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                    int64_t sliding_window, bool deterministic, std::optional<Tensor> prefix_start,
                    std::optional<Tensor> prefix_lens) {
  const char* op = "attention_plan";
  ArgumentChecker check(op);
  check_query_start_loc(check, op, query_start_loc);
  const int64_t num_seqs = query_start_loc.size(0) - 1;
  PAGEDINFER_CHECK(seq_lens.dim() == 1 && seq_lens.size(0) == num_seqs, op, ": seq_lens has shape ",
                   shape_of(seq_lens), "; expected [num_seqs=", num_seqs, "]");
  check.shape("plan", plan, {"plan_length"});
  check.dtype("seq_lens", seq_lens, ScalarType::Int);
  check.dtype("plan", plan, ScalarType::Int);
  check.same_device("seq_lens", seq_lens);
  check.same_device("plan", plan);
  check.contiguous("seq_lens", seq_lens);
  check.contiguous("plan", plan);
  sliding_window = checked_sliding_window(op, sliding_window);

  const AttentionPlanParams params{
      .query_start_loc = static_cast<const int32_t*>(query_start_loc.const_data_ptr()),
      .seq_lens = static_cast<const int32_t*>(seq_lens.const_data_ptr()),
      .plan = static_cast<int32_t*>(plan.mutable_data_ptr()),
      .plan_length = check.size("plan_length"),
      .shape =
          {
              .num_seqs = num_seqs,
              .num_tokens = num_tokens,
              .max_query_len = max_query_len,
              .num_heads = num_heads,
              .num_kv_heads = num_kv_heads,
              .head_dim = head_dim,
              .block_size = block_size,
          },
      .sliding_window = sliding_window,
      .deterministic = deterministic,
      .prefixes = checked_shared_prefixes(check, op, prefix_start, prefix_lens, max_query_len,
                                          sliding_window),
  };
  PAGEDINFER_CHECK(!deterministic || params.prefixes.num_groups == 0, op,
                   ": deterministic is set; with shared prefixes a result depends on the batch");
  check_attention_shape(op, params.shape);
  const AttentionPlanSizes sizes = plan_sizes(op, query_start_loc, params.shape);
  PAGEDINFER_CHECK(params.plan_length >= sizes.plan, op, ": plan has ", params.plan_length,
                   " elements; expected at least ", sizes.plan, " for this batch");

  if (is_cpu(query_start_loc)) {
    check_attention_lengths(op, params.query_start_loc, params.seq_lens, params.shape);
    check_shared_prefixes(op, params.prefixes, params.query_start_loc, params.seq_lens,
                          params.shape);
    const uint64_t fingerprint = attention_fingerprint(
        params.query_start_loc, params.seq_lens, params.shape, sliding_window, params.prefixes);
    params.plan[0] = static_cast<int32_t>(fingerprint);
    params.plan[1] = static_cast<int32_t>(fingerprint >> 32);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(query_start_loc);
  check_cuda(op, launch_attention_plan(params, context.stream()));
#endif
}

}  // namespace pagedinfer
