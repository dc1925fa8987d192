#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "runner/decode_inputs.h"

namespace pagedinfer {

// Slots and lengths out of range are not looked for.
cudaError_t launch_decode_inputs(const DecodeInputsParams& params, cudaStream_t stream);
cudaError_t launch_keep_tokens(const KeepTokensParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
