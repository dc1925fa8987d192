// The sum of a tensor over GPUs that read each other's memory: see peer_all_reduce.h for the maths
// and for why the ranks cannot overtake each other.
//
// Tensors: data, dtype [num_bytes / size], dense; memories, of each rank, on its own device.
// Grid: kPeerPieces blocks, whatever the size; a block owns one piece of the data, a run of vectors
// of 16 bytes, and speaks with the blocks of the same number on the other GPUs. Blocks without data
// only count the call. Shared memory: none. Template parameters: T, the element type; kRanks.
//
// A thread loads the vectors of all ranks, kUnroll of its places, before it adds: what takes the
// time is the way to the other GPU and back.
#include "common/dependent_launch.cuh"
#include "distributed/peer_all_reduce_cuda.h"
#include "distributed/peer_exchange.cuh"
#include "layers/elements.cuh"

namespace pagedinfer {

namespace {

constexpr int kThreads = 512;
// As many vectors under way as there are registers for.
template <int kRanks>
constexpr int kUnroll = kRanks <= 2   ? 4
                        : kRanks <= 4 ? 2
                                      : 1;

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, 1)
    peer_all_reduce_kernel(const __grid_constant__ PeerAllReduceParams p) {
  constexpr int kVec = kPeerVectorBytes / sizeof(T);
  using V = Vector<T, kVec>;
  begin_dependent();
  const int piece = blockIdx.x, thread = threadIdx.x;
  const uint32_t call = count_call(p, piece);
  const int vectors = static_cast<int>(p.num_bytes / kPeerVectorBytes);
  const int per_piece = (vectors + kPeerPieces - 1) / kPeerPieces;
  const int begin = min(piece * per_piece, vectors), end = min(begin + per_piece, vectors);
  if (begin == end) return;

  const int64_t buffer = buffer_offset(p, call);
  const auto buffer_of = [&](int rank) { return reinterpret_cast<V*>(p.memories[rank] + buffer); };
  V* data = static_cast<V*>(p.data);
  for (int i = begin + thread; i < end; i += kThreads) buffer_of(p.rank)[i] = data[i];
  meet_peers<kRanks>(p, piece, call);

  for (int first = begin + thread; first < end; first += kThreads * kUnroll<kRanks>) {
    V loaded[kUnroll<kRanks>][kRanks];
#pragma unroll
    for (int u = 0; u < kUnroll<kRanks>; ++u) {
      const int i = first + u * kThreads;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (i < end) loaded[u][r] = buffer_of(r)[i];
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll<kRanks>; ++u) {
      const int i = first + u * kThreads;
      if (i >= end) break;
      V sum;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        float total = to_float(loaded[u][0].elements[e]);
#pragma unroll
        for (int r = 1; r < kRanks; ++r) total += to_float(loaded[u][r].elements[e]);
        sum.elements[e] = rounded<T>(total);
      }
      data[i] = sum;
    }
  }
}

template <typename T>
cudaError_t launch(const PeerAllReduceParams& p, cudaStream_t stream) {
  return with_ranks(p.num_ranks, [&]<int kRanks>() {
    return launch_dependent(peer_all_reduce_kernel<T, kRanks>, kPeerPieces, kThreads, 0, stream, p);
  });
}

}  // namespace

cudaError_t launch_peer_all_reduce(const PeerAllReduceParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::float32:
      return launch<float>(p, stream);
    case DType::float16:
      return launch<__half>(p, stream);
    case DType::bfloat16:
      return launch<__nv_bfloat16>(p, stream);
  }
  return cudaErrorInvalidValue;  // not reached: the entry checks dtypes
}

}  // namespace pagedinfer
