#include "cache/cache_checks.h"

#include <unordered_map>

namespace pagedinfer {

void check_slot(const char* op, const int64_t* slot_mapping, int64_t t, int64_t num_slots) {
  const int64_t slot = slot_mapping[t];
  PAGEDINFER_CHECK(slot >= -1 && slot < num_slots, op, ": slot_mapping[", t, "] is ", slot,
                   "; expected -1 (padding) or a slot below ", num_slots);
}

std::vector<BlockCopy> checked_mapping(const char* op, const Tensor& mapping, int64_t num_sources,
                                       int64_t num_destinations) {
  ArgumentChecker check(op);
  check.shape("mapping", mapping, {"n", "2"});
  check.dtype("mapping", mapping, ScalarType::Long);
  check.on_cpu("mapping", mapping);
  check.contiguous("mapping", mapping);
  const auto* pairs = static_cast<const int64_t*>(mapping.const_data_ptr());
  const int64_t count = check.size("n");
  std::vector<BlockCopy> copies;
  copies.reserve(count);
  std::unordered_map<int64_t, int64_t> pair_of;  // destination -> index of the pair that names it
  pair_of.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const BlockCopy copy{.source = pairs[2 * i], .destination = pairs[2 * i + 1]};
    PAGEDINFER_CHECK(copy.source >= 0 && copy.source < num_sources && copy.destination >= 0 &&
                         copy.destination < num_destinations,
                     op, ": mapping[", i, "] is (", copy.source, ", ", copy.destination,
                     "); expected a source in [0, ", num_sources, ") and a destination in [0, ",
                     num_destinations, ")");
    const auto [earlier, is_new] = pair_of.emplace(copy.destination, i);
    PAGEDINFER_CHECK(is_new, op, ": mapping[", i, "] is (", copy.source, ", ", copy.destination,
                     ") and mapping[", earlier->second, "] is (", pairs[2 * earlier->second], ", ",
                     copy.destination, "); expected each destination once");
    copies.push_back(copy);
  }
  return copies;
}

}  // namespace pagedinfer
