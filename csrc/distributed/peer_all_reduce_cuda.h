#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "distributed/peer_all_reduce.h"

namespace pagedinfer {

// Waits on the device until all ranks have launched theirs.
cudaError_t launch_peer_all_reduce(const PeerAllReduceParams& params, cudaStream_t stream);

}  // namespace pagedinfer

#endif
