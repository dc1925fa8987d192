#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "layers/silu_and_mul.h"

namespace pagedinfer {

cudaError_t launch_silu_and_mul(const SiluAndMulParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
