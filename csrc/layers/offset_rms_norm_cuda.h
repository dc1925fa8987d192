#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "layers/offset_rms_norm.h"

namespace pagedinfer {

cudaError_t launch_offset_rms_norm(const OffsetRmsNormParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
