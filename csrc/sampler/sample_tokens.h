// sample_tokens: one token for each row of logits, each row with the parameters of its slot.
// sampling_math.h and token_order.h define the arithmetic; docs/sampling.md explains it.
//
//   changes   of some slots' logits, before all else: change_logits.h
//   order     tokens by falling logit, ties by rising id
//   greedy    the first of the order
//   weights   W = exp((x - largest x) / temperature) as an integer
//   top-k     the first k; top-p: of those, the shortest prefix with floor(p * total weight);
//             min-p: of those, the ones with exp(..) >= min_p
//   draw      r uniform in [0, total weight kept); walking the kept tokens by rising id, the first
//             whose running weight exceeds r
//   logprob   log softmax(x) of the drawn token, over the raw logits
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"
#include "sampler/change_logits.h"

namespace pagedinfer {

struct SampleTokensParams {
  const void* logits;    // dtype [num_rows, vocab_size and more], rows row_stride elements apart
  const int32_t* slots;  // [num_rows]; -1: padding
  const float* temperature;  // [num_slots]
  const int32_t* top_k;      // [num_slots]
  const float* top_p;        // [num_slots]
  const float* min_p;        // [num_slots]
  const int64_t* seeds;      // [num_slots]
  const int64_t* positions;  // [num_slots]
  int64_t* token_ids;  // [num_rows], written: -1 for padding and for a row that cannot be sampled
  float* logprobs;     // [num_rows] or null, written: 0 for padding and where the slot wants none,
                       // NaN for a row that cannot be sampled
  const bool* wants_logprob;  // [num_slots] or null: all do
  int64_t row_stride;
  int64_t num_rows, num_slots, vocab_size;
  DType dtype;
  ChangeLogitsParams changes;  // kinds null: no slot changes its logits
  bool of_changed_rows;        // CUDA: which rows a launch is for
};

namespace sampling {

PAGEDINFER_SHARED bool is_rated(const SampleTokensParams& p, int32_t slot) {
  return p.logprobs != nullptr && (p.wants_logprob == nullptr || p.wants_logprob[slot]);
}

}  // namespace sampling

PAGEDINFER_FOR_EACH_ISA(void sample_tokens_cpu(const SampleTokensParams& params);)

}  // namespace pagedinfer
