// What the ops of the cache check alike: slots, and mappings of blocks.
#pragma once

#include <vector>

#include "cache/block_mapping.h"
#include "common/check.h"

namespace pagedinfer {

// Throws std::invalid_argument unless slot_mapping[t] is -1 (padding) or a slot below num_slots.
// For slot mappings in CPU memory.
void check_slot(const char* op, const int64_t* slot_mapping, int64_t t, int64_t num_slots);

// The pairs of an int64 [n, 2] mapping in CPU memory, as they stand. Throws std::invalid_argument
// for another tensor, and, naming the pair, for a source outside [0, num_sources), a destination
// outside [0, num_destinations), or a destination that an earlier pair has.
std::vector<BlockCopy> checked_mapping(const char* op, const Tensor& mapping, int64_t num_sources,
                                       int64_t num_destinations);

}  // namespace pagedinfer
