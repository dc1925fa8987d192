#include <algorithm>
#include <cstring>

#include "cache/cache_checks.h"
#include "cache/copy_blocks_cuda.h"
#include "cache/copy_order.h"
#include "common/check.h"
#include "common/cuda_context.h"
#include "common/parallel.h"
#include "ops.h"

namespace pagedinfer {

namespace {

// What one task copies of every block of a sequence, and so the size of its scratch block.
constexpr int64_t kTileBytes = 64 * 1024;

void copy_blocks_cpu(char* cache, int64_t block_bytes, const CopyPlan& plan) {
  const int64_t tiles = (block_bytes + kTileBytes - 1) / kTileBytes;
  for (const CopyBatch& batch : plan.batches) {
    parallel_for((batch.end - batch.begin) * tiles, /*grain=*/4, [&](int64_t begin, int64_t end) {
      alignas(64) char scratch[kTileBytes];
      for (int64_t i = begin; i < end; ++i) {
        const CopySequence& sequence = plan.sequences[batch.begin + i / tiles];
        const int64_t offset = i % tiles * kTileBytes;
        const int64_t bytes = std::min(kTileBytes, block_bytes - offset);
        const auto tile_of = [&](int64_t block) {
          return block == kScratchBlock ? scratch : cache + block * block_bytes + offset;
        };
        for (int64_t c = sequence.begin; c < sequence.end; ++c) {
          std::memcpy(tile_of(plan.copies[c].destination), tile_of(plan.copies[c].source), bytes);
        }
      }
    });
  }
}

}  // namespace

void copy_blocks(Tensor kv_cache, const Tensor& mapping) {
  const char* op = "copy_blocks";
  ArgumentChecker check(op);
  PAGEDINFER_CHECK(kv_cache.dim() >= 1, "copy_blocks: kv_cache has shape ", shape_of(kv_cache),
                   "; expected [num_blocks, ...]");
  check.contiguous("kv_cache", kv_cache);

  const int64_t num_blocks = kv_cache.size(0);
  const std::vector<BlockCopy> copies = checked_mapping(op, mapping, num_blocks, num_blocks);
  if (copies.empty() || kv_cache.numel() == 0) return;
  const int64_t block_bytes =
      kv_cache.numel() / num_blocks * static_cast<int64_t>(kv_cache.element_size());
  auto* cache = static_cast<char*>(kv_cache.mutable_data_ptr());

  if (is_cpu(kv_cache)) {
    copy_blocks_cpu(cache, block_bytes, plan_copies(copies));
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(kv_cache);
  check_cuda(op, launch_copy_blocks(cache, block_bytes, plan_copies(copies), context.stream()));
#endif
}

}  // namespace pagedinfer
