// route_experts on the GPU: see route_experts.h for the maths and the tensors.
//
// Two steps: a warp routes a token, with the scores of its experts in registers, 32 apart; one
// block sorts all pairs by expert, counting in shared memory. Up to kTokensInOneBlock tokens the
// same single block does both; more are routed by a grid of their own first.
//
// Shared memory: two int32 and a tile's number for each expert. Template parameters: T, the scores'
// type; kRoutes, kSorts: which steps.
#include "common/dependent_launch.cuh"
#include "common/dtype.h"
#include "common/warp.cuh"
#include "experts/route_experts_cuda.h"
#include "layers/elements.cuh"

namespace pagedinfer {

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTokensInOneBlock = 64;
constexpr int kScoresPerLane = kMostExperts / 32;

struct Best {
  float value;
  int expert;
};

__device__ __forceinline__ Best better(Best a, Best b) {
  const bool second = b.value > a.value || (b.value == a.value && b.expert < a.expert);
  return second ? b : a;
}

__device__ __forceinline__ Best best_of_warp(Best mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Best other{__shfl_xor_sync(~0u, mine.value, distance),
                     __shfl_xor_sync(~0u, mine.expert, distance)};
    mine = better(mine, other);
  }
  return mine;
}

template <typename T>
__device__ void route_token(const RouteExpertsParams& p, int64_t token, int lane) {
  const T* scores = static_cast<const T*>(p.scores) + token * p.score_stride;
  const int num_experts = static_cast<int>(p.num_experts);
  float values[kScoresPerLane];
  Best largest{-INFINITY, num_experts};
#pragma unroll
  for (int i = 0; i < kScoresPerLane; ++i) {
    const int expert = i * 32 + lane;
    // What is no number, or -inf, comes last, but before experts that are taken or not there.
    values[i] = expert < num_experts ? fmaxf(to_float(scores[expert]), kLowestScore) : -INFINITY;
    largest = better(largest, {values[i], expert});
  }
  largest = best_of_warp(largest);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kScoresPerLane; ++i) sum += expf(values[i] - largest.value);
  sum = warp_sum(sum);

  float weight = 0.0f, total = 0.0f;
  int expert_of_lane = 0;
  Best best = largest;
  for (int j = 0; j < p.k; ++j) {
    const float share = expf(best.value - largest.value) / sum;
    total += share;
    if (lane == j) {
      weight = share;
      expert_of_lane = best.expert;
    }
    Best next{-INFINITY, num_experts};
#pragma unroll
    for (int i = 0; i < kScoresPerLane; ++i) {
      const int expert = i * 32 + lane;
      if (expert == best.expert) values[i] = -INFINITY;  // taken
      next = better(next, {values[i], expert});
    }
    best = best_of_warp(next);
  }
  if (lane < p.k) {
    p.weights[token * p.k + lane] = p.renormalize ? weight / total : weight;
    p.experts[token * p.k + lane] = expert_of_lane;
  }
}

// One block: counts, where each expert's pairs and tiles begin, the tiles, the pairs.
__device__ void sort_pairs(const RouteExpertsParams& p) {
  __shared__ int32_t counts[kMostExperts], begins[kMostExperts], tile_begins[kMostExperts];
  __shared__ int32_t num_tiles;
  const int thread = threadIdx.x;
  const int num_experts = static_cast<int>(p.num_experts);
  const int num_pairs = static_cast<int>(p.num_tokens * p.k);
  const int block_rows = static_cast<int>(p.block_rows);
  for (int e = thread; e < num_experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  for (int i = thread; i < num_pairs; i += kThreads) atomicAdd(&counts[p.experts[i]], 1);
  __syncthreads();
  if (thread < 32) {  // a prefix sum over the experts, 32 at a time
    int pairs_before = 0, tiles_before = 0;
    for (int base = 0; base < num_experts; base += 32) {
      const int e = base + thread;
      const int count = e < num_experts ? counts[e] : 0;
      int pairs = count, tiles = (count + block_rows - 1) / block_rows;
      const int own_tiles = tiles;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int more_pairs = __shfl_up_sync(~0u, pairs, distance);
        const int more_tiles = __shfl_up_sync(~0u, tiles, distance);
        if (thread >= distance) {
          pairs += more_pairs;
          tiles += more_tiles;
        }
      }
      if (e < num_experts) {
        begins[e] = pairs_before + pairs - count;
        tile_begins[e] = tiles_before + tiles - own_tiles;
      }
      pairs_before += __shfl_sync(~0u, pairs, 31);
      tiles_before += __shfl_sync(~0u, tiles, 31);
    }
    if (thread == 0) num_tiles = tiles_before;
  }
  __syncthreads();
  for (int e = thread; e < num_experts; e += kThreads) {
    ExpertTile* tile = p.tiles + tile_begins[e];
    const int end = begins[e] + counts[e];
    for (int at = begins[e]; at < end; at += block_rows) {
      *tile++ = {e, at, min(at + block_rows, end)};
    }
  }
  for (int i = num_tiles + thread; i < p.max_tiles; i += kThreads) p.tiles[i] = {-1, 0, 0};
  __syncthreads();
  for (int i = thread; i < num_pairs; i += kThreads) {
    p.pairs[atomicAdd(&begins[p.experts[i]], 1)] = i;
  }
}

template <typename T, bool kRoutes, bool kSorts>
__global__ void __launch_bounds__(kThreads)
    route_experts_kernel(const __grid_constant__ RouteExpertsParams p) {
  begin_dependent();
  if constexpr (kRoutes) {
    const int lane = threadIdx.x % 32;
    for (int64_t token = blockIdx.x * kWarps + threadIdx.x / 32; token < p.num_tokens;
         token += gridDim.x * kWarps) {
      route_token<T>(p, token, lane);
    }
  }
  if constexpr (kSorts) {
    __syncthreads();
    sort_pairs(p);
  }
}

template <typename T>
cudaError_t launch(const RouteExpertsParams& p, cudaStream_t stream) {
  if (p.num_tokens <= kTokensInOneBlock) {
    return launch_dependent(route_experts_kernel<T, true, true>, 1, kThreads, 0, stream, p);
  }
  const int blocks = static_cast<int>((p.num_tokens + kWarps - 1) / kWarps);
  const cudaError_t status =
      launch_dependent(route_experts_kernel<T, true, false>, blocks, kThreads, 0, stream, p);
  if (status != cudaSuccess) return status;
  return launch_dependent(route_experts_kernel<T, false, true>, 1, kThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_route_experts(const RouteExpertsParams& p, cudaStream_t stream) {
  return with_element_type(p.dtype, [&]<typename T>() { return launch<T>(p, stream); });
}

}  // namespace pagedinfer
