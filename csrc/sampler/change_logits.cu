// change_logits on the GPU: see change_logits.h for the maths and the tensors.
//
// Grid: a block for each 2,048 columns of each row, 256 threads, 8 columns a thread, 256 apart;
// blocks of rows that do not change return at once. A block then does again the few of its columns
// that have a bias. Shared memory: none.
#include "common/element_type.cuh"
#include "sampler/change_logits_cuda.h"
#include "sampler/upcast.h"

namespace pagedinfer {

namespace {

using namespace sampling;

constexpr int kThreads = 256;
constexpr int kColumns = 2048;  // of a block

template <typename T>
__global__ void __launch_bounds__(kThreads)
    change_logits_kernel(const __grid_constant__ ChangeLogitsParams p) {
  const int64_t blocks_a_row = (p.vocab_size + kColumns - 1) / kColumns;
  const int64_t r = blockIdx.x / blocks_a_row;
  const int32_t slot = p.slots[r];
  if (!is_changed(p.kinds, slot, p.num_slots)) return;
  const SlotChanges changes = slot_changes(p, slot);
  const T* x = static_cast<const T*>(p.logits) + r * p.row_stride;
  float* y = p.changed + r * p.changed_stride;
  const int64_t begin = blockIdx.x % blocks_a_row * kColumns;
  const int64_t end = begin + kColumns < p.vocab_size ? begin + kColumns : p.vocab_size;

#pragma unroll
  for (int i = 0; i < kColumns / kThreads; ++i) {
    const int64_t id = begin + i * kThreads + threadIdx.x;
    if (id < end) y[id] = changed_logit(changes, upcast(x[id]), -0.0f, id);
  }
  if ((p.kinds[slot] & kBias) == 0) return;
  __syncthreads();  // the biased columns are written twice, in this order
  for (int64_t i = threadIdx.x; i < p.max_biases; i += kThreads) {
    const int32_t id = p.bias_ids[slot * p.max_biases + i];
    if (id < begin || id >= end) continue;
    y[id] = changed_logit(changes, upcast(x[id]), p.bias[slot * p.max_biases + i], id);
  }
}

}  // namespace

cudaError_t launch_change_logits(const ChangeLogitsParams& params, cudaStream_t stream) {
  const int64_t blocks = params.num_rows * ((params.vocab_size + kColumns - 1) / kColumns);
  const auto grid = static_cast<unsigned>(blocks);
  return with_element_type<Float16, BFloat16>(params.dtype, [&]<typename T>() {
    change_logits_kernel<T><<<grid, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace pagedinfer
