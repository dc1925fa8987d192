// Prefill on Hopper: attention of sequences with many query rows (fp16, bf16; head_dim 64, 128,
// 256), tiled along the rows, on tensor cores through wgmma (sm_90a).
//
//   for Q [128 x D] a tile of packed rows, over tiles of N keys, the last first:
//     S = Q K^T;  m' = m, or rowmax S if that is far above;  P = 2^(S - m')
//     l = l 2^(m - m') + rowsum P;  O = O 2^(m - m') + P V                (softmax_rows.cuh)
//   out = O / l
//   (FlashAttention, Dao et al. 2022; the pipeline: FlashAttention-3, Shah et al. 2024)
//
//   tensor        shape                                          dtype    strides (elements)
//   query         [num_tokens, num_heads, D]                     T        free, free, 1
//   kv_cache      [num_blocks, 2, num_kv_heads, block_size, D]   T        cache_stride_block, dense
//   block_table   [num_seqs, max_blocks]                         int32    block_table_stride, 1
//   plan          PrefillTile [num_prefill_tiles]                int32    the longest first
//   out           [num_tokens, num_heads, D]                     T        dense
//
// Grid: one block a multiprocessor, or fewer if there is less to do. An item is a tile of the plan
// with a KV head. Blocks are dealt the items in turn, forth and back, so that each has its share of
// the long and of the short ones.
//
// A block is three warpgroups. The first fetches (prefill_wgmma_fetch.cuh): a warp K and a warp V,
// a page at a time, with the copy engine; the others Q, at a head_dim of 256. The other two compute
// (prefill_wgmma_compute.cuh), 64 rows each, with Q in registers where it fits. They meet at
// barriers in shared memory only (prefill_wgmma_roles.cuh), and all run on over the ends of items:
// Q and K of the next item are there, and multiplied, before the output of the last one is written.
//
// Beside decode work only the first blocks of the plan's prefill_blocks stay; the decode kernel,
// which is launched right after, starts on the other multiprocessors.
//
// Shared memory: stages of Q, if any, of K and of V; barriers, one pair (full, empty) for each
// stage.
//
// Template: T, the element type; HEAD_DIM.
//
// Invariants: keys outside key_begin .. seq_len - 1 are never used: pages that hold none other are
// not fetched but zeroed, K of such keys is masked, V is zeroed (0 * NaN would be NaN). Only tiles
// that some row does not see whole are masked.
#include <cuda.h>

#include "attention/dispatch.h"
#include "attention/launchers.cuh"
#include "attention/prefill_wgmma_compute.cuh"
#include "attention/prefill_wgmma_fetch.cuh"
#include "common/dependent_launch.cuh"
#include "common/device_limits.h"

namespace pagedinfer::attention {

namespace wgmma {

namespace {

template <typename T, int HEAD_DIM>
__global__ __launch_bounds__(kThreads, 1) void prefill_wgmma_kernel(
    const __grid_constant__ KernelParams p,
    [[maybe_unused]] const __grid_constant__ CUtensorMap pages) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(kPanelAlignment) char shared_memory[];
  const SharedPlaces<HEAD_DIM> shared(shared_memory);
  const PlanView plan(p);
  if (threadIdx.x == 0) {
    prefetch_map(&pages);
    shared.init_barriers();
  }
  __syncthreads();
  wait_for_predecessor();
  let_successor_start();
  // The multiprocessors of the others are for decode work.
  if (blockIdx.x >= plan.header->prefill_blocks) return;

  const int warp = __shfl_sync(kWarpMask, static_cast<int>(threadIdx.x / 32), 0);
  if (warp < kWarpgroup / 32) {
    give_registers_back<kProducerRegisters>();
    if (warp == kKeyWarp) {
      fetch_all_pages<T, HEAD_DIM, false>(p, &pages, plan, shared);
    } else if (warp == kValueWarp) {
      fetch_all_pages<T, HEAD_DIM, true>(p, &pages, plan, shared);
    } else {
      QueryFetcher<T, HEAD_DIM>(p, warp - kFirstQueryWarp).fetch_all(plan, shared);
    }
  } else {
    take_registers<kConsumerRegisters>();
    compute_all<T, HEAD_DIM>(p, plan, shared);
  }
#endif
}

template <typename T, int HEAD_DIM>
cudaError_t launch(const KernelParams& p, cudaStream_t stream) {
  const auto kernel = prefill_wgmma_kernel<T, HEAD_DIM>;
  DeviceLimits limits;
  CUtensorMap map;
  cudaError_t status = device_limits(&limits);
  if (status == cudaSuccess) status = make_page_map(p, &map);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Traits<HEAD_DIM>::kSharedBytes);
  }
  if (status != cudaSuccess) return status;
  const int64_t items = p.op.num_kv_heads * max_prefill_tiles(p.op.num_seqs, p.op.num_tokens,
                                                              p.op.max_query_len, p.group);
  const auto blocks = static_cast<int>(items < limits.num_sms ? items : limits.num_sms);
  return launch_dependent(kernel, blocks, kThreads, Traits<HEAD_DIM>::kSharedBytes, stream, p, map);
}

}  // namespace

}  // namespace wgmma

bool prefill_wgmma_serves(const KernelParams& p, const DeviceLimits& limits) {
#ifdef PAGEDINFER_WITH_SM90A
  const bool built_for = limits.compute_capability == 90;
#else
  const bool built_for = false;
#endif
  const bool head_dim = p.op.head_dim == 64 || p.op.head_dim == 128 || p.op.head_dim == 256;
  return built_for && head_dim && p.op.dtype != DType::float32;
}

cudaError_t launch_prefill_wgmma(const KernelParams& p, cudaStream_t stream) {
  return dispatch_half_type(p.op.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    switch (p.op.head_dim) {
      case 64:
        return wgmma::launch<T, 64>(p, stream);
      case 128:
        return wgmma::launch<T, 128>(p, stream);
      case 256:
        return wgmma::launch<T, 256>(p, stream);
      default:
        throw std::invalid_argument("paged_attention: no wgmma kernel for head_dim " +
                                    std::to_string(p.op.head_dim) + "; supported are 64, 128, 256");
    }
  });
}

}  // namespace pagedinfer::attention
