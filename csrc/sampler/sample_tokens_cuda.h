#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "sampler/sample_tokens.h"

namespace pagedinfer {

// A slot outside [0, num_slots) is treated as padding.
cudaError_t launch_sample_tokens(const SampleTokensParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
