// The sum of a tensor over GPUs that read each other's memory: see peer_all_reduce.h for the maths
// and for why the ranks cannot overtake each other.
//
// Tensors: data, dtype [num_bytes / size], dense; memories, of each rank, on its own device.
// Grid: one block for each of num_pieces() pieces, runs of vectors of 16 bytes. Where ranks read
// each other's data, it speaks with the blocks of the same number on the other GPUs. Shared memory:
// none. Template parameters: T, the element type; Exchange, how vectors come from rank to rank
// (peer_exchange.cuh).
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
constexpr int kLeastVectors = 64;  // of a piece
// As many vectors under way as there are registers for.
template <int kRanks>
constexpr int kUnroll = kRanks <= 2   ? 4
                        : kRanks <= 4 ? 2
                                      : 1;

template <typename T, typename Exchange>
__global__ void __launch_bounds__(kThreads, 1)
    peer_all_reduce_kernel(const __grid_constant__ PeerAllReduceParams p) {
  constexpr int kVec = kPeerVectorBytes / sizeof(T), kRanks = Exchange::kRanks;
  using V = Vector<T, kVec>;
  begin_dependent();
  const int piece = blockIdx.x, pieces = gridDim.x, thread = threadIdx.x;
  const uint32_t call = begin_call(p);
  const int vectors = static_cast<int>(p.num_bytes / kPeerVectorBytes);
  const int per_piece = (vectors + pieces - 1) / pieces;
  const int begin = min(piece * per_piece, vectors), end = min(begin + per_piece, vectors);

  if (begin < end) {
    const Exchange exchange(p, call);
    V* data = static_cast<V*>(p.data);
    for (int i = begin + thread; i < end; i += kThreads) exchange.give(i, data[i]);
    exchange.meet();

    for (int first = begin + thread; first < end; first += kThreads * kUnroll<kRanks>) {
      V loaded[kUnroll<kRanks>][kRanks];
#pragma unroll
      for (int u = 0; u < kUnroll<kRanks>; ++u) {
        const int i = first + u * kThreads;
        if (i < end) exchange.take(i, loaded[u]);
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
  end_call(p, call);
}

template <typename T>
cudaError_t launch(const PeerAllReduceParams& p, cudaStream_t stream) {
  const int64_t vectors = p.num_bytes / kPeerVectorBytes;
  const int pieces = num_pieces(p, (vectors + kLeastVectors - 1) / kLeastVectors);
  return with_exchange(p, [&]<typename Exchange>() {
    return launch_dependent(peer_all_reduce_kernel<T, Exchange>, pieces, kThreads, 0, stream, p);
  });
}

}  // namespace

cudaError_t launch_peer_all_reduce(const PeerAllReduceParams& p, cudaStream_t stream) {
  return with_element_type(p.dtype, [&]<typename T>() { return launch<T>(p, stream); });
}

}  // namespace pagedinfer
