#include "experts/sum_experts.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "experts/sum_experts_cuda.h"
#include "ops.h"

namespace pagedinfer {

void sum_experts(const Tensor& results, const Tensor& weights, Tensor out) {
  ArgumentChecker check("sum_experts");
  check.shape("results", results, {"num_pairs", "width"});
  check.shape("weights", weights, {"num_tokens", "k"});
  check.shape("out", out, {"num_tokens", "width"});
  const DType dtype = check.float_dtype("results", results);
  check.float_dtype("out", out);
  check.dtype("weights", weights, ScalarType::Float);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"results", results},
                                     {"weights", weights},
                                     {"out", out}}) {
    check.same_device(name, tensor);
    check.contiguous(name, tensor);
  }
  const int64_t num_tokens = check.size("num_tokens"), k = check.size("k");
  PAGEDINFER_CHECK(check.size("num_pairs") == num_tokens * k, "sum_experts: results has shape ",
                   shape_of(results), "; expected ", num_tokens * k, " rows, k for each token");
  const SumExpertsParams params{
      .results = results.const_data_ptr(),
      .weights = static_cast<const float*>(weights.const_data_ptr()),
      .out = out.mutable_data_ptr(),
      .num_tokens = num_tokens,
      .k = k,
      .width = check.size("width"),
      .dtype = dtype,
  };
  if (num_tokens == 0 || params.width == 0) return;
  if (is_cpu(results)) {
    PAGEDINFER_CPU_KERNEL(sum_experts_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(results);
  check_cuda("sum_experts", launch_sum_experts(params, context.stream()));
#endif
}

}  // namespace pagedinfer
