// A short list of tokens, as codes in shared memory: each block of a team collects those of its
// part of the row, then every block merges and sorts all of them.
#pragma once

#include <cstdint>

#include "sampler/team.cuh"
#include "sampler/token_order.h"

namespace pagedinfer {
namespace sampling {

constexpr int kListCapacity = 2048;  // a power of two: what the sort works on

struct TokenList {
  uint64_t codes[kListCapacity];
  int size;  // may come to exceed the capacity: tokens that found no room are counted, not kept

  // Any order: the sort makes it one.
  __device__ void add(uint64_t code) {
    const int place = atomicAdd(&size, 1);
    if (place < kListCapacity) codes[place] = code;
  }

  // The tokens from a column on whose bits are set.
  template <int kColumns>
  __device__ void add(uint32_t bits, const float (&x)[kColumns], int first_column) {
    if (bits == 0) return;
    int place = atomicAdd(&size, __popc(bits));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if ((bits >> i & 1u) == 0) continue;
      if (place < kListCapacity) codes[place] = order_code(x[i], first_column + i);
      ++place;
    }
  }
};

// Copies the lists of all blocks of the team into `merged`. Returns the number of tokens, or more
// than kListCapacity (and merges nothing) if there is no room. All threads call this, after a
// barrier of the team that follows the collecting; the lists may change again after the next one.
__device__ inline int merge_lists(const TokenList& list, uint64_t* merged) {
  int sizes[kMaxTeam], size = 0, begin = 0, theirs = 0;
  gather(list.size, 0, sizes);
  const int rank = warp_index() % Team::size();  // whose list this warp helps to copy
#pragma unroll
  for (int i = 0; i < kMaxTeam; ++i) {
    if (i < rank) begin += sizes[i];
    if (i == rank) theirs = sizes[i];
    size += sizes[i];
  }
  if (size > kListCapacity) return size;
  const int first = warp_index() / Team::size() * kWarpSize + lane_index();
  for (int i = first; i < theirs; i += kThreads / Team::size()) {
    merged[begin + i] = Team::of(list.codes[i], rank);
  }
  __syncthreads();
  return size;
}

// Sorts `size` codes ascending. All threads call this.
__device__ inline void sort_codes(uint64_t* codes, int size) {
  if (size <= kThreads / 2) {  // few: every code counts those before it
    const int i = static_cast<int>(threadIdx.x);
    const uint64_t code = i < size ? codes[i] : kLastCode;
    int place = 0;
    if (i < size) {
#pragma unroll 8
      for (int j = 0; j < size; ++j) place += codes[j] < code;
    }
    __syncthreads();
    if (i < size) codes[place] = code;
    __syncthreads();
    return;
  }
  // A bitonic network over the next power of two.
  int padded = 2;
  while (padded < size) padded *= 2;
  for (int i = size + threadIdx.x; i < padded; i += kThreads) codes[i] = kLastCode;
  __syncthreads();
  for (int run = 2; run <= padded; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int pair = threadIdx.x; pair < padded / 2; pair += kThreads) {
        const int low = 2 * pair - (pair & (distance - 1));
        const int high = low + distance;
        const uint64_t a = codes[low], b = codes[high];
        const bool rising = (low & run) == 0;
        if ((a > b) == rising) {
          codes[low] = b;
          codes[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace sampling
}  // namespace pagedinfer
