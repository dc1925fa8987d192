#include "layers/rms_norm.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/rms_norm_cuda.h"
#include "layers/row_checks.h"
#include "ops.h"

namespace pagedinfer {

void rms_norm(const Tensor& input, const Tensor& weight, double epsilon, Tensor out,
              std::optional<Tensor> residual) {
  const char* op = "rms_norm";
  ArgumentChecker check(op);
  check.shape("weight", weight, {"hidden"});
  const int64_t hidden = check.size("hidden");
  PAGEDINFER_CHECK(input.dim() >= 1 && input.size(input.dim() - 1) == hidden,
                   "rms_norm: input has shape ", shape_of(input),
                   "; expected [..., hidden=", hidden, "], weight's size");
  check_same_shape(op, "out", out, "input", input);
  const DType dtype = check.float_dtype("input", input);
  check.float_dtype("weight", weight);
  check.float_dtype("out", out);
  check.same_device("input", input);
  check.same_device("weight", weight);
  check.same_device("out", out);
  check.contiguous("weight", weight);
  if (residual) {
    check_same_shape(op, "residual", *residual, "input", input);
    check.float_dtype("residual", *residual);
    check.same_device("residual", *residual);
    PAGEDINFER_CHECK(input.numel() == 0 || (residual->const_data_ptr() != input.const_data_ptr() &&
                                            residual->const_data_ptr() != out.const_data_ptr()),
                     "rms_norm: residual shares its memory with input or out; expected its own");
  }

  const RowCounts counts = row_counts(input);
  const RmsNormParams params{
      .input = input.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .residual = residual ? residual->mutable_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .input_strides = row_strides(op, "input", input),
      .residual_strides = residual ? row_strides(op, "residual", *residual) : RowStrides{},
      .out_strides = row_strides(op, "out", out),
      .num_rows = counts.rows,
      .inner_rows = counts.inner,
      .hidden = hidden,
      .epsilon = static_cast<float>(epsilon),
      .dtype = dtype,
  };
  if (params.num_rows == 0 || hidden == 0) return;

  if (is_cpu(input)) {
    PAGEDINFER_CPU_KERNEL(rms_norm_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(input);
  check_cuda("rms_norm", launch_rms_norm(params, context.stream()));
#endif
}

}  // namespace pagedinfer
