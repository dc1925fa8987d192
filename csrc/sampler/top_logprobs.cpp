#include "sampler/top_logprobs.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "ops.h"
#include "sampler/sampling_math.h"
#include "sampler/top_logprobs_cuda.h"

namespace pagedinfer {

void top_logprobs(const Tensor& logits, const Tensor& token_ids, int64_t vocab_size,
                  Tensor logprobs, Tensor ranks, Tensor top_ids, Tensor top_logprobs) {
  ArgumentChecker check("top_logprobs");
  check.shape("logits", logits, {"num_rows", "columns"});
  const DType dtype = check.float_dtype("logits", logits);
  check.same_device("logits", logits);
  check.dense_inner("logits", logits, 1);

  auto of_rows = [&](const char* name, const Tensor& tensor, ScalarType type,
                     std::initializer_list<const char*> dims) {
    check.shape(name, tensor, dims);
    check.dtype(name, tensor, type);
    check.same_device(name, tensor);
    check.contiguous(name, tensor);
  };
  of_rows("token_ids", token_ids, ScalarType::Long, {"num_rows"});
  of_rows("logprobs", logprobs, ScalarType::Float, {"num_rows"});
  of_rows("ranks", ranks, ScalarType::Long, {"num_rows"});
  of_rows("top_ids", top_ids, ScalarType::Long, {"num_rows", "num_top"});
  of_rows("top_logprobs", top_logprobs, ScalarType::Float, {"num_rows", "num_top"});
  PAGEDINFER_CHECK(vocab_size >= 1 && vocab_size <= check.size("columns"),
                   "top_logprobs: vocab_size is ", vocab_size, "; expected 1 to ",
                   check.size("columns"), ", the columns of logits");
  PAGEDINFER_CHECK(vocab_size <= sampling::kMaxVocabSize, "top_logprobs: vocab_size is ",
                   vocab_size, "; expected at most ", sampling::kMaxVocabSize);
  PAGEDINFER_CHECK(check.size("num_top") <= kMaxTopLogprobs, "top_logprobs: num_top is ",
                   check.size("num_top"), "; expected at most ", kMaxTopLogprobs);

  const TopLogprobsParams params{
      .logits = logits.const_data_ptr(),
      .token_ids = static_cast<const int64_t*>(token_ids.const_data_ptr()),
      .logprobs = static_cast<float*>(logprobs.mutable_data_ptr()),
      .ranks = static_cast<int64_t*>(ranks.mutable_data_ptr()),
      .top_ids = static_cast<int64_t*>(top_ids.mutable_data_ptr()),
      .top_logprobs = static_cast<float*>(top_logprobs.mutable_data_ptr()),
      .row_stride = logits.stride(0),
      .num_rows = check.size("num_rows"),
      .vocab_size = vocab_size,
      .num_top = check.size("num_top"),
      .dtype = dtype,
      .slots = nullptr,
      .kinds = nullptr,
      .wants_logprob = nullptr,
      .num_slots = 0,
  };
  if (params.num_rows == 0) return;
  if (is_cpu(logits)) {
    PAGEDINFER_CPU_KERNEL(top_logprobs_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(logits);
  check_cuda("top_logprobs", launch_top_logprobs(params, context.stream()));
#endif
}

}  // namespace pagedinfer
