// store_kv on the GPU: see store_kv.h for the maths and the tensors.
//
// Grid: one block of threads per token; its threads walk the token's num_kv_heads * head_dim elements
// of K, then those of V, 16 bytes at a time, so that both sides are read and written in whole rows.
// Shared memory: none. Invariant: slot -1 is padding and writes nothing.
#include "cache/store_kv_cuda.h"

namespace pagedinfer {

namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int kMaxThreads = 256;

__global__ void store_kv_kernel(const __grid_constant__ StoreKvParams p, int64_t element) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;

  const int64_t vectors_a_row = p.head_dim * element / kVectorBytes;
  const int64_t vectors = p.num_kv_heads * vectors_a_row;
  const auto* key = static_cast<const char*>(p.key) + token * p.key_stride_token * element;
  const auto* value = static_cast<const char*>(p.value) + token * p.value_stride_token * element;
  char* block = static_cast<char*>(p.kv_cache) + slot / p.block_size * p.cache_stride_block * element;
  const int64_t head_bytes = p.block_size * p.head_dim * element;
  const int64_t row = slot % p.block_size * p.head_dim * element;

  for (int64_t i = threadIdx.x; i < 2 * vectors; i += blockDim.x) {
    const bool is_value = i >= vectors;
    const int64_t j = is_value ? i - vectors : i;
    const int64_t head = j / vectors_a_row;
    const int64_t offset = j % vectors_a_row * kVectorBytes;
    const char* from = is_value ? value + head * p.value_stride_head * element
                                : key + head * p.key_stride_head * element;
    char* to = block + (is_value ? p.num_kv_heads + head : head) * head_bytes + row;
    *reinterpret_cast<uint4*>(to + offset) = *reinterpret_cast<const uint4*>(from + offset);
  }
}

}  // namespace

cudaError_t launch_store_kv(const StoreKvParams& params, cudaStream_t stream) {
  const int64_t element = size_of(params.dtype);
  const int64_t vectors = 2 * params.num_kv_heads * params.head_dim * element / kVectorBytes;
  const int threads = vectors < kMaxThreads ? static_cast<int>((vectors + 31) / 32 * 32) : kMaxThreads;
  store_kv_kernel<<<static_cast<unsigned>(params.num_tokens), threads, 0, stream>>>(params, element);
  return cudaGetLastError();
}

}  // namespace pagedinfer
