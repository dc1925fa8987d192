// paged_attention on the GPU: which kernels a call launches. See paged_attention.h for the maths
// and the tensors, work_partition.h for what counts as decode and as prefill, and the kernels' own
// files.
//
//   dtype         decode sequences, zero rows   prefill tiles
//   fp16, bf16    paged_attention_decode.cu     paged_attention_prefill_wgmma.cu where it can run:
//                                               sm_90a, head_dim 64, 128, 256;
//                                               else paged_attention_prefill_mma.cu
//   fp32          paged_attention_fp32.cu       paged_attention_fp32.cu
//
// A batch with shared prefixes has paged_attention_prefill_mma.cu compute them first; the decode
// kernel folds them into its own results.
//
// The decode kernel is always launched: only the device knows whether a batch has decode sequences
// or padded rows. The prefill kernel is not where max_query_len says that there is nothing for it.
#include "attention/paged_attention_cuda.h"

#include <bit>

#include "attention/kernel_params.cuh"
#include "attention/launchers.cuh"
#include "common/device_limits.h"

namespace pagedinfer {

cudaError_t launch_paged_attention(const PagedAttentionParams& params, cudaStream_t stream) {
  using namespace attention;
  DeviceLimits limits;
  if (cudaError_t status = device_limits(&limits); status != cudaSuccess) return status;
  const int group = static_cast<int>(params.num_heads / params.num_kv_heads);
  KernelParams p{
      .op = params,
      .score = ScoreScale(params.scale, params.logit_cap),
      .group = group,
      .group_inverse = decode_group_inverse(group),
      .group_reciprocal = RowPlace::reciprocal(group),
      .slices = row_slices(group),
      .units = static_cast<int>(params.num_kv_heads) * row_slices(group),
      .block_shift = std::countr_zero(static_cast<uint64_t>(params.block_size)),
      .block_vectors =
          static_cast<uint32_t>(params.cache_stride_block * size_of(params.dtype) / 16),
      .partial_rows = static_cast<int>(partial_rows(params.max_query_len, group)),
      .window = window_of(params.sliding_window),
      .grid = decode_grid(limits.num_sms, params.head_dim),
      .stages = 0,
      .beside_prefill = false,
  };
  const bool fp32 = params.dtype == DType::float32;
  if (max_prefill_tiles(params.num_seqs, params.num_tokens, params.max_query_len, group) > 0) {
    const bool wgmma = prefill_wgmma_serves(p, limits);
    const cudaError_t status = fp32    ? launch_prefill_fp32(p, stream)
                               : wgmma ? launch_prefill_wgmma(p, stream)
                                       : launch_prefill_mma(p, stream);
    p.beside_prefill = wgmma;
    if (status != cudaSuccess) return status;
  }
  if (params.prefixes.num_groups > 0) {
    const cudaError_t status = launch_shared_prefixes(p, stream);
    if (status != cudaSuccess) return status;
  }
  return fp32 ? launch_decode_fp32(p, stream) : launch_decode(p, stream);
}

}  // namespace pagedinfer
