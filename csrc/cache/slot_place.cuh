// Where a slot lies in a paged cache, on the GPU.
#pragma once

#include <cstdint>

namespace pagedinfer {

struct SlotPlace {
  int64_t block, row;  // the row in that block
};

// log2_block_size: log2_or_none(block_size). A division of 64 bits takes longer than all else that
// a thread does which stores a vector.
__device__ __forceinline__ SlotPlace place_of_slot(int64_t slot, int64_t block_size,
                                                   int log2_block_size) {
  const int64_t block = log2_block_size >= 0 ? slot >> log2_block_size : slot / block_size;
  return {block, slot - block * block_size};
}

// -1 unless `n` is a power of two.
inline int log2_or_none(int64_t n) {
  int log2 = 0;
  while (int64_t{1} << log2 < n) ++log2;
  return int64_t{1} << log2 == n ? log2 : -1;
}

}  // namespace pagedinfer
