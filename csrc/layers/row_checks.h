// Checks of the layer ops' tensors [..., width], and their strides as rows.
#pragma once

#include <optional>

#include "common/check.h"
#include "layers/rows.h"

namespace pagedinfer {

// The dimensions before the last: their product, and how many rows make a group.
struct RowCounts {
  int64_t rows, inner;
};
RowCounts row_counts(const Tensor& tensor);

// The last dimension of `tensor` is contiguous, and the dimensions before the last two have one
// stride.
RowStrides row_strides(const char* op, const char* name, const Tensor& tensor);

void check_same_shape(const char* op, const char* name, const Tensor& tensor, const char* like_name,
                      const Tensor& like);

// What norms take: input [..., hidden], weight [hidden] and contiguous, out shaped as input, as is
// what may be added before or after; of one dtype, which is returned, and on one device. `check`
// knows "hidden" afterwards.
DType check_norm(const char* op, ArgumentChecker& check, const Tensor& input, const Tensor& weight,
                 const Tensor& out, const char* added_name, const std::optional<Tensor>& added);

}  // namespace pagedinfer
