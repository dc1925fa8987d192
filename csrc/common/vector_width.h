// How many bytes a GPU thread may load at once: host code, for launchers.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace pagedinfer {

// The largest of 16, 8, 4, 2 and 1 that divides every one of `bytes`: addresses, strides, row
// lengths.
inline int64_t vector_width(std::initializer_list<int64_t> bytes) {
  int64_t all = 16;
  for (int64_t value : bytes) all |= value;
  return all & -all;  // the lowest bit that is set in any of them
}

inline int64_t address_of(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

}  // namespace pagedinfer
