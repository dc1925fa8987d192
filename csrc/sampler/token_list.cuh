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
};

// Copies the lists of all blocks of the team into `merged`. Returns the number of tokens, or more
// than kListCapacity (and merges nothing) if there is no room. All threads call this, after a
// barrier of the team that follows the collecting; the lists may change again after the next one.
static __device__ __noinline__ int merge_lists(const TokenList& list, uint64_t* merged) {
  int size = 0;
  for (int rank = 0; rank < Team::size(); ++rank) size += Team::of(list, rank).size;
  if (size > kListCapacity) return size;
  int begin = 0;
  for (int rank = 0; rank < Team::size(); ++rank) {
    const TokenList& theirs = Team::of(list, rank);
    for (int i = threadIdx.x; i < theirs.size; i += kThreads) merged[begin + i] = theirs.codes[i];
    begin += theirs.size;
  }
  __syncthreads();
  return size;
}

// Sorts `size` codes ascending, by a bitonic network; up to the next power of two it writes
// kLastCode behind them. All threads call this.
static __device__ __noinline__ void sort_codes(uint64_t* codes, int size) {
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
