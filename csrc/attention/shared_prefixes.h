// Groups of sequences whose block tables begin with the same blocks: what paged_attention reads
// once for all of a group, instead of once for each member.
//
// Sequences start[g] .. start[g + 1] - 1 are group g; those from start[num_groups] on are in none.
// The first lens[g] keys of each member lie in the blocks that the table of its first member names.
// The members' queries are packed over these keys, as if they were the rows of one long query that
// sees all of them, and the results are folded into those of each member's own keys:
//
//   (m, l, o) of the prefix and of the rest:
//     m' = max(m1, m2)
//     l' = l1 e^(m1 - m') + l2 e^(m2 - m'), o' likewise
//     out = o' / l'
//
// For steps of decodes alone: every sequence has one query token.
#pragma once

#include <cstdint>

namespace pagedinfer {

struct SharedPrefixes {
  const int32_t* start = nullptr;  // [num_groups + 1], ascending from 0
  const int32_t* lens = nullptr;   // [num_groups]: multiples of kPrefixLenMultiple; 0: no group
  int64_t num_groups = 0;          // 0: there are none
};

// A prefix ends where a tile of the decode kernel begins.
constexpr int64_t kPrefixLenMultiple = 64;

}  // namespace pagedinfer
