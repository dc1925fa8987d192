#include "layers/skinny_linear.h"

#include <cstdint>

#include "common/check.h"
#include "common/cuda_context.h"
#include "layers/skinny_linear_cuda.h"
#include "ops.h"

namespace pagedinfer {

namespace {

// Whether a row of one matrix overlaps with one of the other; rows are contiguous.
bool share_memory(const Tensor& a, const Tensor& b, DType dtype) {
  const int64_t size = size_of(dtype);
  const auto a_begin = reinterpret_cast<intptr_t>(a.const_data_ptr());
  const auto b_begin = reinterpret_cast<intptr_t>(b.const_data_ptr());
  const int64_t a_rows = a.size(0), a_bytes = a.size(1) * size, a_stride = a.stride(0) * size;
  const int64_t b_rows = b.size(0), b_bytes = b.size(1) * size, b_stride = b.stride(0) * size;
  if (a_bytes == 0 || b_bytes == 0) return false;
  for (int64_t i = 0; i < a_rows; ++i) {
    for (int64_t j = 0; j < b_rows; ++j) {
      const int64_t ahead = (b_begin + j * b_stride) - (a_begin + i * a_stride);
      if (ahead < a_bytes && -ahead < b_bytes) return true;
    }
  }
  return false;
}

}  // namespace

void skinny_linear(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                   std::optional<Tensor> norm_weight, double epsilon, bool gated,
                   std::optional<Tensor> residual, Tensor out) {
  constexpr int64_t kVectorBytes = 16;
  ArgumentChecker check("skinny_linear");
  check.shape("input", input, {"num_rows", "in_features"});
  check.shape("weight", weight, {"num_features", "in_features"});
  const DType dtype = check.float_dtype("input", input);
  check.float_dtype("weight", weight);
  check.same_device("input", input);
  check.same_device("weight", weight);
  check.contiguous("weight", weight);
  check.dense_inner("input", input, 1);
  check.aligned("input", input, kVectorBytes);
  check.aligned("weight", weight, kVectorBytes);
  const auto check_vector = [&](const char* name, const std::optional<Tensor>& tensor,
                                const char* size) {
    if (!tensor) return;
    check.shape(name, *tensor, {size});
    check.float_dtype(name, *tensor);
    check.same_device(name, *tensor);
    check.contiguous(name, *tensor);
  };
  check_vector("bias", bias, "num_features");
  check_vector("norm_weight", norm_weight, "in_features");
  if (norm_weight) check.aligned("norm_weight", *norm_weight, kVectorBytes);

  const int64_t num_rows = check.size("num_rows");
  const int64_t num_features = check.size("num_features");
  PAGEDINFER_CHECK(num_rows <= kMaxSkinnyRows, "skinny_linear: input has shape ", shape_of(input),
                   "; expected at most ", kMaxSkinnyRows, " rows");
  PAGEDINFER_CHECK(!gated || num_features % 2 == 0, "skinny_linear: weight has shape ",
                   shape_of(weight), "; expected an even number of rows, gate's and then up's");
  const int64_t width = gated ? num_features / 2 : num_features;
  const auto check_output = [&](const char* name, const Tensor& tensor) {
    PAGEDINFER_CHECK(tensor.dim() == 2 && tensor.size(0) == num_rows && tensor.size(1) == width,
                     "skinny_linear: ", name, " has shape ", shape_of(tensor),
                     "; expected [num_rows=", num_rows, ", out_features=", width, "]");
    check.float_dtype(name, tensor);
    check.same_device(name, tensor);
    check.dense_inner(name, tensor, 1);
    PAGEDINFER_CHECK(!share_memory(tensor, input, dtype), "skinny_linear: ", name,
                     " shares its memory with input; expected its own");
  };
  check_output("out", out);
  if (residual) check_output("residual", *residual);
  if (num_rows == 0 || width == 0) return;

  const SkinnyLinearParams params{
      .input = input.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .norm_weight = norm_weight ? norm_weight->const_data_ptr() : nullptr,
      .residual = residual ? residual->const_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .input_stride = input.stride(0),
      .residual_stride = residual ? residual->stride(0) : 0,
      .out_stride = out.stride(0),
      .num_rows = num_rows,
      .in_features = check.size("in_features"),
      .num_features = num_features,
      .epsilon = checked_epsilon("skinny_linear", epsilon),
      .gated = gated,
      .dtype = dtype,
  };
  if (is_cpu(input)) {
    PAGEDINFER_CPU_KERNEL(skinny_linear_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(input);
  check_cuda("skinny_linear", launch_skinny_linear(params, context.stream()));
#endif
}

}  // namespace pagedinfer
