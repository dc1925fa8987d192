// What a torch-facing .cpp file needs in order to launch on the right device and stream. (.cu files
// get the stream as an argument and never see torch.)
#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

// A CPU build of torch lacks this symbol; weak, so that the library still loads there.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                            void** ret_stream);

namespace pagedinfer {

// Makes the tensor's device current for a scope, and holds torch's current stream there.
class CudaContext {
 public:
  explicit CudaContext(const torch::stable::Tensor& tensor)
      : guard_(tensor.get_device_index()), stream_(current_stream(tensor.get_device_index())) {}

  cudaStream_t stream() const { return stream_; }

 private:
  static cudaStream_t current_stream(int32_t device_index);

  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// Throws std::runtime_error with the op's name, CUDA's message and both CUDA versions unless
// `status` is cudaSuccess. Launchers return the status of their launch; entries check it with this.
void check_cuda(const char* op, cudaError_t status);

}  // namespace pagedinfer

#endif  // PAGEDINFER_WITH_CUDA
