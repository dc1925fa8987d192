#include "cache/block_mapping.h"

#include <algorithm>

namespace pagedinfer {

std::vector<BlockRun> merged_runs(std::vector<BlockCopy> copies) {
  // Neighbours have the same distance from source to destination: sorted by it, runs are
  // consecutive.
  std::sort(copies.begin(), copies.end(), [](const BlockCopy& a, const BlockCopy& b) {
    const int64_t distance_a = a.destination - a.source, distance_b = b.destination - b.source;
    return distance_a != distance_b ? distance_a < distance_b : a.source < b.source;
  });
  std::vector<BlockRun> runs;
  for (const BlockCopy& copy : copies) {
    if (!runs.empty() && copy.source == runs.back().source + runs.back().length &&
        copy.destination == runs.back().destination + runs.back().length) {
      ++runs.back().length;
    } else {
      runs.push_back({.source = copy.source, .destination = copy.destination, .length = 1});
    }
  }
  return runs;
}

}  // namespace pagedinfer
