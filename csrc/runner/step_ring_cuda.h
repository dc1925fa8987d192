#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "runner/step_ring.h"

namespace pagedinfer {

cudaError_t launch_read_ring(const ReadRingParams& params, cudaStream_t stream);
cudaError_t launch_write_ring(const WriteRingParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
