// What launches need to know of the current device, asked for once and kept: every op of every
// layer wants it, also while a graph is captured.
#pragma once

#include <cuda_runtime_api.h>

namespace pagedinfer {

struct DeviceLimits {
  int num_sms;
  int compute_capability;  // 90: 9.0
  // Bytes of shared memory: of a multiprocessor, of one block at most, and what the system takes of
  // each block's share.
  int shared_per_sm, shared_per_block, shared_reserved;
};

cudaError_t device_limits(DeviceLimits* limits);

}  // namespace pagedinfer
