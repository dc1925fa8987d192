#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "experts/sum_experts.h"

namespace pagedinfer {

cudaError_t launch_sum_experts(const SumExpertsParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
