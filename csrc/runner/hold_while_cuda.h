#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "runner/hold_while.h"

namespace pagedinfer {

cudaError_t launch_hold_while(const HoldWhileParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
