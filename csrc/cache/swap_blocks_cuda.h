#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include <vector>

#include "cache/block_mapping.h"

namespace pagedinfer {

// Copies runs of blocks of `block_bytes`, asynchronously on the stream, each in as few transfers as
// the driver takes. On either side is GPU memory or pinned memory.
cudaError_t enqueue_swap(const char* source, char* destination, int64_t block_bytes,
                         const std::vector<BlockRun>& runs, cudaStream_t stream);

}  // namespace pagedinfer

#endif
