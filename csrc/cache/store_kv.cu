// store_kv on the GPU: see store_kv.h for the maths and the tensors.
//
// Grid: one block of threads per token; its threads walk the rows of the token's K heads, then
// those of its V heads, a vector at a time. A thread loads its first vector before it knows the
// slot, so that the two loads wait together. Shared memory: none. Invariant: slot -1 is padding and
// writes nothing. Template parameter: V, the widest type that all rows start and end at multiples
// of.
#include "cache/store_kv_cuda.h"
#include "cache/vector_types.cuh"
#include "common/dependent_launch.cuh"
#include "common/vector_width.h"

namespace pagedinfer {

namespace {

constexpr int kMaxThreads = 512;

template <typename V>
__global__ void __launch_bounds__(kMaxThreads)
    store_kv_kernel(const __grid_constant__ StoreKvParams p, int element) {
  const int64_t token = blockIdx.x;
  const int vectors_per_row = static_cast<int>(p.head_dim * element / sizeof(V));
  const int num_heads = static_cast<int>(p.num_kv_heads);
  const int vectors = 2 * num_heads * vectors_per_row;
  const char* key = static_cast<const char*>(p.key) + token * p.key_stride_token * element;
  const char* value = static_cast<const char*>(p.value) + token * p.value_stride_token * element;

  // Vector i of the token: K's heads, then V's.
  const auto load = [&](int i) {
    const int head = i / vectors_per_row, offset = i % vectors_per_row;
    const char* row = head < num_heads ? key + head * p.key_stride_head * element
                                       : value + (head - num_heads) * p.value_stride_head * element;
    return reinterpret_cast<const V*>(row)[offset];
  };
  begin_dependent();
  int i = threadIdx.x;
  V vector{};
  if (i < vectors) vector = load(i);

  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / p.block_size, row_in_block = slot % p.block_size;
  // K and V of a block lie one after the other, so head h of V is head num_kv_heads + h of the
  // block.
  const int64_t head_vectors = p.block_size * vectors_per_row;
  V* cache = reinterpret_cast<V*>(static_cast<char*>(p.kv_cache) +
                                  block * p.cache_stride_block * element) +
             row_in_block * vectors_per_row;
  while (i < vectors) {
    cache[i / vectors_per_row * head_vectors + i % vectors_per_row] = vector;
    i += blockDim.x;
    if (i < vectors) vector = load(i);
  }
}

}  // namespace

cudaError_t launch_store_kv(const StoreKvParams& p, cudaStream_t stream) {
  const int64_t element = size_of(p.dtype);
  const int64_t width = vector_width(
      {address_of(p.key), address_of(p.value), address_of(p.kv_cache), p.key_stride_token * element,
       p.key_stride_head * element, p.value_stride_token * element, p.value_stride_head * element,
       p.cache_stride_block * element, p.head_dim * element});
  return with_vector_type(width, [&]<typename V>() {
    const int64_t vectors = 2 * p.num_kv_heads * p.head_dim * element / width;
    const int64_t threads = vectors < kMaxThreads ? (vectors + 31) / 32 * 32 : kMaxThreads;
    return launch_dependent(store_kv_kernel<V>, static_cast<unsigned>(p.num_tokens),
                            static_cast<unsigned>(threads), 0, stream, p,
                            static_cast<int>(element));
  });
}

}  // namespace pagedinfer
