#include "cache/block_mapping.h"

#include <algorithm>
#include <unordered_map>

#include "common/check.h"

namespace pagedinfer {

std::vector<BlockCopy> checked_mapping(const char* op, const int64_t* mapping, int64_t count,
                                       int64_t num_sources, int64_t num_destinations) {
  std::vector<BlockCopy> copies;
  copies.reserve(count);
  std::unordered_map<int64_t, int64_t> pair_of;  // destination -> index of the pair that names it
  pair_of.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const BlockCopy copy{.source = mapping[2 * i], .destination = mapping[2 * i + 1]};
    PAGEDINFER_CHECK(copy.source >= 0 && copy.source < num_sources && copy.destination >= 0 &&
                         copy.destination < num_destinations,
                     op, ": mapping[", i, "] is (", copy.source, ", ", copy.destination,
                     "); expected a source in [0, ", num_sources, ") and a destination in [0, ",
                     num_destinations, ")");
    const auto [earlier, is_new] = pair_of.emplace(copy.destination, i);
    PAGEDINFER_CHECK(is_new, op, ": mapping[", i, "] is (", copy.source, ", ", copy.destination,
                     ") and mapping[", earlier->second, "] is (", mapping[2 * earlier->second],
                     ", ", copy.destination, "); expected each destination once");
    copies.push_back(copy);
  }
  return copies;
}

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
