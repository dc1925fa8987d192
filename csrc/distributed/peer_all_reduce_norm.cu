// The sum over GPUs, added to the residual stream and normalised, in one kernel: peer_all_reduce.h
// and layers/rms_norm.h, with the same roundings as the two ops one after the other.
//
// Tensors: data, residual, dtype [num_rows, hidden], dense; weight, dtype [hidden]; memories, of
// each rank. Grid: one block for each of num_pieces() runs of whole rows. Shared memory: each
// warp's sums of squares, of kRows rows. Template parameters: T, the element type; Exchange, how
// vectors come from rank to rank (peer_exchange.cuh); kPerThread, vectors of 16 bytes that a thread
// has of a row.
//
// kRows rows are under way at once, for the way to the other GPU and back. Rows too long for that
// are left to the two kernels, few rows to peer_all_reduce_norm_few.cu.
#include "common/dependent_launch.cuh"
#include "common/warp.cuh"
#include "distributed/peer_all_reduce_cuda.h"
#include "distributed/peer_exchange.cuh"
#include "layers/elements.cuh"
#include "layers/rms_norm_cuda.h"
#include "layers/row_math.cuh"

namespace pagedinfer {

namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarp * kWarps;

template <int kRanks, int kPerThread>
constexpr int kRowsAtOnce = kRanks * kPerThread <= 2 ? 2 : 1;

// sums[r] over the block, for each r.
template <int kRows>
__device__ __forceinline__ void sum_over_block(float (&sums)[kRows]) {
  __shared__ float partial[kRows][kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = warp_sum(sums[r]);
  __syncthreads();  // the sums before these have been read
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0) partial[r][warp] = sums[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = warp_sum<kWarps>(partial[r][lane % kWarps]);
}

template <typename T, typename Exchange, int kPerThread>
__global__ void __launch_bounds__(kThreads, 1)
    peer_all_reduce_norm_kernel(const __grid_constant__ PeerAllReduceParams p,
                                const __grid_constant__ RmsNormParams norm) {
  constexpr int kRanks = Exchange::kRanks, kRows = kRowsAtOnce<kRanks, kPerThread>;
  constexpr int kVec = kPeerVectorBytes / sizeof(T);
  using V = Vector<T, kVec>;
  const int piece = blockIdx.x, pieces = gridDim.x, thread = threadIdx.x;
  const int num_rows = static_cast<int>(norm.num_rows);
  const int vectors = static_cast<int>(norm.hidden / kVec);
  const int per_piece = (num_rows + pieces - 1) / pieces;
  const int begin = min(piece * per_piece, num_rows), end = min(begin + per_piece, num_rows);

  let_successor_start();
  V weights[kPerThread];  // which no kernel writes
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = thread + j * kThreads;
    if (i < vectors && begin < end) weights[j] = static_cast<const V*>(norm.weight)[i];
  }
  wait_for_predecessor();
  const uint32_t call = begin_call(p);
  if (begin == end) {
    end_call(p, call);
    return;
  }

  const Exchange exchange(p, call);
  V* data = static_cast<V*>(p.data);
  V* residual = static_cast<V*>(norm.residual);
  for (int i = begin * vectors + thread; i < end * vectors; i += kThreads) {
    exchange.give(i, data[i]);
  }
  exchange.meet();

  for (int first = begin; first < end; first += kRows) {
    V loaded[kRows][kPerThread][kRanks], x[kRows][kPerThread];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int in_row = thread + j * kThreads, i = (first + r) * vectors + in_row;
        if (first + r >= end || in_row >= vectors) continue;
        x[r][j] = residual[i];
        exchange.take(i, loaded[r][j]);
      }
    }
    float sums[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int in_row = thread + j * kThreads, i = (first + r) * vectors + in_row;
        if (first + r >= end || in_row >= vectors) continue;
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          float total = to_float(loaded[r][j][0].elements[e]);
#pragma unroll
          for (int rank = 1; rank < kRanks; ++rank) {
            total += to_float(loaded[r][j][rank].elements[e]);
          }
          x[r][j].elements[e] =
              rounded<T>(to_float(x[r][j].elements[e]) + rounded_through<T>(total));
        }
        residual[i] = x[r][j];
        sums[r] += sum_of_squares(x[r][j]);
      }
    }
    sum_over_block(sums);  // after which all threads have given away what is overwritten here
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float factor = rsqrtf(sums[r] / static_cast<float>(norm.hidden) + norm.epsilon);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int in_row = thread + j * kThreads, i = (first + r) * vectors + in_row;
        if (first + r >= end || in_row >= vectors) continue;
        data[i] = normalised(x[r][j], factor, weights[j]);
      }
    }
  }
  end_call(p, call);
}

// Vectors of a row that a thread may have: what there are registers for.
constexpr int most_per_thread(int num_ranks) { return num_ranks <= 4 ? 2 : 1; }

bool fits(const RmsNormParams& norm, int num_ranks) {
  const int64_t row_bytes = norm.hidden * size_of(norm.dtype);
  return row_bytes % kPeerVectorBytes == 0 &&
         row_bytes <= most_per_thread(num_ranks) * kThreads * kPeerVectorBytes &&
         vector_width({address_of(norm.residual), address_of(norm.weight)}) == kPeerVectorBytes;
}

template <typename T, int kPerThread>
cudaError_t launch(const PeerAllReduceParams& p, const RmsNormParams& norm, cudaStream_t stream) {
  const int pieces = num_pieces(p, norm.num_rows);
  return with_exchange(p, [&]<typename Exchange>() {
    if constexpr (kPerThread <= most_per_thread(Exchange::kRanks)) {
      return launch_dependent(peer_all_reduce_norm_kernel<T, Exchange, kPerThread>, pieces,
                              kThreads, 0, stream, p, norm);
    } else {
      return cudaErrorInvalidValue;  // not reached: see fits()
    }
  });
}

template <typename T>
cudaError_t launch(const PeerAllReduceParams& p, const RmsNormParams& norm, cudaStream_t stream) {
  const int64_t vectors = norm.hidden * static_cast<int64_t>(sizeof(T)) / kPeerVectorBytes;
  return vectors <= kThreads ? launch<T, 1>(p, norm, stream) : launch<T, 2>(p, norm, stream);
}

}  // namespace

cudaError_t launch_peer_all_reduce_norm(const PeerAllReduceParams& p, const RmsNormParams& norm,
                                        cudaStream_t stream) {
  if (!fits(norm, p.num_ranks)) {
    const cudaError_t status = launch_peer_all_reduce(p, stream);
    return status == cudaSuccess ? launch_rms_norm(norm, stream) : status;
  }
  const cudaError_t status = launch_peer_all_reduce_norm_few(p, norm, stream);
  if (status != cudaErrorNotSupported) return status;
  return with_element_type(p.dtype, [&]<typename T>() { return launch<T>(p, norm, stream); });
}

}  // namespace pagedinfer
