// Where a row lies, on the GPU.
#pragma once

#include <cstdint>

#include "layers/rows.h"

namespace pagedinfer {

// A grid holds no more blocks, and row numbers fit in 32 bits: a division of 64 bits in every
// thread costs more than the kernels' arithmetic.
constexpr int64_t kMaxGridRows = 0x7fffffff;

struct RowPlace {
  unsigned group, row;

  template <typename T>
  __device__ __forceinline__ T* in(T* base, const RowStrides& strides) const {
    return base + group * strides.group + row * strides.row;
  }
};

// Of row r, of `inner` rows to a group; rows of one group alone, the usual case, need no division.
__device__ __forceinline__ RowPlace place_of(unsigned r, unsigned inner) {
  const unsigned group = r < inner ? 0 : r / inner;
  return {group, r - group * inner};
}

}  // namespace pagedinfer
