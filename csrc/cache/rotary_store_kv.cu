// rotary_store_kv on the GPU: see rotary_store_kv.h for the maths and the tensors.
//
// Grid: one block of threads per token. A head is a group of `lanes` neighbouring threads, a power
// of two up to a warp; the groups walk the token's query heads, then its key heads, then its value
// heads. A thread holds kUnits units of its head. A unit is two vectors: pairs that are rotated
// together or, past rotary_dim, two neighbours that are not (the last of them may be missing). All
// loads of a head are issued before anything is waited for. Shared memory: none. Invariants: slot
// -1 stores nothing; a position outside the table rotates nothing. Template parameters: T, the
// element type; kVec, elements of a vector: as many as 16 bytes hold, or one where rows do not
// start at such multiples; kUnits; kInterleaved, which elements are a pair.
#include "cache/rotary_store_kv_cuda.h"
#include "layers/elements.cuh"
#include "layers/row_math.cuh"

namespace pagedinfer {

namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;

// Where the two vectors of unit u of a head begin, in elements. `second` is head_dim or more if
// there is none.
struct Unit {
  int first, second;
  bool rotated;
};

template <int kVec, bool kInterleaved>
__device__ __forceinline__ Unit unit_of(int u, int half) {
  const int rotated_units = half / kVec;
  if (u >= rotated_units) {
    const int first = 2 * u * kVec;  // past the 2 * half elements of the rotated units
    return {first, first + kVec, false};
  }
  if (kInterleaved) return {2 * u * kVec, (2 * u + 1) * kVec, true};
  return {u * kVec, u * kVec + half, true};
}

template <typename T, int kVec, int kUnits, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads)
    rotary_store_kv_kernel(const __grid_constant__ RotaryStoreKvParams p, int log2_lanes,
                           int log2_block_size) {
  const int64_t token = blockIdx.x;
  const int head_dim = static_cast<int>(p.head_dim), half = static_cast<int>(p.rotary_dim / 2);
  const int num_heads = static_cast<int>(p.num_heads);
  const int num_kv_heads = static_cast<int>(p.num_kv_heads);
  const int all_heads = num_heads + 2 * num_kv_heads;
  const int lanes = 1 << log2_lanes;
  const int lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> log2_lanes;
  const int num_groups = blockDim.x >> log2_lanes;

  const int64_t position = p.positions[token];
  const int64_t slot = p.slot_mapping[token];
  const bool in_table = position >= 0 && position < p.max_position;
  const float* cos = p.cos_sin_cache + (in_table ? position : 0) * p.rotary_dim;
  T* query = static_cast<T*>(p.query) + token * p.query_stride_token;
  const T* key = static_cast<const T*>(p.key) + token * p.key_stride_token;
  const T* value = static_cast<const T*>(p.value) + token * p.value_stride_token;

  // Every thread of a warp takes part in every round, for the sums of the norm.
  for (int round = 0; round < all_heads; round += num_groups) {
    const int head = round + group;
    const bool is_query = head < num_heads;
    const bool is_key = !is_query && head < num_heads + num_kv_heads;
    const int kv_head = head - num_heads;  // V's heads follow K's, here and in the cache
    const T* source = is_query ? query + head * p.query_stride_head
                      : is_key ? key + kv_head * p.key_stride_head
                               : value + (kv_head - num_kv_heads) * p.value_stride_head;
    const T* weight = static_cast<const T*>(is_query ? p.query_norm_weight
                                            : is_key ? p.key_norm_weight
                                                     : nullptr);
    const int length = head < all_heads ? head_dim : 0;

    Vector<T, kVec> a[kUnits], b[kUnits];
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const Unit unit = unit_of<kVec, kInterleaved>(lane + j * lanes, half);
      if (unit.first < length) a[j] = load_vector<kVec>(source + unit.first);
      if (unit.second < length) b[j] = load_vector<kVec>(source + unit.second);
    }

    if (p.query_norm_weight != nullptr || p.key_norm_weight != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        const Unit unit = unit_of<kVec, kInterleaved>(lane + j * lanes, half);
        if (unit.first < length) sum += sum_of_squares(a[j]);
        if (unit.second < length) sum += sum_of_squares(b[j]);
      }
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, offset);
      }
      const float factor = rsqrtf(sum / static_cast<float>(head_dim) + p.epsilon);
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        const Unit unit = unit_of<kVec, kInterleaved>(lane + j * lanes, half);
        if (weight == nullptr) continue;
        if (unit.first < length) {
          a[j] = normalised(a[j], factor, load_vector<kVec>(weight + unit.first));
        }
        if (unit.second < length) {
          b[j] = normalised(b[j], factor, load_vector<kVec>(weight + unit.second));
        }
      }
    }

    if (!is_query && slot < 0) continue;
    T* destination = query + head * p.query_stride_head;
    if (!is_query) {
      const int64_t block = log2_block_size >= 0 ? slot >> log2_block_size : slot / p.block_size;
      const int64_t row = kv_head * p.block_size + (slot - block * p.block_size);
      destination = static_cast<T*>(p.kv_cache) + block * p.cache_stride_block + row * p.head_dim;
    }
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int u = lane + j * lanes;
      const Unit unit = unit_of<kVec, kInterleaved>(u, half);
      if (unit.rotated && in_table && (is_query || is_key) && unit.first < length) {
        rotate_pairs<kInterleaved>(a[j], b[j], cos + u * kVec, cos + half + u * kVec);
      }
      if (unit.first < length) store_vector(destination + unit.first, a[j]);
      if (unit.second < length) store_vector(destination + unit.second, b[j]);
    }
  }
}

