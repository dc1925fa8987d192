// Tensors [..., width] seen as rows, with two free strides.
#pragma once

#include <cstdint>

namespace pagedinfer {

// Row r, of `inner` rows to a group, begins at element (r / inner) * group + (r % inner) * row. Two
// strides take what one cannot: the heads of a query that is a split view of a fused QKV.
struct RowStrides {
  int64_t group, row;
};

}  // namespace pagedinfer
