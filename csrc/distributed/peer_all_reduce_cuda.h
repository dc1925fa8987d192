#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "distributed/peer_all_reduce.h"
#include "layers/rms_norm.h"

namespace pagedinfer {

// Both wait on the device until all ranks have launched theirs.
cudaError_t launch_peer_all_reduce(const PeerAllReduceParams& params, cudaStream_t stream);
// `norm` is of the same data, with a residual; everything lies densely.
cudaError_t launch_peer_all_reduce_norm(const PeerAllReduceParams& params,
                                        const RmsNormParams& norm, cudaStream_t stream);
// The same for few rows of vectors; cudaErrorNotSupported, and nothing is done: they are too many,
// too long, or the kernel was compiled for an architecture without clusters.
cudaError_t launch_peer_all_reduce_norm_few(const PeerAllReduceParams& params,
                                            const RmsNormParams& norm, cudaStream_t stream);

}  // namespace pagedinfer

#endif