// -1 unless `n` is a power of two: then slots are divided the slow way.
int log2_or_none(int64_t n) {
  int log2 = 0;
  while (int64_t{1} << log2 < n) ++log2;
  return int64_t{1} << log2 == n ? log2 : -1;
}

template <typename T, int kVec, int kUnits>
cudaError_t launch(const RotaryStoreKvParams& p, cudaStream_t stream) {
  const int64_t units = (p.head_dim / kVec + 1) / 2;
  int log2_lanes = 0;
  while ((int64_t{kUnits} << log2_lanes) < units) ++log2_lanes;
  const int64_t all_threads = (p.num_heads + 2 * p.num_kv_heads) << log2_lanes;
  const int64_t threads =
      all_threads < kMaxThreads ? (all_threads + kWarp - 1) / kWarp * kWarp : kMaxThreads;
  const auto kernel = p.interleaved ? rotary_store_kv_kernel<T, kVec, kUnits, true>
                                    : rotary_store_kv_kernel<T, kVec, kUnits, false>;
  kernel<<<static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(threads), 0, stream>>>(
      p, log2_lanes, log2_or_none(p.block_size));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_rotary_store_kv(const RotaryStoreKvParams& p, cudaStream_t stream) {
  const int64_t element = size_of(p.dtype);
  const bool vectors = vector_width({address_of(p.query), address_of(p.key), address_of(p.value),
                                     address_of(p.kv_cache), address_of(p.cos_sin_cache),
                                     address_of(p.query_norm_weight), address_of(p.key_norm_weight),
                                     p.query_stride_token * element, p.query_stride_head * element,
                                     p.key_stride_token * element, p.key_stride_head * element,
                                     p.value_stride_token * element, p.value_stride_head * element,
                                     p.cache_stride_block * element, p.head_dim * element,
                                     p.rotary_dim / 2 * element}) == kVectorBytes;
  return with_elements(p.dtype, vectors, [&]<typename T, int kVec>() {
    // Units that a warp's lanes must share for the longest head.
    constexpr int kMaxUnits = kMaxRotaryStoreHeadDim / kVec / 2;
    return launch<T, kVec, kMaxUnits <= kWarp ? 1 : kMaxUnits / kWarp>(p, stream);
  });
}

}  // namespace pagedinfer
