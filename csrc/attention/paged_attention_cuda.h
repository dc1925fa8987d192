#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "attention/paged_attention.h"

namespace pagedinfer {

// Rows start at multiples of 16 bytes; num_tokens > 0. Block ids and lengths are not checked.
// Writes every row of `out`.
cudaError_t launch_paged_attention(const PagedAttentionParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
