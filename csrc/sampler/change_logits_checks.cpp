#include "sampler/change_logits_checks.h"

namespace pagedinfer {

namespace {

// Rows start at multiples of 16 bytes.
int64_t changed_stride(int64_t columns) { return (columns + 3) / 4 * 4; }

}  // namespace

int64_t changed_logits_bytes(int64_t num_rows, int64_t columns) {
  return num_rows * changed_stride(columns) * static_cast<int64_t>(sizeof(float));
}

ChangeLogitsParams check_changes(ArgumentChecker& check, const ChangeLogitsTensors& tensors,
                                 int64_t vocab_size, const Tensor& workspace) {
  ChangeLogitsParams params{};
  if (!tensors.kinds.has_value()) return params;
  auto given = [&](const char* name, const std::optional<Tensor>& tensor, ScalarType type,
                   std::initializer_list<const char*> dims) -> const void* {
    PAGEDINFER_CHECK(tensor.has_value(), "sample_tokens: kinds is given without ", name);
    check.shape(name, *tensor, dims);
    check.dtype(name, *tensor, type);
    check.same_device(name, *tensor);
    check.contiguous(name, *tensor);
    return tensor->const_data_ptr();
  };
  params.kinds =
      static_cast<const int32_t*>(given("kinds", tensors.kinds, ScalarType::Int, {"num_slots"}));
  params.repetition_penalty = static_cast<const float*>(
      given("repetition_penalty", tensors.repetition_penalty, ScalarType::Float, {"num_slots"}));
  params.presence_penalty = static_cast<const float*>(
      given("presence_penalty", tensors.presence_penalty, ScalarType::Float, {"num_slots"}));
  params.frequency_penalty = static_cast<const float*>(
      given("frequency_penalty", tensors.frequency_penalty, ScalarType::Float, {"num_slots"}));
  params.bias_ids = static_cast<const int32_t*>(
      given("bias_ids", tensors.bias_ids, ScalarType::Int, {"num_slots", "max_biases"}));
  params.bias = static_cast<const float*>(
      given("bias", tensors.bias, ScalarType::Float, {"num_slots", "max_biases"}));
  params.max_biases = check.size("max_biases");

  if (tensors.token_counts.has_value()) {
    given("token_counts", tensors.token_counts, ScalarType::Short, {"num_slots", "counted"});
    params.token_counts = static_cast<int16_t*>(tensors.token_counts->mutable_data_ptr());
    params.counts_stride = check.size("counted");
    PAGEDINFER_CHECK(params.counts_stride >= vocab_size, "sample_tokens: token_counts has ",
                     params.counts_stride, " columns; expected vocab_size=", vocab_size,
                     " or more");
  }
  if (tensors.allowed.has_value()) {
    params.allowed = static_cast<const uint32_t*>(
        given("allowed", tensors.allowed, ScalarType::Int, {"num_slots", "mask_words"}));
    params.mask_words = check.size("mask_words");
    PAGEDINFER_CHECK(params.mask_words * 32 >= vocab_size, "sample_tokens: allowed has ",
                     params.mask_words, " columns of 32 tokens; expected ", (vocab_size + 31) / 32,
                     " or more for vocab_size=", vocab_size);
  }
  const int64_t bytes = changed_logits_bytes(check.size("num_rows"), check.size("columns"));
  PAGEDINFER_CHECK(workspace.numel() >= bytes, "sample_tokens: workspace has ", workspace.numel(),
                   " bytes; expected ", bytes, " or more when logits may change");
  PAGEDINFER_CHECK(reinterpret_cast<uintptr_t>(workspace.const_data_ptr()) % 16 == 0,
                   "sample_tokens: workspace is at address ", workspace.const_data_ptr(),
                   "; expected a multiple of 16");
  params.changed = static_cast<float*>(workspace.mutable_data_ptr());
  params.changed_stride = changed_stride(check.size("columns"));
  return params;
}

}  // namespace pagedinfer
