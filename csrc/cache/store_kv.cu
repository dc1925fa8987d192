// store_kv on the GPU: see store_kv.h for the maths and the tensors.
//
// Grid: one block of threads for kTokens tokens; its threads walk the rows of the tokens' K heads,
// then those of their V heads, a vector of each token at a time. A thread loads its first vectors
// before it knows the slots, so that all these loads wait together. Shared memory: none.
// Invariant: slot -1 is padding and writes nothing. Template parameters: V, the widest type that
// all rows start and end at multiples of; kTokens.
#include "cache/slot_place.cuh"
#include "cache/store_kv_cuda.h"
#include "cache/vector_types.cuh"
#include "common/dependent_launch.cuh"
#include "common/vector_width.h"

namespace pagedinfer {

namespace {

constexpr int kMaxThreads = 512;
// From so many on, tokens alone fill the chip, and two at a time have more in flight.
constexpr int64_t kManyTokens = 1024;

template <typename V, int kTokens>
__global__ void __launch_bounds__(kMaxThreads)
    store_kv_kernel(const __grid_constant__ StoreKvParams p, int element, int log2_block_size) {
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int vectors_per_row = static_cast<int>(p.head_dim * element / sizeof(V));
  const int num_heads = static_cast<int>(p.num_kv_heads);
  const int vectors = 2 * num_heads * vectors_per_row;
  // K and V of a block lie one after the other, so head h of V is head num_kv_heads + h of the
  // block.
  const int64_t head_vectors = p.block_size * vectors_per_row;
  const auto is_token = [&](int t) { return kTokens == 1 || first_token + t < p.num_tokens; };

  // Vector i of a token: K's heads, then V's.
  const auto load = [&](int t, int i) {
    const int64_t token = first_token + t;
    const int head = i / vectors_per_row, offset = i % vectors_per_row;
    const bool is_key = head < num_heads;
    const int64_t place =
        is_key ? token * p.key_stride_token + head * p.key_stride_head
               : token * p.value_stride_token + (head - num_heads) * p.value_stride_head;
    const void* base = is_key ? p.key : p.value;
    return reinterpret_cast<const V*>(static_cast<const char*>(base) + place * element)[offset];
  };
  begin_dependent();
  int i = threadIdx.x;
  V loaded[kTokens]{};
  int64_t slots[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (is_token(t) && i < vectors) loaded[t] = load(t, i);
    slots[t] = is_token(t) ? p.slot_mapping[first_token + t] : -1;
  }

  V* rows[kTokens];  // of head 0
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const auto [block, row] = place_of_slot(slots[t], p.block_size, log2_block_size);
    rows[t] = reinterpret_cast<V*>(static_cast<char*>(p.kv_cache) +
                                   block * p.cache_stride_block * element) +
              row * vectors_per_row;
  }
  while (i < vectors) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (slots[t] >= 0) {
        rows[t][i / vectors_per_row * head_vectors + i % vectors_per_row] = loaded[t];
      }
    }
    i += blockDim.x;
    if (i >= vectors) break;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (is_token(t)) loaded[t] = load(t, i);
    }
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
    const bool many = p.num_tokens >= kManyTokens;
    return launch_dependent(many ? store_kv_kernel<V, 2> : store_kv_kernel<V, 1>,
                            static_cast<unsigned>(many ? (p.num_tokens + 1) / 2 : p.num_tokens),
                            static_cast<unsigned>(threads), 0, stream, p, static_cast<int>(element),
                            log2_or_none(p.block_size));
  });
}

}  // namespace pagedinfer
