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

// The same copies in as few runs as possible. For copies whose order does not matter: no block is
// both a source and a destination.
std::vector<BlockRun> merged_runs(std::vector<BlockCopy> copies);

}  // namespace pagedinfer
