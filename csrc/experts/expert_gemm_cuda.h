#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "experts/expert_gemm.h"

namespace pagedinfer {

// float16 and bfloat16; widths and columns are multiples of 8; block_rows is 16 or 64.
cudaError_t launch_expert_gemm(const ExpertGemmParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
