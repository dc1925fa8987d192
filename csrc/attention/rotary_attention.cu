// rotary_attention on the GPU (fp16, bf16; sm_90): see rotary_attention.h for the maths and the
// tensors.
//
// Where few sequences decode, the time of an attention is that of a chain of latencies: the plan,
// the block table, K and V, the partial results and their merge, each a trip to memory. Here all
// that the kernel ahead does not write is read before it has ended (dependent_launch.cuh): block
// ids, angles, and the keys and values of earlier tokens. What is left is the newest token's way
// through the norm, the rotation, one or a few steps of 16 keys and the merge.
//
// Grid: a cluster of kCluster blocks for each sequence and KV head. Its warps take 16 tokens in
// turn, bring them in by themselves and keep a softmax of their own (warp_attention.cuh). Every
// block norms and rotates the query heads for itself; the block whose warp has the last 16 tokens
// does so with the key, and stores key and value. At the end each block merges its warps' results,
// and then a part of the output's columns over all blocks, from their shared memory.
//
// Shared memory: each warp's ring of p.stages x (K, V of 16 tokens); Q; (m, l) of each warp and
// row; the block's merged results; the newest key and value.
// Template: T, the element type; HEAD_DIM.
#include <cooperative_groups.h>

#include <bit>

#include "attention/dispatch.h"
#include "attention/rotary_attention_cuda.h"
#include "attention/warp_attention.cuh"
#include "common/dependent_launch.cuh"
#include "common/device_limits.h"
#include "common/warp.cuh"
#include "layers/elements.cuh"
#include "layers/row_math.cuh"

namespace pagedinfer::attention {

namespace {

constexpr int kCluster = 8;
constexpr int kMinStages = 2, kMaxStages = 4;

struct NewestParams {
  RotaryAttentionParams op;
  ScoreScale score;
  int window;  // 0: none
  int group;   // query heads that share a KV head
  int block_shift;
  int stages;
};

template <int HEAD_DIM>
struct NewestShared {
  using Traits = DecodeTraits<HEAD_DIM>;
  static constexpr int kQuery = kDecodeRows * Traits::Rows::kRowBytes;

  alignas(16) char query[kQuery];
  float2 scales[Traits::kWarps][kDecodeRows];
  alignas(16) float sums[kDecodeRows][HEAD_DIM];  // of the block, for the cluster
  float2 merged[kDecodeRows];                     // (m, l) of these
  alignas(16) char fresh[2][HEAD_DIM * 2];        // the newest key and value
};

// `kCount` elements that another kernel has just written.
template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> load_written(const T* from) {
  if constexpr (kCount == 2) {
    const unsigned bits = __ldcg(reinterpret_cast<const unsigned*>(from));
    return reinterpret_cast<const Vector<T, 2>&>(bits);
  } else {
    const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short*>(from));
    return reinterpret_cast<const Vector<T, 1>&>(bits);
  }
}

// What one warp does with a head: a lane holds elements lane * kHalf .. of both halves.
template <typename T, int HEAD_DIM>
struct HeadOfWarp {
  static constexpr int kHalf = HEAD_DIM / 64;
  Vector<T, kHalf> a, b;

  __device__ __forceinline__ static int first() { return threadIdx.x % 32 * kHalf; }

  __device__ __forceinline__ void load(const T* head) {
    a = load_written<kHalf>(head + first());
    b = load_written<kHalf>(head + HEAD_DIM / 2 + first());
  }

  __device__ __forceinline__ void norm(const T* weight, float epsilon) {
    const float sum = warp_sum(sum_of_squares(a) + sum_of_squares(b));
    const float factor = rsqrtf(sum / HEAD_DIM + epsilon);
    a = normalised(a, factor, load_vector<kHalf>(weight + first()));
    b = normalised(b, factor, load_vector<kHalf>(weight + HEAD_DIM / 2 + first()));
  }

  __device__ __forceinline__ void rotate(const Angles<kHalf>& angles) {
    rotate_pairs<false>(a, b, angles);
  }

