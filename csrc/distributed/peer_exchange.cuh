// How the blocks of a peer kernel find their call, and wait for those of the other ranks: see
// peer_all_reduce.h. All threads of a block call these.
#pragma once

#include "distributed/peer_all_reduce.h"

namespace pagedinfer {

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

// Counts this call of a piece, and returns its number.
__device__ __forceinline__ uint32_t count_call(const PeerAllReduceParams& p, int piece) {
  uint32_t* calls = &header_of(p.memories[p.rank])->calls[piece];
  const uint32_t call = *calls + 1;
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) *calls = call;
  return call;
}

// Where the data of a call lies in each rank's memory.
__device__ __forceinline__ int64_t buffer_offset(const PeerAllReduceParams& p, uint32_t call) {
  return kPeerHeaderBytes + (call % 2) * p.max_bytes;
}

// Says that what this block has written is there, and waits for the same piece of all ranks.
template <int kRanks>
__device__ __forceinline__ void meet_peers(const PeerAllReduceParams& p, int piece, uint32_t call) {
  __syncthreads();
  const int thread = threadIdx.x;
  if (thread < kRanks) {
    store_release(&header_of(p.memories[thread])->arrived[piece][p.rank], call);
    const uint32_t* arrived = &header_of(p.memories[p.rank])->arrived[piece][thread];
    while (static_cast<int32_t>(load_acquire(arrived) - call) < 0) {
    }
  }
  __syncthreads();
}

// Calls launch.operator()<kRanks>() with the number of ranks.
template <typename Launch>
cudaError_t with_ranks(int num_ranks, const Launch& launch) {
  switch (num_ranks) {
    case 1:
      return launch.template operator()<1>();
    case 2:
      return launch.template operator()<2>();
    case 4:
      return launch.template operator()<4>();
    case 8:
      return launch.template operator()<8>();
  }
  return cudaErrorInvalidValue;  // not reached: the entries check the number
}

}  // namespace pagedinfer
