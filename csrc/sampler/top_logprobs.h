// top_logprobs: of each row of logits the log-probability and the rank of one token, and the best
// tokens.
//
//   logprob[r] = log softmax(x)[token]      over the raw logits
//   rank[r]    = the token's place in the order of falling logits, ties by rising id; from 1
//   top[r]     = the first k of that order, with their log-probabilities
//
// The sums are those of sample_tokens at temperature 1: see sampling_math.h.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

constexpr int64_t kMaxTopLogprobs = 1024;

// A row whose token is outside [0, vocab_size), or that holds NaN or +inf or nothing but -inf, gets
// NaN, rank 0, ids -1.
struct TopLogprobsParams {
  const void* logits;  // dtype [num_rows, vocab_size and more], rows row_stride elements apart
  const int64_t* token_ids;  // [num_rows]
  float* logprobs;           // [num_rows], written
  int64_t* ranks;            // [num_rows] or null, written
  int64_t* top_ids;          // [num_rows, num_top], written: -1 where fewer have a finite logit
  float* top_logprobs;       // [num_rows, num_top], written: -inf there
  int64_t row_stride;
  int64_t num_rows, vocab_size, num_top;
  DType dtype;
  // If `kinds` is given, only rows whose slot changes its logits are looked at and written (see
  // change_logits.h): what sample_tokens needs.
  const int32_t* slots;       // [num_rows]
  const int32_t* kinds;       // [num_slots] or null
  const bool* wants_logprob;  // [num_slots] or null, likewise: of these, those that are set
  int64_t num_slots;
};

PAGEDINFER_FOR_EACH_ISA(void top_logprobs_cpu(const TopLogprobsParams& params);)

}  // namespace pagedinfer
