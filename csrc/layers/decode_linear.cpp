#include "layers/decode_linear.h"

#include <cstdint>

#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/decode_linear_cuda.h"
#include "layers/skinny_linear.h"
#include "ops.h"

namespace pagedinfer {

namespace {

constexpr int64_t kRowBytes = 16;  // at multiples of which the copy engine's rows begin
constexpr int64_t kPairBytes = 4;  // written at once
constexpr int64_t kGroup = 8;      // features of the gate that lie together on the chip

// The sizes, checked; no pointers yet.
DecodeLinearParams checked_sizes(ArgumentChecker& check, const Tensor& input, const Tensor& weight,
                                 bool gated) {
  check.shape("input", input, {"num_rows", "in_features"});
  check.shape("weight", weight, {"num_features", "in_features"});
  const DType dtype = check.float_dtype("input", input);
  PAGEDINFER_CHECK(dtype != DType::float32,
                   "decode_linear: input has dtype float32; expected float16 or bfloat16");
  check.float_dtype("weight", weight);
  check.same_device("input", input);
  check.same_device("weight", weight);
  check.dense_inner("input", input, 1);
  check.contiguous("weight", weight);
  check.aligned("input", input, kRowBytes);
  check.aligned("weight", weight, kRowBytes);
  const int64_t num_rows = check.size("num_rows"), num_features = check.size("num_features");
  PAGEDINFER_CHECK(num_rows <= kMaxDecodeRows, "decode_linear: input has shape ", shape_of(input),
                   "; expected at most ", kMaxDecodeRows, " rows");
  PAGEDINFER_CHECK(check.size("in_features") > 0, "decode_linear: input has shape ",
                   shape_of(input), "; expected in_features of at least 1");
  const int64_t multiple = gated ? 2 * kGroup : 2;
  PAGEDINFER_CHECK(num_features % multiple == 0, "decode_linear: weight has shape ",
                   shape_of(weight), "; expected a multiple of ", multiple, " rows",
                   gated ? ", gate's and then as many of the other factor" : "");
  DecodeLinearParams params{};
  params.input_stride = input.stride(0);
  params.num_rows = num_rows;
  params.in_features = check.size("in_features");
  params.num_features = num_features;
  params.gated = gated;
  params.dtype = dtype;
  return params;
}

void decode_linear_cpu(const DecodeLinearParams& p) {
  PAGEDINFER_CPU_KERNEL(skinny_linear_cpu)({
      .input = p.input,
      .weight = p.weight,
      .bias = p.bias,
      .norm_weight = nullptr,
      .residual = nullptr,
      .out = p.out,
      .input_stride = p.input_stride,
      .residual_stride = 0,
      .out_stride = p.out_stride,
      .num_rows = p.num_rows,
      .in_features = p.in_features,
      .num_features = p.num_features,
      .epsilon = 0.0f,
      .gated = p.gated,
      .dtype = p.dtype,
  });
}

}  // namespace

int64_t decode_linear_workspace_size(const Tensor& input, const Tensor& weight, bool gated) {
  ArgumentChecker check("decode_linear");
  const DecodeLinearParams params = checked_sizes(check, input, weight, gated);
  if (is_cpu(input) || params.num_rows == 0 || params.num_features == 0) return 0;
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(input);
  return decode_linear_workspace_floats(params);
#else
  return 0;
#endif
}

void decode_linear(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                   bool gated, int64_t queue, Tensor workspace, Tensor out) {
  ArgumentChecker check("decode_linear");
  DecodeLinearParams params = checked_sizes(check, input, weight, gated);
  PAGEDINFER_CHECK(queue >= 0 && queue < kDecodeLinearQueues, "decode_linear: queue is ", queue,
                   "; expected 0 to ", kDecodeLinearQueues - 1);
  params.queue = queue;
  PAGEDINFER_CHECK(
      out.dim() == 2 && out.size(0) == params.num_rows && out.size(1) == params.out_features(),
      "decode_linear: out has shape ", shape_of(out), "; expected [num_rows=", params.num_rows,
      ", out_features=", params.out_features(), "]");
  check.float_dtype("out", out);
  check.same_device("out", out);
  check.dense_inner("out", out, 1);
  if (bias) {
    check.shape("bias", *bias, {"num_features"});
    check.float_dtype("bias", *bias);
    check.same_device("bias", *bias);
    check.contiguous("bias", *bias);
    params.bias = bias->const_data_ptr();
  }
  check.dtype("workspace", workspace, ScalarType::Float);
  check.same_device("workspace", workspace);
  check.contiguous("workspace", workspace);
  if (params.num_rows == 0 || params.num_features == 0) return;
  check.aligned("out", out, kPairBytes);
  check.aligned("workspace", workspace, kRowBytes);
  params.input = input.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.workspace = workspace.mutable_data_ptr();
  params.out = out.mutable_data_ptr();
  params.out_stride = out.stride(0);
  if (is_cpu(input)) return decode_linear_cpu(params);
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(input);
  PAGEDINFER_CHECK(decode_linear_serves_device(), "decode_linear: input is on ", device_of(input),
                   "; expected a GPU of compute capability 9.0, and a build with code for 90a");
  const int64_t needed = decode_linear_workspace_floats(params);
  PAGEDINFER_CHECK(workspace.numel() >= needed, "decode_linear: workspace has ", workspace.numel(),
                   " elements; expected at least ", needed);
  check_cuda("decode_linear", launch_decode_linear(params, context.stream()));
#endif
}

}  // namespace pagedinfer
