// Mappings of blocks: what copy_blocks and swap_blocks are asked to do. Plain C++, on the host.
#pragma once

#include <cstdint>
#include <vector>

namespace pagedinfer {

struct BlockCopy {
  int64_t source, destination;
};

// `length` neighbouring blocks from `source` on to as many from `destination` on.
struct BlockRun {
  int64_t source, destination, length;
};

// The pairs of an int64 [count, 2] mapping, as they stand. Throws std::invalid_argument, naming the
// pair, for a source outside [0, num_sources), a destination outside [0, num_destinations), or a
// destination that an earlier pair has.
std::vector<BlockCopy> checked_mapping(const char* op, const int64_t* mapping, int64_t count,
                                       int64_t num_sources, int64_t num_destinations);

// The same copies in as few runs as possible. For copies whose order does not matter: no block is
// both a source and a destination.
std::vector<BlockRun> merged_runs(std::vector<BlockCopy> copies);

}  // namespace pagedinfer
