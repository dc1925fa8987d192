// hold_while: a stream goes on when flag is 0, or when `microseconds` have passed.
//
// Work on another stream that should have the GPU to itself sets the flag when it begins, and
// clears it at its end. Right results never depend on it: it is a matter of who goes first.
#pragma once

#include <cstdint>

namespace pagedinfer {

struct HoldWhileParams {
  const int32_t* flag;  // [1]
  int64_t nanoseconds;  // the most that it waits
};

}  // namespace pagedinfer
