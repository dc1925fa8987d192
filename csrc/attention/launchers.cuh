// The kernels that paged_attention chooses from, one launcher each.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/kernel_params.cuh"
#include "common/device_limits.h"

namespace pagedinfer::attention {

// Decode sequences, and zeros for rows without one: fp16 and bf16.
cudaError_t launch_decode(const KernelParams& p, cudaStream_t stream);
// Prefill tiles: fp16 and bf16, tensor cores through mma.sync.
cudaError_t launch_prefill_mma(const KernelParams& p, cudaStream_t stream);
// The same through wgmma, where prefill_wgmma_serves.
bool prefill_wgmma_serves(const KernelParams& p, const DeviceLimits& limits);
cudaError_t launch_prefill_wgmma(const KernelParams& p, cudaStream_t stream);
// The partial results of shared prefixes: fp16 and bf16, tensor cores through mma.sync.
cudaError_t launch_shared_prefixes(const KernelParams& p, cudaStream_t stream);
// The first two for fp32: plain fused multiply-adds.
cudaError_t launch_decode_fp32(const KernelParams& p, cudaStream_t stream);
cudaError_t launch_prefill_fp32(const KernelParams& p, cudaStream_t stream);

}  // namespace pagedinfer::attention
