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
  const DType dtype = check_norm(op, check, input, weight, out, "residual", residual);
  const int64_t hidden = check.size("hidden");
  if (residual) {
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
      .epsilon = checked_epsilon(op, epsilon),
      .dtype = dtype,
  };
  if (params.num_rows == 0 || hidden == 0) return;

  if (is_cpu(input)) {
    PAGEDINFER_CPU_KERNEL(rms_norm_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(input);
  check_cuda(op, launch_rms_norm(params, context.stream()));
#endif
}

}  // namespace pagedinfer
