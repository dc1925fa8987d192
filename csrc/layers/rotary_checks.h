// Checks that the ops with a rotation share.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"

namespace pagedinfer {

// positions[i] has a row in cos_sin_cache. For positions in CPU memory.
inline void check_position(const char* op, const int64_t* positions, int64_t i,
                           int64_t max_position) {
  PAGEDINFER_CHECK(positions[i] >= 0 && positions[i] < max_position, op, ": positions[", i, "] is ",
                   positions[i], "; expected one in [0, ", max_position,
                   "), the rows of cos_sin_cache");
}

// The weight of a norm over each head, if there is one: [head_dim].
inline void check_head_norm(ArgumentChecker& check, const char* name,
                            const std::optional<Tensor>& weight) {
  if (!weight) return;
  check.shape(name, *weight, {"head_dim"});
  check.float_dtype(name, *weight);
  check.same_device(name, *weight);
  check.contiguous(name, *weight);
}

}  // namespace pagedinfer
