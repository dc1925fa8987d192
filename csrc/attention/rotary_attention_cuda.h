#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "attention/rotary_attention.h"

namespace pagedinfer {

// Reads all but query, key, value and the cache's newest tokens before the kernels ahead of it in
// the stream have ended. fp16 or bf16, head_dim 64 or 128, at most 16 query heads to a KV head, all
// rows at multiples of 16 bytes; cudaErrorNotSupported where there are no clusters of blocks.
cudaError_t launch_rotary_attention(const RotaryAttentionParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
