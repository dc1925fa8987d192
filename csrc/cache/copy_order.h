// The order in which blocks of one cache can be copied in place, so that the result is as if all
// sources had been read before any destination was written. Plain C++, on the host.
//
// A block is written at most once, so the copies form chains (which may branch: one source, several
// destinations) and cycles. A chain is copied from its end: a block is written after the copies
// that read it. In a cycle no block can be written first; one of them goes to the scratch block
// before and comes from there in the end.
//
// Copies depend on each other only byte by byte: whoever copies the same bytes of every block of a
// sequence, in order, needs to wait for nobody. That is how the kernels divide the work, and why
// the scratch block is only as large as one worker's bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/block_mapping.h"

namespace pagedinfer {

// The most copies of a batch: as many as one launch takes in its parameters. The CPU follows the
// same plan.
constexpr int64_t kMaxBatchCopies = 400;

// Stands for the scratch block among the ids of a planned copy.
constexpr int64_t kScratchBlock = -1;

// Copies to be done one after the other: those in [begin, end) of the plan's list. What is in the
// scratch block does not outlive a sequence.
struct CopySequence {
  int64_t begin, end;
};

// Sequences that may run side by side: those in [begin, end) of the plan's list. A batch begins
// when the one before is done.
struct CopyBatch {
  int64_t begin, end;
};

struct CopyPlan {
  std::vector<BlockCopy> copies;
  std::vector<CopySequence> sequences;
  std::vector<CopyBatch> batches;
};

// Plans the copies of a checked mapping.
CopyPlan plan_copies(const std::vector<BlockCopy>& mapping);

}  // namespace pagedinfer
