// rotary_embedding on the GPU: see rotary_embedding.h for the maths and the tensors.
//
// Grid: one block per token; its threads walk the token's query heads, then its key heads, kPairs
// pairs of elements at a time. Shared memory: none. Invariant: a position outside the table changes
// nothing. Template parameters: T, the element type; kVec, elements of a vector: as many as 16
// bytes hold, or one where rows do not start at such multiples; kInterleaved, which elements are a
// pair.
#include "common/dependent_launch.cuh"
#include "common/dtype.h"
#include "layers/elements.cuh"
#include "layers/rotary_embedding_cuda.h"
#include "layers/row_math.cuh"

namespace pagedinfer {

namespace {

constexpr int kMaxThreads = 512;

// Rotates pairs [i, i + kVec) of a head: two vectors of kVec elements.
template <typename T, int kVec, bool kInterleaved>
__device__ __forceinline__ void rotate_in_place(T* head, int i, int half, const float* cos,
                                                const float* sin) {
  T* first = kInterleaved ? head + 2 * i : head + i;
  T* second = kInterleaved ? first + kVec : first + half;
  Vector<T, kVec> a = load_vector<kVec>(first), b = load_vector<kVec>(second);
  Angles<kVec> angles;
  angles.load(cos + i, sin + i);
  rotate_pairs<kInterleaved>(a, b, angles);
  store_vector(first, a);
  store_vector(second, b);
}

template <typename T, int kVec, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads)
    rotary_embedding_kernel(const __grid_constant__ RotaryEmbeddingParams p) {
  const int64_t token = blockIdx.x;
  begin_dependent();
  const int64_t position = p.positions[token];
  if (position < 0 || position >= p.max_position) return;
  const int half = static_cast<int>(p.rotary_dim / 2);
  const float* cos = p.cos_sin_cache + position * p.rotary_dim;
  const float* sin = cos + half;
  T* query = static_cast<T*>(p.query) + token * p.query_stride_token;
  T* key = static_cast<T*>(p.key) + token * p.key_stride_token;

  const int units_per_head = half / kVec;
  const int num_heads = static_cast<int>(p.num_heads);
  const int units = (num_heads + static_cast<int>(p.num_kv_heads)) * units_per_head;
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const int head = unit / units_per_head;
    const int i = unit % units_per_head * kVec;
    T* elements = head < num_heads ? query + head * p.query_stride_head
                                   : key + (head - num_heads) * p.key_stride_head;
    rotate_in_place<T, kVec, kInterleaved>(elements, i, half, cos, sin);
  }
}

}  // namespace

cudaError_t launch_rotary_embedding(const RotaryEmbeddingParams& p, cudaStream_t stream) {
  const int64_t element = size_of(p.dtype);
  const bool vectors =
      vector_width({address_of(p.query), address_of(p.key), p.query_stride_token * element,
                    p.query_stride_head * element, p.key_stride_token * element,
                    p.key_stride_head * element, p.rotary_dim / 2 * element,
                    address_of(p.cos_sin_cache)}) == kVectorBytes;
  return with_elements(p.dtype, vectors, [&]<typename T, int kVec>() {
    const int64_t units = (p.num_heads + p.num_kv_heads) * (p.rotary_dim / 2 / kVec);
    const int64_t threads = units < kMaxThreads ? (units + 31) / 32 * 32 : kMaxThreads;
    const auto kernel = p.interleaved ? rotary_embedding_kernel<T, kVec, true>
                                      : rotary_embedding_kernel<T, kVec, false>;
    return launch_dependent(kernel, static_cast<unsigned>(p.num_tokens),
                            static_cast<unsigned>(threads), 0, stream, p);
  });
}

}  // namespace pagedinfer
