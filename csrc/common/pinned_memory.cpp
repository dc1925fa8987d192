#include "common/pinned_memory.h"

#ifdef PAGEDINFER_WITH_CUDA

#include <cuda_runtime_api.h>

#include "common/check.h"

namespace pagedinfer {

namespace {

// Of the `bytes` from `memory` on, in host memory.
bool is_pinned(const void* memory, int64_t bytes) {
  const auto* begin = static_cast<const char*>(memory);
  for (const char* address : {begin, begin + bytes - 1}) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
      cudaGetLastError();  // so that it does not turn up at the next launch
      return false;
    }
    if (attributes.type == cudaMemoryTypeUnregistered) return false;
  }
  return true;
}

}  // namespace

void check_pinned(const char* op, const char* name, const Tensor& tensor) {
  const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  PAGEDINFER_CHECK(!is_cpu(tensor) || is_pinned(tensor.const_data_ptr(), bytes), op, ": ", name,
                   " is CPU memory that is not pinned; expected pinned memory beside a GPU "
                   "(torch.empty(..., pin_memory=True) or tensor.pin_memory())");
}

}  // namespace pagedinfer

#endif  // PAGEDINFER_WITH_CUDA
