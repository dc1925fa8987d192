#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "layers/rms_norm.h"

namespace pagedinfer {

cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
