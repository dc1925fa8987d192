#include "layers/half_linear.h"

#include <cstdlib>
#include <memory>
#include <new>

#include "common/check.h"
#include "layers/row_checks.h"
#include "ops.h"

namespace pagedinfer {

namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// `count` floats that begin at a multiple of 64 bytes, the widest vector; nothing is in them.
std::unique_ptr<float, Free> scratch(int64_t count) {
  const int64_t bytes = (count * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
  std::unique_ptr<float, Free> memory(static_cast<float*>(std::aligned_alloc(64, bytes)));
  if (memory == nullptr && bytes > 0) throw std::bad_alloc();
  return memory;
}

DType half_dtype(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  PAGEDINFER_CHECK(type == ScalarType::Half || type == ScalarType::BFloat16, "half_linear: ", name,
                   " has dtype ", name_of(type), "; expected float16 or bfloat16");
  return type == ScalarType::Half ? DType::float16 : DType::bfloat16;
}

}  // namespace

void half_linear(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                 Tensor out) {
  const char* op = "half_linear";
  ArgumentChecker check(op);
  check.shape("weight", weight, {"out_features", "in_features"});
  const int64_t num_columns = check.size("out_features"), width = check.size("in_features");
  const int64_t dims = input.dim();
  PAGEDINFER_CHECK(dims >= 1 && input.size(dims - 1) == width, "half_linear: input has shape ",
                   shape_of(input), "; expected [..., in_features=", width, "], as weight has");
  bool matches = out.dim() == dims && out.size(dims - 1) == num_columns;
  for (int64_t i = 0; matches && i + 1 < dims; ++i) matches = out.size(i) == input.size(i);
  PAGEDINFER_CHECK(matches, "half_linear: out has shape ", shape_of(out), "; expected input's, ",
                   shape_of(input), ", with a last dimension of ", num_columns);
  if (bias) check.shape("bias", *bias, {"out_features"});

  const DType dtype = half_dtype(input, "input");
  check.float_dtype("input", input);
  check.float_dtype("weight", weight);
  if (bias) check.float_dtype("bias", *bias);
  check.float_dtype("out", out);
  check.on_cpu("input", input);
  check.on_cpu("weight", weight);
  if (bias) check.on_cpu("bias", *bias);
  check.on_cpu("out", out);
  check.dense_inner("weight", weight, 1);
  if (bias) check.contiguous("bias", *bias);

  const RowCounts counts = row_counts(input);
  HalfLinearParams params{
      .input = input.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .packed = nullptr,
      .input_strides = row_strides(op, "input", input),
      .out_strides = row_strides(op, "out", out),
      .weight_stride = weight.stride(0),
      .num_rows = counts.rows,
      .inner_rows = counts.inner,
      .num_columns = num_columns,
      .width = width,
      .dtype = dtype,
  };
  if (params.num_rows == 0 || num_columns == 0) return;
  const auto packed =
      scratch(PAGEDINFER_CPU_KERNEL(half_linear_packed_size)(params.num_rows, width));
  params.packed = packed.get();
  PAGEDINFER_CPU_KERNEL(half_linear_cpu)(params);
}

bool half_linear_pays(const Tensor& weight) {
  return is_cpu(weight) && !cpu_has_arithmetic(half_dtype(weight, "weight"));
}

}  // namespace pagedinfer
