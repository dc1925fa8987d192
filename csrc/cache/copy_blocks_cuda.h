#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "cache/copy_order.h"

namespace pagedinfer {

// Carries out a plan on blocks of `block_bytes` that lie one after the other from `cache` on: a
// launch per batch, the ids in its parameters.
cudaError_t launch_copy_blocks(void* cache, int64_t block_bytes, const CopyPlan& plan,
                               cudaStream_t stream);

}  // namespace pagedinfer

#endif
