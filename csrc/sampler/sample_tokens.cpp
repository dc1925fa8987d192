#include "sampler/sample_tokens.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "ops.h"
#include "sampler/change_logits_checks.h"
#include "sampler/sample_tokens_cuda.h"
#include "sampler/sampling_math.h"

namespace pagedinfer {

namespace {

template <typename T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

}  // namespace

// Nothing but changed rows needs it: registers, shared memory and the stack do for the rest.
int64_t sample_tokens_workspace_size(const Tensor& logits, bool changes) {
  ArgumentChecker check("sample_tokens");
  check.shape("logits", logits, {"num_rows", "columns"});
  check.float_dtype("logits", logits);
  return changes ? changed_logits_bytes(check.size("num_rows"), check.size("columns")) : 0;
}

void sample_tokens(const Tensor& logits, const Tensor& slots, const Tensor& temperature,
                   const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                   const Tensor& seeds, const Tensor& positions, int64_t vocab_size,
                   Tensor workspace, Tensor token_ids, std::optional<Tensor> logprobs,
                   std::optional<Tensor> kinds, std::optional<Tensor> repetition_penalty,
                   std::optional<Tensor> presence_penalty, std::optional<Tensor> frequency_penalty,
                   std::optional<Tensor> token_counts, std::optional<Tensor> bias_ids,
                   std::optional<Tensor> bias, std::optional<Tensor> allowed,
                   std::optional<Tensor> wants_logprob) {
  ArgumentChecker check("sample_tokens");
  check.shape("logits", logits, {"num_rows", "columns"});
  check.shape("slots", slots, {"num_rows"});
  check.shape("token_ids", token_ids, {"num_rows"});
  const DType dtype = check.float_dtype("logits", logits);
  check.dtype("slots", slots, ScalarType::Int);
  check.dtype("token_ids", token_ids, ScalarType::Long);
  check.same_device("logits", logits);
  check.same_device("slots", slots);
  check.same_device("token_ids", token_ids);
  check.dense_inner("logits", logits, 1);
  check.contiguous("slots", slots);
  check.contiguous("token_ids", token_ids);

  auto slot_parameter = [&](const char* name, const Tensor& tensor, ScalarType type) {
    check.shape(name, tensor, {"num_slots"});
    check.dtype(name, tensor, type);
    check.same_device(name, tensor);
    check.contiguous(name, tensor);
  };
  slot_parameter("temperature", temperature, ScalarType::Float);
  slot_parameter("top_k", top_k, ScalarType::Int);
  slot_parameter("top_p", top_p, ScalarType::Float);
  slot_parameter("min_p", min_p, ScalarType::Float);
  slot_parameter("seeds", seeds, ScalarType::Long);
  slot_parameter("positions", positions, ScalarType::Long);

  check.shape("workspace", workspace, {"workspace"});
  check.dtype("workspace", workspace, ScalarType::Byte);
  check.same_device("workspace", workspace);
  if (logprobs.has_value()) {
    check.shape("logprobs", *logprobs, {"num_rows"});
    check.dtype("logprobs", *logprobs, ScalarType::Float);
    check.same_device("logprobs", *logprobs);
    check.contiguous("logprobs", *logprobs);
  }
  if (wants_logprob.has_value()) slot_parameter("wants_logprob", *wants_logprob, ScalarType::Bool);
  PAGEDINFER_CHECK(vocab_size >= 1 && vocab_size <= check.size("columns"),
                   "sample_tokens: vocab_size is ", vocab_size, "; expected 1 to ",
                   check.size("columns"), ", the columns of logits");
  PAGEDINFER_CHECK(vocab_size <= sampling::kMaxVocabSize, "sample_tokens: vocab_size is ",
                   vocab_size, "; expected at most ", sampling::kMaxVocabSize);

  const ChangeLogitsParams changes =
      check_changes(check,
                    {kinds, repetition_penalty, presence_penalty, frequency_penalty, token_counts,
                     bias_ids, bias, allowed},
                    vocab_size, workspace);

  SampleTokensParams params{
      .logits = logits.const_data_ptr(),
      .slots = data_of<int32_t>(slots),
      .temperature = data_of<float>(temperature),
      .top_k = data_of<int32_t>(top_k),
      .top_p = data_of<float>(top_p),
      .min_p = data_of<float>(min_p),
      .seeds = data_of<int64_t>(seeds),
      .positions = data_of<int64_t>(positions),
      .token_ids = static_cast<int64_t*>(token_ids.mutable_data_ptr()),
      .logprobs =
          logprobs.has_value() ? static_cast<float*>(logprobs->mutable_data_ptr()) : nullptr,
      .wants_logprob = wants_logprob.has_value() ? data_of<bool>(*wants_logprob) : nullptr,
      .row_stride = logits.stride(0),
      .num_rows = check.size("num_rows"),
      .num_slots = check.size("num_slots"),
      .vocab_size = vocab_size,
      .dtype = dtype,
      .changes = changes,
      .of_changed_rows = false,
  };
  params.changes.logits = params.logits;
  params.changes.slots = params.slots;
  params.changes.row_stride = params.row_stride;
  params.changes.num_rows = params.num_rows;
  params.changes.num_slots = params.num_slots;
  params.changes.vocab_size = params.vocab_size;
  params.changes.dtype = params.dtype;
  if (params.num_rows == 0) return;

  if (is_cpu(logits)) {
    for (int64_t row = 0; row < params.num_rows; ++row) {
      PAGEDINFER_CHECK(params.slots[row] >= -1 && params.slots[row] < params.num_slots,
                       "sample_tokens: slots[", row, "] is ", params.slots[row],
                       "; expected -1 (padding) or a slot below ", params.num_slots);
    }
    PAGEDINFER_CPU_KERNEL(sample_tokens_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(logits);
  check_cuda("sample_tokens", launch_sample_tokens(params, context.stream()));
#endif
}

}  // namespace pagedinfer
