#include "layers/offset_rms_norm.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/offset_rms_norm_cuda.h"
#include "layers/row_checks.h"
#include "ops.h"

namespace pagedinfer {

void offset_rms_norm(const Tensor& input, const Tensor& weight, double epsilon, Tensor out,
                     std::optional<Tensor> addend) {
  const char* op = "offset_rms_norm";
  ArgumentChecker check(op);
  const DType dtype = check_norm(op, check, input, weight, out, "addend", addend);
  const int64_t hidden = check.size("hidden");
  const RowCounts counts = row_counts(input);
  const OffsetRmsNormParams params{
      .input = input.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .addend = addend ? addend->const_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .input_strides = row_strides(op, "input", input),
      .addend_strides = addend ? row_strides(op, "addend", *addend) : RowStrides{},
      .out_strides = row_strides(op, "out", out),
      .num_rows = counts.rows,
      .inner_rows = counts.inner,
      .width = hidden,
      .epsilon = checked_epsilon(op, epsilon),
      .dtype = dtype,
  };
  if (params.num_rows == 0 || hidden == 0) return;

  if (is_cpu(input)) {
    PAGEDINFER_CPU_KERNEL(offset_rms_norm_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(input);
  check_cuda(op, launch_offset_rms_norm(params, context.stream()));
#endif
}

}  // namespace pagedinfer
