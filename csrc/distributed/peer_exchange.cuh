// How the blocks of a peer kernel find their call and exchange vectors of 16 bytes with those of
// the other ranks: see peer_all_reduce.h for both ways. All threads of a block call these.
#pragma once

#include <cuda_runtime.h>

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

// How many blocks share a tensor that gives work to so many. Up to a megabyte those of two ranks
// have room on one GPU, which the tests need: they wait for each other.
inline int num_pieces(const PeerAllReduceParams& p, int64_t blocks_with_work) {
  const int64_t most = p.num_bytes <= 1 << 20 ? 64 : kMostPieces;
  return static_cast<int>(blocks_with_work < most ? blocks_with_work : most);
}

// The number of this call.
__device__ __forceinline__ uint32_t begin_call(const PeerAllReduceParams& p) {
  return call_after(__ldcg(&header_of(p.memories[p.rank])->calls[blockIdx.x]));
}

// Keeps the number for the next call, which may have another number of pieces.
__device__ __forceinline__ void end_call(const PeerAllReduceParams& p, uint32_t call) {
  __syncthreads();  // all have read the last
  uint32_t* calls = header_of(p.memories[p.rank])->calls;
  for (int piece = blockIdx.x + threadIdx.x * gridDim.x; piece < kMostPieces;
       piece += blockDim.x * gridDim.x) {
    calls[piece] = call;
  }
}

// A rank's data stays with it, and the others read it.
template <int kNumRanks>
class ReadVectors {
 public:
  static constexpr int kRanks = kNumRanks;

  __device__ ReadVectors(const PeerAllReduceParams& params, uint32_t call)
      : p(params), call_(call), buffer_(kPeerHeaderBytes + (call % 2) * p.max_bytes) {}

  template <typename V>
  __device__ __forceinline__ void give(int i, const V& vector) const {
    reinterpret_cast<V*>(p.memories[p.rank] + buffer_)[i] = vector;
  }

  // Says that what this block gives is there, and waits for the same piece of all ranks.
  __device__ __forceinline__ void meet() const {
    __syncthreads();
    const int thread = threadIdx.x;
    if (thread < kRanks) {
      store_release(&header_of(p.memories[thread])->arrived[blockIdx.x][p.rank], call_);
      const uint32_t* arrived = &header_of(p.memories[p.rank])->arrived[blockIdx.x][thread];
      while (static_cast<int32_t>(load_acquire(arrived) - call_) < 0) {
      }
    }
    __syncthreads();
  }

  // Vector i of all ranks.
  template <typename V>
  __device__ __forceinline__ void take(int i, V (&vectors)[kRanks]) const {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      vectors[r] = reinterpret_cast<const V*>(p.memories[r] + buffer_)[i];
    }
  }

 private:
  const PeerAllReduceParams& p;
  const uint32_t call_;
  const int64_t buffer_;
};

// A rank's data goes to all others: each 4 bytes in a word of 8 with the number of the call, which
// the memory model promises to be read as it was written. Of vector i the first two words are pair
// i of the first half of the room, the other two of the second: neighbours write side by side.
template <int kNumRanks>
class PushedVectors {
 public:
  static constexpr int kRanks = kNumRanks;

  __device__ PushedVectors(const PeerAllReduceParams& params, uint32_t call)
      : p(params),
        call_(call),
        room_(pushed_offset(p.max_bytes) + (call % 2) * kMostPeers * 2 * kMostPushedBytes) {}

  template <typename V>
  __device__ __forceinline__ void give(int i, const V& vector) const {
    const auto [x, y, z, w] = reinterpret_cast<const uint4&>(vector);
#pragma unroll
    for (int distance = 1; distance < kRanks; ++distance) {
      const int to = (p.rank + distance) % kRanks;  // not all to the same at once
      char* pair = pair_of(to, p.rank, i);
      push(pair, x, y);
      push(pair + kMostPushedBytes, z, w);
    }
  }

  // What is pushed says itself that it is there: take() waits for it.
  __device__ __forceinline__ void meet() const {}

  template <typename V>
  __device__ __forceinline__ void take(int i, V (&vectors)[kRanks]) const {
    take_some<0>(i, vectors);
    if constexpr (kAtOnce < kRanks) take_some<kAtOnce>(i, vectors);
    static_assert(kRanks <= 2 * kAtOnce);
  }

 private:
  static constexpr int kAtOnce = kRanks <= 4 ? kRanks : 4;  // ranks, for the registers

  struct Pair {
    uint64_t first, second;  // the call << 32 | 4 bytes of data
  };

  // Those of ranks [kFirst, kFirst + kAtOnce).
  template <int kFirst, typename V>
  __device__ __forceinline__ void take_some(int i, V (&vectors)[kRanks]) const {
    Pair pairs[kAtOnce][2];
    bool all_there;
    do {
      all_there = true;
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (kFirst + r == p.rank) continue;
        const char* pair = pair_of(p.rank, kFirst + r, i);
        pairs[r][0] = load(pair);
        pairs[r][1] = load(pair + kMostPushedBytes);
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (kFirst + r == p.rank) continue;
        all_there &= is_there(pairs[r][0]) && is_there(pairs[r][1]);
      }
    } while (!all_there);
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (kFirst + r == p.rank) {
        vectors[kFirst + r] = static_cast<const V*>(p.data)[i];
      } else {
        reinterpret_cast<uint4&>(vectors[kFirst + r]) = {
            static_cast<uint32_t>(pairs[r][0].first), static_cast<uint32_t>(pairs[r][0].second),
            static_cast<uint32_t>(pairs[r][1].first), static_cast<uint32_t>(pairs[r][1].second)};
      }
    }
  }

  __device__ __forceinline__ bool is_there(const Pair& pair) const {
    return pair.first >> 32 == call_ && pair.second >> 32 == call_;
  }

  // Where in the memory of rank `at` what rank `from` pushes lies.
  __device__ __forceinline__ char* pair_of(int at, int from, int i) const {
    return p.memories[at] + room_ + from * 2 * kMostPushedBytes + i * int64_t{sizeof(Pair)};
  }

  __device__ __forceinline__ void push(char* to, uint32_t first, uint32_t second) const {
    const uint64_t call = uint64_t{call_} << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(call | first),
                 "l"(call | second)
                 : "memory");
  }

  static __device__ __forceinline__ Pair load(const char* from) {
    Pair pair;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(pair.first), "=l"(pair.second)
                 : "l"(from)
                 : "memory");
    return pair;
  }

  const PeerAllReduceParams& p;
  const uint32_t call_;
  const int64_t room_;
};

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

// Calls launch.operator()<Exchange>() with the way that a tensor goes, which all ranks must agree
// on: its size decides.
template <typename Launch>
cudaError_t with_exchange(const PeerAllReduceParams& p, const Launch& launch) {
  return with_ranks(p.num_ranks, [&]<int kRanks>() {
    return p.num_bytes <= kMostPushedBytes ? launch.template operator()<PushedVectors<kRanks>>()
                                           : launch.template operator()<ReadVectors<kRanks>>();
  });
}

}  // namespace pagedinfer
