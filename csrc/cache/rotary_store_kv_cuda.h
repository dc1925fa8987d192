#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "cache/rotary_store_kv.h"

namespace pagedinfer {

// Slots out of range are not looked for.
cudaError_t launch_rotary_store_kv(const RotaryStoreKvParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