  // `at(e)`: where element e is to be.
  template <typename At>
  __device__ __forceinline__ void store(const At& at) const {
    store_vector(at(first()), a);
    store_vector(at(HEAD_DIM / 2 + first()), b);
  }
};

template <typename T, int HEAD_DIM>
__global__ __launch_bounds__(DecodeTraits<HEAD_DIM>::kThreads, 2) void rotary_attention_kernel(
    const __grid_constant__ NewestParams p) {
#if __CUDA_ARCH__ >= 900
  using Traits = DecodeTraits<HEAD_DIM>;
  using Rows = typename Traits::Rows;
  using Head = HeadOfWarp<T, HEAD_DIM>;
  constexpr int kWarps = Traits::kWarps;
  constexpr int kFourColumns = HEAD_DIM / 4;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<NewestShared<HEAD_DIM>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  char* ring =
      shared_bytes + sizeof(NewestShared<HEAD_DIM>) + warp * p.stages * Traits::kWarpStageBytes;
  const uint32_t ring_address = shared_address(ring);
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int unit = blockIdx.x / kCluster;
  const int num_kv_heads = static_cast<int>(p.op.num_kv_heads);
  const int seq = unit / num_kv_heads, kv_head = unit - seq * num_kv_heads;

  let_successor_start();
  const int seq_len = p.op.seq_lens[seq];
  const int first_key = p.window > 0 ? larger(0, seq_len - p.window) : 0;
  const int first_tile = first_key / kWarpTokens;
  const int tiles = (seq_len + kWarpTokens - 1) / kWarpTokens - first_tile;
  constexpr int kWalkers = kCluster * kWarps;
  const int own_tile = warp * kCluster + rank;
  const int last_walker = (tiles - 1) % kWalkers;  // has the newest token
  const bool owns_last = tiles > 0 && last_walker % kCluster == rank;

  const int32_t* table = p.op.block_table + seq * p.op.block_table_stride;
  const int64_t head_elements = int64_t{HEAD_DIM} << p.block_shift;
  const char* heads =
      reinterpret_cast<const char*>(static_cast<const T*>(p.op.kv_cache) + kv_head * head_elements);
  const int64_t value_bytes = num_kv_heads * head_elements * static_cast<int64_t>(sizeof(T));
  // Copies 16 earlier tokens; zeros stand for those that are not to be seen, and for the newest.
  const auto issue = [&](int tile, int stage) {
    using Walk = ChunkWalk<32, Rows::kChunks>;
    const int first = (first_tile + tile) * kWarpTokens;
    const auto page_of = [&](int token) {
      token = larger(first_key, smaller(token, seq_len - 1));
      return heads + table[token >> p.block_shift] * p.op.cache_stride_block *
                         static_cast<int64_t>(sizeof(T));
    };
    const char* pages[2] = {page_of(first), page_of(first + 8)};
    const uint32_t to = ring_address + stage * Traits::kWarpStageBytes;
#pragma unroll
    for (int j = 0; j < kWarpTokens * Rows::kChunks / 32; ++j) {
      const int row = Walk::row(lane, j), chunk = Walk::chunk(lane, j);
      const int token = first + row;
      const bool valid = token >= first_key && token < seq_len - 1;
      const char* from =
          pages[row / 8] + (token & ((1 << p.block_shift) - 1)) * (HEAD_DIM * 2) + chunk * 16;
      const uint32_t at = to + Rows::offset(row, chunk);
      copy_async(at, from, valid);
      copy_async(at + Traits::kRowsBytes, from + value_bytes, valid);
    }
  };
  for (int ahead = 0; ahead < p.stages; ++ahead) {
    const int tile = own_tile + ahead * kWalkers;
    if (tile < tiles) issue(tile, ahead);
    commit_copies();
  }
  // Rows of Q without a head are zeros: nobody looks at their scores.
  for (int i = threadIdx.x; i < NewestShared<HEAD_DIM>::kQuery / 16; i += Traits::kThreads) {
    reinterpret_cast<uint4*>(shared.query)[i] = uint4{};
  }
  const int64_t position = p.op.positions[seq], slot = p.op.slot_mapping[seq];
  const bool in_table = position >= 0 && position < p.op.max_position;
  Angles<Head::kHalf> angles;
  const float* cos = p.op.cos_sin_cache + (in_table ? position : 0) * HEAD_DIM + Head::first();
  angles.load(cos, cos + HEAD_DIM / 2);
  __syncthreads();

  wait_for_predecessor();
  // Heads of the group, then the key, then the value, a warp each.
  constexpr int kMostTurns = (kDecodeRows + 2 + kWarps - 1) / kWarps;
  const int heads_here = p.group + (owns_last ? 2 : 0);
#pragma unroll 2
  for (int turn = 0; turn < kMostTurns; ++turn) {
    const int h = turn * kWarps + warp;
    if (h >= heads_here) break;
    const bool is_query = h < p.group, is_key = h == p.group;
    const T* from = is_query ? static_cast<const T*>(p.op.query) + seq * p.op.query_stride_token +
                                   (kv_head * p.group + h) * p.op.query_stride_head
                    : is_key ? static_cast<const T*>(p.op.key) + seq * p.op.key_stride_token +
                                   kv_head * p.op.key_stride_head
                             : static_cast<const T*>(p.op.value) + seq * p.op.value_stride_token +
                                   kv_head * p.op.value_stride_head;
    Head head;
    head.load(from);
    const auto* weight =
        static_cast<const T*>(is_query ? p.op.query_norm_weight : p.op.key_norm_weight);
    if (is_query || is_key) {
      if (weight != nullptr) head.norm(weight, p.op.epsilon);
      if (in_table) head.rotate(angles);
    }
    if (is_query) {
      head.store([&](int e) {
        return reinterpret_cast<T*>(shared.query + Rows::offset(h, e / 8)) + e % 8;
      });
    } else {
      T* fresh = reinterpret_cast<T*>(shared.fresh[is_key ? 0 : 1]);
      head.store([&](int e) { return fresh + e; });
      if (slot >= 0) {
        T* to = static_cast<T*>(p.op.kv_cache) + (slot >> p.block_shift) * p.op.cache_stride_block +
                (is_key ? 0 : num_kv_heads * head_elements) + kv_head * head_elements +
                (slot & ((1 << p.block_shift) - 1)) * HEAD_DIM;
        head.store([&](int e) { return to + e; });
      }
    }
  }
  __syncthreads();

  WarpAttention<T, HEAD_DIM> attention;
  attention.clear();
  attention.start_newest(seq_len, p.window, shared_address(shared.query));
  int stage = 0;
  for (int tile = own_tile; tile < tiles; tile += kWalkers) {
    if (p.stages == 4) {
      wait_copies<3>();
    } else {
      wait_copies(p.stages - 1);
    }
    __syncwarp();  // every lane's copies are there
    char* at = ring + stage * Traits::kWarpStageBytes;
    const int first = (first_tile + tile) * kWarpTokens;
    if (tile == tiles - 1) {
      const int row = seq_len - 1 - first;
      for (int i = lane; i < 2 * Rows::kChunks; i += 32) {
        const int which = i / Rows::kChunks, chunk = i % Rows::kChunks;
        *reinterpret_cast<uint4*>(at + which * Traits::kRowsBytes + Rows::offset(row, chunk)) =
            reinterpret_cast<const uint4*>(shared.fresh[which])[chunk];
      }
      __syncwarp();
    }
    attention.step(p, ring_address + stage * Traits::kWarpStageBytes, first);
    __syncwarp();  // every lane is done with the stage
    if (tile + p.stages * kWalkers < tiles) issue(tile + p.stages * kWalkers, stage);
    commit_copies();
    stage = stage + 1 == p.stages ? 0 : stage + 1;
  }
  wait_copies<0>();
  __syncwarp();
  attention.leave(reinterpret_cast<float*>(ring), shared.scales[warp], p.group);
  __syncthreads();

  // The block's result, then the cluster's.
  const int items = p.group * kFourColumns;
  for (int i = threadIdx.x; i < items; i += Traits::kThreads) {
    const int row = i / kFourColumns, column = i % kFourColumns * 4;
    float maximum = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.scales[w][row].x);
    const float reference = maximum == -INFINITY ? 0.0f : maximum;
    RowState state{maximum, 0.0f, {}};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto* sums = reinterpret_cast<const float*>(
          shared_bytes + sizeof(NewestShared<HEAD_DIM>) + w * p.stages * Traits::kWarpStageBytes);
      state.add(shared.scales[w][row],
                *reinterpret_cast<const float4*>(sums + WarpSums<HEAD_DIM>::index(row, column)),
                reference);
    }
    *reinterpret_cast<float4*>(&shared.sums[row][column]) = state.value;
    if (column == 0) shared.merged[row] = {maximum, state.sum};
  }
  cluster.sync();
  for (int i = rank + threadIdx.x * kCluster; i < items; i += Traits::kThreads * kCluster) {
    const int row = i / kFourColumns, column = i % kFourColumns * 4;
    float2 scales[kCluster];
    float4 sums[kCluster];
    float maximum = -INFINITY;
#pragma unroll
    for (int r = 0; r < kCluster; ++r) {
      const auto* other = cluster.map_shared_rank(&shared, r);
      scales[r] = other->merged[row];
      sums[r] = *reinterpret_cast<const float4*>(&other->sums[row][column]);
      maximum = fmaxf(maximum, scales[r].x);
    }
    const float reference = maximum == -INFINITY ? 0.0f : maximum;
    RowState state{maximum, 0.0f, {}};
#pragma unroll
    for (int r = 0; r < kCluster; ++r) state.add(scales[r], sums[r], reference);
    store_row<T>(static_cast<T*>(p.op.out) +
                     (seq * p.op.num_heads + kv_head * p.group + row) * HEAD_DIM + column,
                 state.normalized());
  }
  cluster.sync();  // nobody ends while another reads from it
