// attention_plan: how one step's batch is cut into pieces of work, made once a step for all layers.
//
// On the GPU the plan holds the pieces (see attention_plan.cu). On the CPU the pieces are so cheap
// to find that paged_attention finds them itself; there the plan holds a fingerprint of the batch,
// so that a plan made for another batch, which on the GPU would give wrong results, is an error in
// any test.
#pragma once

#include <cstdint>

#include "attention/shared_prefixes.h"

namespace pagedinfer {

// What the lengths of a plan's buffers depend on. Known on the host.
struct AttentionPlanShape {
  int64_t num_seqs, num_tokens;
  int64_t max_query_len;  // no sequence has more query tokens; 1: decode only
  int64_t num_heads, num_kv_heads, head_dim, block_size;
};

struct AttentionPlanSizes {
  int64_t plan;       // int32s
  int64_t workspace;  // float32s
};

struct AttentionPlanParams {
  const int32_t* query_start_loc;  // [num_seqs + 1], ascending from 0
  const int32_t* seq_lens;         // [num_seqs]; 0: an unused row
  int32_t* plan;                   // [plan_length], written
  int64_t plan_length;  // at least what the sizes say; buffers may be made for larger batches
  AttentionPlanShape shape;
  int64_t sliding_window;   // keys that a query sees, itself included; 0: all
  bool deterministic;       // cut a sequence by its own length alone
  SharedPrefixes prefixes;  // keys that the sequences' own work leaves out
};

// ---- checks and the CPU's plan; these throw std::invalid_argument ----

// Head sizes and block sizes that no kernel was built for, heads that do not divide, negative
// sizes.
void check_attention_shape(const char* op, const AttentionPlanShape& shape);

// Refuses a negative window. One too long for int32 is cut to that: no sequence is longer, and
// kernels may compute with int32 positions.
int64_t checked_sliding_window(const char* op, int64_t sliding_window);

// Refuses a scale or a cap of the scores that is not finite, and a negative cap.
void check_scores(const char* op, double scale, double logit_cap);

// The CPU's sizes. Constants: the workspace bounds how many partial results are in memory at a
// time.
AttentionPlanSizes attention_plan_sizes_cpu();

// CPU tensors: lengths that are negative, do not ascend or do not fit num_tokens and max_query_len.
void check_attention_lengths(const char* op, const int32_t* query_start_loc,
                             const int32_t* seq_lens, const AttentionPlanShape& shape);

// CPU tensors: groups that do not ascend or go beyond the batch, a prefix that is as long as a
// member or no multiple of kPrefixLenMultiple, a member that has not one query token.
void check_shared_prefixes(const char* op, const SharedPrefixes& prefixes,
                           const int32_t* query_start_loc, const int32_t* seq_lens,
                           const AttentionPlanShape& shape);

// A hash of everything that a plan may depend on, apart from the capacity of its buffers.
uint64_t attention_fingerprint(const int32_t* query_start_loc, const int32_t* seq_lens,
                               const AttentionPlanShape& shape, int64_t sliding_window,
                               const SharedPrefixes& prefixes);

}  // namespace pagedinfer
