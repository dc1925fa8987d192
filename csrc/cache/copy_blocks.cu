// copy_blocks on the GPU: blocks within a cache, in the order of a CopyPlan (see copy_order.h).
//
// Tensors: cache, num_blocks blocks of block_bytes, one after the other.
// Grid: (sequence, tile): a block of threads takes kTileVectors vectors, the same ones of every
// block of its sequence, and does the sequence's copies in order. A thread reads and writes only
// its own kPerThread vectors of each, so it waits for nobody, and the scratch block is in its
// registers. Shared memory: none. The ids come as launch parameters: nothing is uploaded, and a
// captured graph keeps them. Template parameter: V, the widest type that all blocks start and end
// at multiples of.
#include <algorithm>
#include <cstdint>

#include "cache/copy_blocks_cuda.h"
#include "cache/vector_types.cuh"
#include "common/vector_width.h"

namespace pagedinfer {

namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int64_t kTileVectors = kThreads * kPerThread;

struct BlockPair {
  int32_t source, destination;  // kScratchBlock: the scratch block
};

struct CopyBlocksParams {
  void* cache;  // [num_blocks, vectors_per_block]
  int64_t vectors_per_block;
  uint32_t tiles;  // per block
  // [sequences], where each one's pairs end; they begin at the last's.
  uint16_t ends[kMaxBatchCopies];
  BlockPair pairs[kMaxBatchCopies];
};
static_assert(sizeof(CopyBlocksParams) <= 4096, "what every GPU takes as launch parameters");

template <typename V>
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const __grid_constant__ CopyBlocksParams p) {
  const unsigned sequence = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles;
  const int begin = sequence == 0 ? 0 : p.ends[sequence - 1];
  const int end = p.ends[sequence];
  const int64_t first = tile * kTileVectors + threadIdx.x;

  V vectors[kPerThread], scratch[kPerThread];
  // The block that `vectors` are from; of several readers in a row one loads.
  int loaded = kScratchBlock;
  for (int i = begin; i < end; ++i) {
    const BlockPair pair = p.pairs[i];
    if (pair.source != kScratchBlock && pair.source != loaded) {
      const V* source = static_cast<const V*>(p.cache) + pair.source * p.vectors_per_block;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int64_t at = first + j * kThreads;
        if (at < p.vectors_per_block) vectors[j] = source[at];
      }
      loaded = pair.source;
    }
    if (pair.destination == kScratchBlock) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) scratch[j] = vectors[j];
      continue;
    }
    V* destination = static_cast<V*>(p.cache) + pair.destination * p.vectors_per_block;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t at = first + j * kThreads;
      if (at < p.vectors_per_block) {
        destination[at] = pair.source == kScratchBlock ? scratch[j] : vectors[j];
      }
    }
  }
}

}  // namespace

cudaError_t launch_copy_blocks(void* cache, int64_t block_bytes, const CopyPlan& plan,
                               cudaStream_t stream) {
  const int64_t width = vector_width({address_of(cache), block_bytes});
  CopyBlocksParams params;
  params.cache = cache;
  params.vectors_per_block = block_bytes / width;
  params.tiles =
      static_cast<uint32_t>((params.vectors_per_block + kTileVectors - 1) / kTileVectors);
  for (const CopyBatch& batch : plan.batches) {
    const int64_t first_copy = plan.sequences[batch.begin].begin;
    for (int64_t s = batch.begin; s < batch.end; ++s) {
      const CopySequence& sequence = plan.sequences[s];
      params.ends[s - batch.begin] = static_cast<uint16_t>(sequence.end - first_copy);
      for (int64_t c = sequence.begin; c < sequence.end; ++c) {
        params.pairs[c - first_copy] = {static_cast<int32_t>(plan.copies[c].source),
                                        static_cast<int32_t>(plan.copies[c].destination)};
      }
    }
    const unsigned blocks = static_cast<unsigned>(batch.end - batch.begin) * params.tiles;
    const cudaError_t status = with_vector_type(width, [&]<typename V>() {
      copy_blocks_kernel<V><<<blocks, kThreads, 0, stream>>>(params);
      return cudaGetLastError();
    });
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace pagedinfer
