#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "attention/attention_plan.h"

namespace pagedinfer {

// Buffer lengths for the current device. Called by every paged_attention, also while a graph is
// captured: cheap, and no call that capture forbids. They do not shrink when num_tokens, num_seqs
// or max_query_len grow.
cudaError_t attention_plan_sizes_cuda(const AttentionPlanShape& shape, AttentionPlanSizes* sizes);

cudaError_t launch_attention_plan(const AttentionPlanParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
