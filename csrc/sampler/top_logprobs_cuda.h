#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "sampler/top_logprobs.h"

namespace pagedinfer {

cudaError_t launch_top_logprobs(const TopLogprobsParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
