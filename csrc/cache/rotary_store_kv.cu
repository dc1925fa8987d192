// rotary_store_kv on the GPU: see rotary_store_kv.h for the maths and the tensors.
//
// Grid: one block of threads per token. A head is a group of `lanes` neighbouring threads, a power
// of two up to a warp; the groups walk the token's query heads, then its key heads, then its value
// heads, kHeads at a time. A thread holds kUnits units of each, at the same place in all its heads,
// so that it loads angles once. A unit is two vectors: pairs that are rotated together or, past
// rotary_dim, two neighbours that are not (the last of them may be missing). All loads of a
// thread's heads are issued before anything is waited for. Shared memory: none. The launch is
// dependent (dependent_launch.cuh). Invariants: slot -1 stores nothing; a position outside the
// table rotates nothing. Template parameters: T, the element type; kVec, elements of a vector: as
// many as 16 bytes hold, or one where rows do not start at such multiples; kUnits; kHeads;
// kInterleaved, which elements are a pair; kNormed, whether query or key has a norm; kExact, that
// every thread has kHeads heads and rotates all it holds of them, and that blocks hold a power of
// two of tokens: without the questions there are fewer registers and more threads at once.
#include "cache/rotary_store_kv_cuda.h"
#include "cache/slot_place.cuh"
#include "common/dependent_launch.cuh"
#include "layers/elements.cuh"
#include "layers/row_math.cuh"

namespace pagedinfer {

namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;
// From so many on, tokens alone fill the chip, and a thread does better to take two heads.
constexpr int64_t kManyTokens = 1024;

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

// Blocks of kMaxThreads that must fit a multiprocessor; 0: whatever the registers allow. Two heads
// with a norm would take 94 registers instead of 64, and more tokens at once are worth more.
template <int kHeads, bool kNormed, bool kExact>
constexpr int kLeastBlocks = kNormed && kExact && kHeads > 1 ? 2 : 0;

template <typename T, int kVec, int kUnits, int kHeads, bool kInterleaved, bool kNormed,
          bool kExact>
__global__ void __launch_bounds__(kMaxThreads, (kLeastBlocks<kHeads, kNormed, kExact>))
    rotary_store_kv_kernel(const __grid_constant__ RotaryStoreKvParams p, int log2_lanes,
                           int log2_block_size) {
  if constexpr (kExact) __builtin_assume(log2_block_size >= 0);
  const int64_t token = blockIdx.x;
  const int head_dim = static_cast<int>(p.head_dim), half = static_cast<int>(p.rotary_dim / 2);
  const int num_heads = static_cast<int>(p.num_heads);
  const int num_kv_heads = static_cast<int>(p.num_kv_heads);
  const int all_heads = num_heads + 2 * num_kv_heads;
  const int lanes = 1 << log2_lanes;
  const int lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> log2_lanes;
  const int num_groups = blockDim.x >> log2_lanes;
  T* query = static_cast<T*>(p.query) + token * p.query_stride_token;
  const T* key = static_cast<const T*>(p.key) + token * p.key_stride_token;
  const T* value = static_cast<const T*>(p.value) + token * p.value_stride_token;
  Unit units[kUnits];
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
    const int u = lane + j * lanes;
    units[j] =
        kExact ? Unit{u * kVec, u * kVec + half, true} : unit_of<kVec, kInterleaved>(u, half);
  }

  const auto has_head = [&](int head) { return kExact || head < all_heads; };
  const auto holds = [&](int element) { return kExact || element < head_dim; };
  const auto rotates = [&](int j) { return kExact || units[j].rotated; };

  int64_t position = 0, slot = 0;
  bool in_table = false;
  Angles<kVec> angles[kUnits];
  // Of the norm of one head at a time, if it has one: at each unit's two vectors. They are loaded
  // with the head or, where a thread has several and registers are short, when they are needed.
  Vector<T, kVec> weights[kUnits][2];
  const auto weight_of = [&](int head) {
    return static_cast<const T*>(head < num_heads                  ? p.query_norm_weight
                                 : head < num_heads + num_kv_heads ? p.key_norm_weight
                                                                   : nullptr);
  };
  const auto load_weights = [&](const T* weight) {
    if (weight == nullptr) return;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      if (holds(units[j].first)) weights[j][0] = load_vector<kVec>(weight + units[j].first);
      if (holds(units[j].second)) weights[j][1] = load_vector<kVec>(weight + units[j].second);
    }
  };

  // Every thread of a warp takes part in every round, for the sums of the norm.
  for (int first_head = 0; first_head < all_heads; first_head += num_groups * kHeads) {
    const auto head_of = [&](int h) { return first_head + h * num_groups + group; };
    const T* sources[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = head_of(h), kv_head = head - num_heads;
      sources[h] = head < num_heads ? query + head * p.query_stride_head
                   : kv_head < num_kv_heads
                       ? key + kv_head * p.key_stride_head
                       : value + (kv_head - num_kv_heads) * p.value_stride_head;
    }
    if (first_head == 0) {
      let_successor_start();
      if (p.num_tokens < kManyTokens && threadIdx.x == 0) {
        ask_for_line(p.positions + token);
        ask_for_line(p.slot_mapping + token);
      }
      wait_for_predecessor();
      position = p.positions[token];
      slot = p.slot_mapping[token];
      in_table = position >= 0 && position < p.max_position;
    }
    Vector<T, kVec> a[kHeads][kUnits], b[kHeads][kUnits];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = head_of(h);
      const T* source = sources[h];
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        if (!has_head(head)) continue;
        if (holds(units[j].first)) a[h][j] = load_vector<kVec>(source + units[j].first);
        if (holds(units[j].second)) b[h][j] = load_vector<kVec>(source + units[j].second);
      }
    }
    if constexpr (kNormed && kHeads == 1) load_weights(weight_of(head_of(0)));
    if (first_head == 0) {
      const float* cos = p.cos_sin_cache + (in_table ? position : 0) * p.rotary_dim;
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        const int u = lane + j * lanes;
        if (rotates(j)) angles[j].load(cos + u * kVec, cos + half + u * kVec);
      }
    }

