#include "layers/silu_and_mul.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/row_checks.h"
#include "layers/silu_and_mul_cuda.h"
#include "ops.h"

namespace pagedinfer {

void silu_and_mul(const Tensor& input, Tensor out) {
  const char* op = "silu_and_mul";
  ArgumentChecker check(op);
  const int64_t dims = input.dim();
  PAGEDINFER_CHECK(dims >= 1 && input.size(dims - 1) % 2 == 0, "silu_and_mul: input has shape ",
                   shape_of(input), "; expected [..., 2 * width], an even last dimension");
  const int64_t width = input.size(dims - 1) / 2;
  bool matches = out.dim() == dims && out.size(dims - 1) == width;
  for (int64_t i = 0; matches && i + 1 < dims; ++i) matches = out.size(i) == input.size(i);
  PAGEDINFER_CHECK(matches, "silu_and_mul: out has shape ", shape_of(out), "; expected input's, ",
                   shape_of(input), ", with a last dimension of ", width);
  const DType dtype = check.float_dtype("input", input);
  check.float_dtype("out", out);
  check.same_device("input", input);
  check.same_device("out", out);

  const RowCounts counts = row_counts(input);
  const SiluAndMulParams params{
      .input = input.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .input_strides = row_strides(op, "input", input),
      .out_strides = row_strides(op, "out", out),
      .num_rows = counts.rows,
      .inner_rows = counts.inner,
      .width = width,
      .dtype = dtype,
  };
  if (params.num_rows == 0 || width == 0) return;

  if (is_cpu(input)) {
    PAGEDINFER_CPU_KERNEL(silu_and_mul_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(input);
  check_cuda("silu_and_mul", launch_silu_and_mul(params, context.stream()));
#endif
}

}  // namespace pagedinfer
