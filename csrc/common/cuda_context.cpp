#include "common/cuda_context.h"

#ifdef PAGEDINFER_WITH_CUDA

#include <sstream>
#include <stdexcept>

namespace pagedinfer {

cudaStream_t CudaContext::current_stream(int32_t device_index) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("a CUDA tensor reached pagedinfer under a torch built without CUDA");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_cuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::ostringstream message;
  message << op << ": CUDA error: " << cudaGetErrorString(status) << " ("
          << cudaGetErrorName(status) << "; driver supports CUDA " << driver / 1000 << '.'
          << driver % 1000 / 10 << ", built with " << runtime / 1000 << '.' << runtime % 1000 / 10
          << ')';
  throw std::runtime_error(message.str());
}

}  // namespace pagedinfer

#endif  // PAGEDINFER_WITH_CUDA