#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = head_of(h);
      const bool is_query = head < num_heads;
      const bool is_key = !is_query && head < num_heads + num_kv_heads;
      const int kv_head = head - num_heads;  // V's heads follow K's, here and in the cache
      const auto stores = [&](int element) { return has_head(head) && holds(element); };

      if constexpr (kNormed) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          if (stores(units[j].first)) sum += sum_of_squares(a[h][j]);
          if (stores(units[j].second)) sum += sum_of_squares(b[h][j]);
        }
        for (int offset = lanes / 2; offset > 0; offset /= 2) {
          sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
        const float factor = rsqrtf(sum / static_cast<float>(head_dim) + p.epsilon);
        const T* weight = weight_of(head);
        if constexpr (kHeads > 1) load_weights(weight);
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          if (weight == nullptr) continue;
          a[h][j] = normalised(a[h][j], factor, weights[j][0]);
          b[h][j] = normalised(b[h][j], factor, weights[j][1]);
        }
      }

      if (!is_query && slot < 0) continue;
      T* destination = query + head * p.query_stride_head;
      if (!is_query) {
        const auto [block, row] = place_of_slot(slot, p.block_size, log2_block_size);
        destination = static_cast<T*>(p.kv_cache) + block * p.cache_stride_block +
                      (kv_head * p.block_size + row) * p.head_dim;
      }
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        if (rotates(j) && in_table && (is_query || is_key)) {
          rotate_pairs<kInterleaved>(a[h][j], b[h][j], angles[j]);
        }
        if (stores(units[j].first)) store_vector(destination + units[j].first, a[h][j]);
        if (stores(units[j].second)) store_vector(destination + units[j].second, b[h][j]);
      }
    }
    if constexpr (kExact) break;
  }
}

template <typename T, int kVec, int kUnits, int kHeads>
cudaError_t launch(const RotaryStoreKvParams& p, int64_t units, cudaStream_t stream) {
  int log2_lanes = 0;
  while ((int64_t{kUnits} << log2_lanes) < units) ++log2_lanes;
  const int log2_block_size = log2_or_none(p.block_size);
  const int64_t heads = p.num_heads + 2 * p.num_kv_heads;
  const int64_t groups = (heads + kHeads - 1) / kHeads;
  const int64_t all_threads = groups << log2_lanes;
  const bool normed = p.query_norm_weight != nullptr || p.key_norm_weight != nullptr;
  const auto launch_as = [&](auto kernel, int64_t threads) {
    return launch_dependent(kernel, static_cast<unsigned>(p.num_tokens),
                            static_cast<unsigned>(threads), 0, stream, p, log2_lanes,
                            log2_block_size);
  };
  if constexpr (kVec > 1) {
    const bool rotates_all = p.rotary_dim == p.head_dim && p.head_dim == 2 * kVec * units &&
                             units == int64_t{kUnits} << log2_lanes;
    const bool whole_groups = groups * kHeads == heads && all_threads <= kMaxThreads &&
                              (!normed || all_threads % kWarp == 0);  // the norm's sums take warps
    if (!p.interleaved && rotates_all && whole_groups && log2_block_size >= 0) {
      return launch_as(normed ? rotary_store_kv_kernel<T, kVec, kUnits, kHeads, false, true, true>
                              : rotary_store_kv_kernel<T, kVec, kUnits, kHeads, false, false, true>,
                       all_threads);
    }
  }
  const int64_t threads =
      all_threads < kMaxThreads ? (all_threads + kWarp - 1) / kWarp * kWarp : kMaxThreads;
  return launch_as(
      p.interleaved ? normed ? rotary_store_kv_kernel<T, kVec, kUnits, kHeads, true, true, false>
                             : rotary_store_kv_kernel<T, kVec, kUnits, kHeads, true, false, false>
      : normed      ? rotary_store_kv_kernel<T, kVec, kUnits, kHeads, false, true, false>
                    : rotary_store_kv_kernel<T, kVec, kUnits, kHeads, false, false, false>,
      threads);
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
    const int64_t units = (p.head_dim / kVec + 1) / 2;
    // Units that a warp's lanes must share for the longest head.
    constexpr int kMaxUnits = kMaxRotaryStoreHeadDim / kVec / 2;
    if constexpr (kMaxUnits > kWarp) {
      return launch<T, kVec, kMaxUnits / kWarp, 1>(p, units, stream);
    } else if (p.num_tokens < kManyTokens) {
      return launch<T, kVec, 1, 1>(p, units, stream);
    } else {
      constexpr int kHeads = sizeof(T) == 2 ? 2 : 1;  // two of float32 take too many registers
      return launch<T, kVec, 1, kHeads>(p, units, stream);
    }
  });
}

}  // namespace pagedinfer
