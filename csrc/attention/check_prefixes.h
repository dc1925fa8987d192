// The shared prefixes of attention_plan and paged_attention, from the tensors that Python gives.
#pragma once

#include <optional>

#include "attention/shared_prefixes.h"
#include "common/check.h"

namespace pagedinfer {

// None of the two tensors: no groups.
inline SharedPrefixes checked_shared_prefixes(ArgumentChecker& check, const char* op,
                                              const std::optional<Tensor>& start,
                                              const std::optional<Tensor>& lens,
                                              int64_t max_query_len, int64_t sliding_window) {
  PAGEDINFER_CHECK(start.has_value() == lens.has_value(), op,
                   ": prefix_start and prefix_lens must come together");
  if (!start) return {};
  check.shape("prefix_lens", *lens, {"num_groups"});
  check.shape("prefix_start", *start, {"num_groups + 1"});
  const int64_t num_groups = check.size("num_groups");
  PAGEDINFER_CHECK(check.size("num_groups + 1") == num_groups + 1, op, ": prefix_start has shape ",
                   shape_of(*start), "; expected [num_groups + 1=", num_groups + 1, "]");
  for (const auto& [name, tensor] : {std::pair{"prefix_start", &*start}, {"prefix_lens", &*lens}}) {
    check.dtype(name, *tensor, ScalarType::Int);
    check.same_device(name, *tensor);
    check.contiguous(name, *tensor);
  }
  PAGEDINFER_CHECK(max_query_len == 1, op, ": max_query_len is ", max_query_len,
                   "; shared prefixes are for steps of decodes alone, with max_query_len=1");
  PAGEDINFER_CHECK(sliding_window == 0, op, ": sliding_window is ", sliding_window,
                   "; a shared prefix cannot be read through a window");
  return {.start = static_cast<const int32_t*>(start->const_data_ptr()),
          .lens = static_cast<const int32_t*>(lens->const_data_ptr()),
          .num_groups = num_groups};
}

}  // namespace pagedinfer
