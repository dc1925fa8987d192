// peer_all_reduce_norm over few rows, pushed (peer_all_reduce.h): what a step with few decodes has,
// where the time is that of the way to the other GPU and of each step on this one.
//
// Tensors: data, residual, dtype [num_rows, hidden], dense; weight, dtype [hidden]; memories, of
// each rank. Grid: a cluster of blocks for each row, a vector of 16 bytes for each thread: one
// multiprocessor alone would take longer to send and to look for a row. Blocks are small, so that
// they find room beside those of the kernel ahead. Shared memory: the sum of squares of each warp
// of the cluster, which all write into all blocks' memory. Template parameters: T, the element
// type; kRanks.
#include <cooperative_groups.h>

#include "common/dependent_launch.cuh"
#include "common/warp.cuh"
#include "distributed/peer_all_reduce_cuda.h"
#include "distributed/peer_exchange.cuh"
#include "layers/elements.cuh"
#include "layers/row_math.cuh"

namespace pagedinfer {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarp * kWarps;
constexpr int kMostBlocks = 8;  // of a cluster, which every device grants

// Arrives at the cluster's barrier. Relaxed: there is nothing yet that the others are to see.
__device__ __forceinline__ void say_that_block_runs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, 1)
    peer_all_reduce_norm_few_kernel(const __grid_constant__ PeerAllReduceParams p,
                                    const __grid_constant__ RmsNormParams norm) {
#if __CUDA_ARCH__ >= 900
  constexpr int kVec = kPeerVectorBytes / sizeof(T);
  using V = Vector<T, kVec>;
  const auto cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int block = static_cast<int>(cluster.block_rank());
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int vectors = static_cast<int>(norm.hidden / kVec);
  const int in_row = block * kThreads + threadIdx.x;
  const int i = blockIdx.x / blocks * vectors + in_row;
  const bool has_work = in_row < vectors;

  let_successor_start();
  say_that_block_runs();
  V weight{};  // which no kernel writes
  if (has_work) weight = static_cast<const V*>(norm.weight)[in_row];
  wait_for_predecessor();
  const uint32_t call = begin_call(p);
  const PushedVectors<kRanks> exchange(p, call);
  V* data = static_cast<V*>(p.data);
  V* residual = static_cast<V*>(norm.residual);
  V x{};
  if (has_work) {
    exchange.give(i, data[i]);
    x = residual[i];
    V loaded[kRanks];
    exchange.take(i, loaded);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float total = to_float(loaded[0].elements[e]);
#pragma unroll
      for (int rank = 1; rank < kRanks; ++rank) total += to_float(loaded[rank].elements[e]);
      x.elements[e] = rounded<T>(to_float(x.elements[e]) + rounded_through<T>(total));
    }
  }

  __shared__ alignas(16) float sums[kMostBlocks][kWarps];
  float sum = warp_sum(sum_of_squares(x));
  cluster.barrier_wait();  // a block has shared memory to write to once it runs
  if (lane < blocks) *cluster.map_shared_rank(&sums[block][warp], lane) = sum;
  cluster.sync();
  if (has_work) residual[i] = x;  // not before the barrier, which would wait for it
  sum = 0.0f;
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b) {
    if (b >= blocks) break;
    const auto [first, second, third, fourth] = *reinterpret_cast<const float4*>(sums[b]);
    sum += (first + second) + (third + fourth);
  }
  const float factor = rsqrtf(sum / static_cast<float>(norm.hidden) + norm.epsilon);
  if (has_work) data[i] = normalised(x, factor, weight);
  end_call(p, call);
#endif
}

template <typename T>
cudaError_t launch(const PeerAllReduceParams& p, const RmsNormParams& norm, cudaStream_t stream) {
  const int64_t vectors = norm.hidden * static_cast<int64_t>(sizeof(T)) / kPeerVectorBytes;
  int blocks = 1;
  while (blocks * kThreads < vectors) blocks *= 2;
  if (blocks > kMostBlocks || norm.num_rows * blocks > kMostPieces ||
      p.num_bytes > kMostPushedBytes) {
    return cudaErrorNotSupported;
  }
  return with_ranks(p.num_ranks, [&]<int kRanks>() {
    const auto kernel = peer_all_reduce_norm_few_kernel<T, kRanks>;
    cudaFuncAttributes compiled;
    const cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
    if (status != cudaSuccess) return status;
    if (compiled.ptxVersion < 90) return cudaErrorNotSupported;
    return launch_dependent_clusters(kernel, static_cast<unsigned>(norm.num_rows * blocks),
                                     static_cast<unsigned>(blocks), kThreads, 0, stream, p, norm);
  });
}

}  // namespace

cudaError_t launch_peer_all_reduce_norm_few(const PeerAllReduceParams& p, const RmsNormParams& norm,
                                            cudaStream_t stream) {
  return with_element_type(p.dtype, [&]<typename T>() { return launch<T>(p, norm, stream); });
}

}  // namespace pagedinfer
