// Host memory that a GPU reads and writes by itself.
#pragma once

#ifdef PAGEDINFER_WITH_CUDA

#include <torch/csrc/stable/tensor.h>

namespace pagedinfer {

// A ValueError in Python unless the device can reach all of the tensor, be it in its own memory or
// in pinned memory. Transfers from and to other CPU memory would go through a buffer of the
// driver's, at a fraction of the rate and with the host waiting; kernels cannot reach it at all.
void check_pinned(const char* op, const char* name, const torch::stable::Tensor& tensor);

}  // namespace pagedinfer

#endif  // PAGEDINFER_WITH_CUDA
