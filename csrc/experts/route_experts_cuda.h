#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "experts/route_experts.h"

namespace pagedinfer {

cudaError_t launch_route_experts(const RouteExpertsParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
