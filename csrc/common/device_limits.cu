#include "common/device_limits.h"

#include <atomic>

namespace pagedinfer {

cudaError_t device_limits(DeviceLimits* limits) {
  constexpr int kMaxDevices = 64;
  static DeviceLimits known[kMaxDevices];
  static std::atomic<bool> is_known[kMaxDevices];

  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kMaxDevices && is_known[device].load(std::memory_order_acquire)) {
    *limits = known[device];
    return cudaSuccess;
  }
  auto ask = [&](int* value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, device);
  };
  int major = 0, minor = 0;
  ask(&major, cudaDevAttrComputeCapabilityMajor);
  ask(&minor, cudaDevAttrComputeCapabilityMinor);
  limits->compute_capability = major * 10 + minor;
  ask(&limits->num_sms, cudaDevAttrMultiProcessorCount);
  ask(&limits->shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(&limits->shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ask(&limits->shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  if (status != cudaSuccess) return status;
  // Two threads that come here at once write the same values.
  if (device < kMaxDevices) {
    known[device] = *limits;
    is_known[device].store(true, std::memory_order_release);
  }
  return cudaSuccess;
}

}  // namespace pagedinfer
