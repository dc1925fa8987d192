#include <algorithm>
#include <cstring>
#include <vector>

#include "cache/cache_checks.h"
#include "cache/swap_blocks_cuda.h"
#include "common/check.h"
#include "common/cuda_context.h"
#include "common/parallel.h"
#include "common/pinned_memory.h"
#include "ops.h"

namespace pagedinfer {

namespace {

// What one task copies at a time: large enough for memcpy's best rate, small enough to share out.
constexpr int64_t kPieceBytes = 256 * 1024;

struct Piece {
  const char* source;
  char* destination;
  int64_t bytes;
};

void swap_blocks_cpu(const char* source, char* destination, int64_t block_bytes,
                     const std::vector<BlockRun>& runs) {
  std::vector<Piece> pieces;
  for (const BlockRun& run : runs) {
    const int64_t bytes = run.length * block_bytes;
    for (int64_t at = 0; at < bytes; at += kPieceBytes) {
      pieces.push_back({.source = source + run.source * block_bytes + at,
                        .destination = destination + run.destination * block_bytes + at,
                        .bytes = std::min(kPieceBytes, bytes - at)});
    }
  }
  parallel_for(static_cast<int64_t>(pieces.size()), /*grain=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(pieces[i].destination, pieces[i].source, pieces[i].bytes);
    }
  });
}

// Whether the memory of two contiguous tensors overlaps.
bool overlap(const Tensor& a, const Tensor& b) {
  const auto* begin_a = static_cast<const char*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const char*>(b.const_data_ptr());
  return begin_a < begin_b + b.numel() * static_cast<int64_t>(b.element_size()) &&
         begin_b < begin_a + a.numel() * static_cast<int64_t>(a.element_size());
}

}  // namespace

void swap_blocks(const Tensor& source, Tensor destination, const Tensor& mapping) {
  const char* op = "swap_blocks";
  ArgumentChecker check(op);
  bool matches = source.dim() >= 1 && destination.dim() == source.dim();
  for (int64_t i = 1; matches && i < source.dim(); ++i) {
    matches = destination.size(i) == source.size(i);
  }
  PAGEDINFER_CHECK(matches, "swap_blocks: source has shape ", shape_of(source), " and destination ",
                   shape_of(destination),
                   "; expected [num_blocks, ...] with equal trailing shapes");
  PAGEDINFER_CHECK(destination.scalar_type() == source.scalar_type(),
                   "swap_blocks: destination has dtype ", name_of(destination.scalar_type()),
                   "; expected source's ", name_of(source.scalar_type()));
  check.contiguous("source", source);
  check.contiguous("destination", destination);
  PAGEDINFER_CHECK(is_cpu(source) || is_cpu(destination) ||
                       source.get_device_index() == destination.get_device_index(),
                   "swap_blocks: source is on ", device_of(source), " and destination on ",
                   device_of(destination), "; expected one of them on the CPU, or one GPU");

  const std::vector<BlockCopy> copies =
      checked_mapping(op, mapping, source.size(0), destination.size(0));
  if (copies.empty() || source.numel() == 0) return;
  PAGEDINFER_CHECK(is_cpu(source) != is_cpu(destination) || !overlap(source, destination),
                   "swap_blocks: source and destination share memory; expected two caches "
                   "(copy_blocks copies within one)");
  const int64_t block_bytes =
      source.numel() / source.size(0) * static_cast<int64_t>(source.element_size());
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  auto* to = static_cast<char*>(destination.mutable_data_ptr());
  const std::vector<BlockRun> runs = merged_runs(copies);

  if (is_cpu(source) && is_cpu(destination)) {
    swap_blocks_cpu(from, to, block_bytes, runs);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(is_cpu(source) ? destination : source);
  check_pinned(op, "source", source);
  check_pinned(op, "destination", destination);
  check_cuda(op, enqueue_swap(from, to, block_bytes, runs, context.stream()));
#endif
}

}  // namespace pagedinfer
