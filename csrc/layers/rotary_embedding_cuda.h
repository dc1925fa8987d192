#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "layers/rotary_embedding.h"

namespace pagedinfer {

cudaError_t launch_rotary_embedding(const RotaryEmbeddingParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
