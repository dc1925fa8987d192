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
#include "distributed/peer_all_reduce_cuda.h"
#include "layers/elements.cuh"

namespace pagedinfer {

namespace {

constexpr int kThreads = 512;
// As many vectors under way as there are registers for.
template <int kRanks>
constexpr int kUnroll = kRanks <= 2   ? 4
                        : kRanks <= 4 ? 2
                                      : 1;

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ PeerHeader* header_of(char* memory) {
  return reinterpret_cast<PeerHeader*>(memory);
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, 1)
    peer_all_reduce_kernel(const __grid_constant__ PeerAllReduceParams p) {
  constexpr int kVec = kPeerVectorBytes / sizeof(T);
  using V = Vector<T, kVec>;
  const int piece = blockIdx.x, thread = threadIdx.x;
  PeerHeader* own = header_of(p.memories[p.rank]);
  const uint32_t call = own->calls[piece] + 1;
  const int vectors = static_cast<int>(p.num_bytes / kPeerVectorBytes);
  const int per_piece = (vectors + kPeerPieces - 1) / kPeerPieces;
  const int begin = min(piece * per_piece, vectors), end = min(begin + per_piece, vectors);
  __syncthreads();  // all have read the call number
  if (thread == 0) own->calls[piece] = call;
  if (begin == end) return;

  const int64_t buffer = kPeerHeaderBytes + (call % 2) * p.max_bytes;
  const auto buffer_of = [&](int rank) { return reinterpret_cast<V*>(p.memories[rank] + buffer); };
  V* data = static_cast<V*>(p.data);
  for (int i = begin + thread; i < end; i += kThreads) buffer_of(p.rank)[i] = data[i];

  __syncthreads();
  if (thread < kRanks) {
    store_release(&header_of(p.memories[thread])->arrived[piece][p.rank], call);
    const uint32_t* arrived = &own->arrived[piece][thread];
    while (static_cast<int32_t>(load_acquire(arrived) - call) < 0) {
    }
  }
  __syncthreads();

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
  const auto with_ranks = [&]<int kRanks>() {
    peer_all_reduce_kernel<T, kRanks><<<kPeerPieces, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  switch (p.num_ranks) {
    case 1:
      return with_ranks.template operator()<1>();
    case 2:
      return with_ranks.template operator()<2>();
    case 3:
      return with_ranks.template operator()<3>();
    case 4:
      return with_ranks.template operator()<4>();
    case 5:
      return with_ranks.template operator()<5>();
    case 6:
      return with_ranks.template operator()<6>();
    case 7:
      return with_ranks.template operator()<7>();
    case 8:
      return with_ranks.template operator()<8>();
  }
  return cudaErrorInvalidValue;  // not reached: the entry checks the number
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