#endif
}

template <typename T, int HEAD_DIM>
cudaError_t launch(NewestParams p, const DeviceLimits& limits, cudaStream_t stream) {
  using Traits = DecodeTraits<HEAD_DIM>;
  constexpr int kOthers = static_cast<int>(sizeof(NewestShared<HEAD_DIM>));
  const int half = limits.shared_per_sm / 2 - limits.shared_reserved;
  p.stages = smaller((half - kOthers) / Traits::kStageBytes, kMaxStages);
  if (p.stages < kMinStages || limits.compute_capability < 90) return cudaErrorNotSupported;
  const int bytes = kOthers + p.stages * Traits::kStageBytes;
  const auto kernel = rotary_attention_kernel<T, HEAD_DIM>;
  cudaFuncAttributes compiled;
  cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
  if (status != cudaSuccess) return status;
  if (compiled.ptxVersion < 90) return cudaErrorNotSupported;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const int64_t blocks = p.op.num_seqs * p.op.num_kv_heads * kCluster;
  return launch_dependent_clusters(kernel, static_cast<unsigned>(blocks), kCluster,
                                   Traits::kThreads, bytes, stream, p);
}

}  // namespace

}  // namespace pagedinfer::attention

namespace pagedinfer {

cudaError_t launch_rotary_attention(const RotaryAttentionParams& params, cudaStream_t stream) {
  using namespace attention;
  DeviceLimits limits;
  if (cudaError_t status = device_limits(&limits); status != cudaSuccess) return status;
  const NewestParams p{
      .op = params,
      .score = ScoreScale(params.scale, params.logit_cap),
      .window = window_of(params.sliding_window),
      .group = static_cast<int>(params.num_heads / params.num_kv_heads),
      .block_shift = std::countr_zero(static_cast<uint64_t>(params.block_size)),
      .stages = 0,
  };
  return dispatch_half_type(params.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return params.head_dim == 64 ? launch<T, 64>(p, limits, stream)
                                 : launch<T, 128>(p, limits, stream);
  });
}

}  // namespace pagedinfer
