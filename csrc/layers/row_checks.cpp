#include "layers/row_checks.h"

namespace pagedinfer {

RowCounts row_counts(const Tensor& tensor) {
  const int64_t dims = tensor.dim();
  const int64_t inner = dims >= 2 ? tensor.size(dims - 2) : 1;
  int64_t rows = inner;
  for (int64_t i = 0; i + 2 < dims; ++i) rows *= tensor.size(i);
  return {.rows = rows, .inner = inner};
}

RowStrides row_strides(const char* op, const char* name, const Tensor& tensor) {
  const int64_t dims = tensor.dim();
  bool fits = tensor.size(dims - 1) <= 1 || tensor.stride(dims - 1) == 1;
  // The stride of the dimensions before the last two as one, from the innermost of them that
  // counts.
  int64_t group = 0, expected = 0;
  for (int64_t i = dims - 3; i >= 0; --i) {
    if (tensor.size(i) <= 1) continue;
    if (group == 0) {
      group = expected = tensor.stride(i);
    }
    fits = fits && tensor.stride(i) == expected;
    expected *= tensor.size(i);
  }
  std::ostringstream strides;
  for (int64_t i = 0; i < dims; ++i) strides << (i ? ", " : "") << tensor.stride(i);
  PAGEDINFER_CHECK(
      fits, op, ": ", name, " has shape ", shape_of(tensor), " and strides [", strides.str(),
      "]; expected the last dimension contiguous and those before the last two with one "
      "stride (call .contiguous() first)");
  return {.group = group, .row = dims >= 2 ? tensor.stride(dims - 2) : 0};
}

void check_same_shape(const char* op, const char* name, const Tensor& tensor, const char* like_name,
                      const Tensor& like) {
  PAGEDINFER_CHECK(shape_of(tensor) == shape_of(like), op, ": ", name, " has shape ",
                   shape_of(tensor), "; expected ", like_name, "'s ", shape_of(like));
}

DType check_norm(const char* op, ArgumentChecker& check, const Tensor& input, const Tensor& weight,
                 const Tensor& out, const char* added_name, const std::optional<Tensor>& added) {
  check.shape("weight", weight, {"hidden"});
  const int64_t hidden = check.size("hidden");
  PAGEDINFER_CHECK(input.dim() >= 1 && input.size(input.dim() - 1) == hidden, op,
                   ": input has shape ", shape_of(input), "; expected [..., hidden=", hidden,
                   "], weight's size");
  check_same_shape(op, "out", out, "input", input);
  const DType dtype = check.float_dtype("input", input);
  check.float_dtype("weight", weight);
  check.float_dtype("out", out);
  check.same_device("input", input);
  check.same_device("weight", weight);
  check.same_device("out", out);
  check.contiguous("weight", weight);
  if (added) {
    check_same_shape(op, added_name, *added, "input", input);
    check.float_dtype(added_name, *added);
    check.same_device(added_name, *added);
  }
  return dtype;
}

}  // namespace pagedinfer
