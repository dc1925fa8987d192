#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "sampler/change_logits.h"

namespace pagedinfer {

cudaError_t launch_change_logits(const ChangeLogitsParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
