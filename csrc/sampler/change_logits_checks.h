// Checks the arguments of sample_tokens that change logits.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/check.h"
#include "sampler/change_logits.h"

namespace pagedinfer {

// All are given together, or none; token_counts and allowed may each be left out.
struct ChangeLogitsTensors {
  const std::optional<Tensor>&kinds, &repetition_penalty, &presence_penalty, &frequency_penalty;
  const std::optional<Tensor>&token_counts, &bias_ids, &bias, &allowed;
};

// Bytes of workspace for the changed rows.
int64_t changed_logits_bytes(int64_t num_rows, int64_t columns);

// `check` knows num_rows, columns and num_slots. What belongs to the logits themselves is not
// filled in.
ChangeLogitsParams check_changes(ArgumentChecker& check, const ChangeLogitsTensors& tensors,
                                 int64_t vocab_size, const Tensor& workspace);

}  // namespace pagedinfer
