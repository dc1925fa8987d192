#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "layers/skinny_linear.h"

namespace pagedinfer {

// Reads `weight`, `bias` and `norm_weight` before the kernels ahead of it in the stream have ended.
cudaError_t launch_skinny_linear(const SkinnyLinearParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
