#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "layers/decode_linear.h"

namespace pagedinfer {

// Whether the kernel is built for the current device: it is for compute capability 9.0 alone.
bool decode_linear_serves_device();

// How many floats params.workspace has to have room for, 0 if none; looks at no pointer of them.
int64_t decode_linear_workspace_floats(const DecodeLinearParams& params);

// Reads `weight` before the kernels ahead of it in the stream have ended.
cudaError_t launch_decode_linear(const DecodeLinearParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
