#include "attention/attention_work.h"

#include <algorithm>
#include <vector>

#include "common/parallel.h"

namespace pagedinfer {

namespace {

constexpr int64_t kMinChunk = 512;  // keys: below this a merge costs more than it spreads
constexpr int64_t kMaxChunks = 64;

// A tile is spread over threads when one KV head of it is more than this part of a thread's fair
// share.
constexpr double kShareToSplit = 0.25;

// Multiply-adds that take a few times as long as waking a thread.
constexpr double kWorthAThread = 1e5;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

AttentionTile make_tile(const PagedAttentionParams& p, int64_t seq, int64_t first_row,
                        int64_t num_rows) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t query_len = int64_t{p.query_start_loc[seq + 1]} - p.query_start_loc[seq];
  const int64_t before = p.seq_lens[seq] - query_len;  // the position of query 0
  const int64_t first_position = before + first_row / group;
  const int64_t last_position = before + (first_row + num_rows - 1) / group;
  AttentionTile tile{};
  tile.seq = seq;
  tile.first_row = first_row;
  tile.num_rows = num_rows;
  tile.end_key = std::max<int64_t>(0, last_position + 1);
  tile.first_key =
      p.sliding_window > 0 ? std::max<int64_t>(0, first_position - p.sliding_window + 1) : 0;
  const int64_t aligned_first = tile.first_key / kKeyBlock * kKeyBlock;
  const int64_t span = std::max<int64_t>(1, tile.end_key - aligned_first);
  const int64_t chunks = std::min(kMaxChunks, ceil_div(span, kMinChunk));
  tile.chunk_len = ceil_div(ceil_div(span, chunks), kKeyBlock) * kKeyBlock;
  tile.num_chunks = ceil_div(span, tile.chunk_len);
  tile.partials = kNoPartials;
  return tile;
}

// Multiply-adds of one KV head, up to a factor that all tiles share.
double cost_of(const AttentionTile& tile) {
  constexpr double kReading = 8;  // reading a key costs about as much as so many rows' arithmetic
  return static_cast<double>(tile.end_key - tile.first_key) *
         (static_cast<double>(tile.num_rows) + kReading);
}

}  // namespace

float* attention_scratch(int64_t count) {
  constexpr size_t kAlign = 64 / sizeof(float);
  thread_local std::vector<float> memory;
  if (memory.size() < static_cast<size_t>(count) + kAlign) {
    memory.resize(static_cast<size_t>(count) + kAlign);
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

void run_paged_attention_cpu(const PagedAttentionParams& p) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  std::vector<AttentionTile> tiles;
  double total = 0;
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    const int64_t num_rows = (int64_t{p.query_start_loc[seq + 1]} - p.query_start_loc[seq]) * group;
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      tiles.push_back(make_tile(p, seq, row, std::min(kTileRows, num_rows - row)));
      total += cost_of(tiles.back()) * static_cast<double>(p.num_kv_heads);
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const AttentionTile& a, const AttentionTile& b) {
    return cost_of(a) > cost_of(b);
  });

  const double share = total / static_cast<double>(num_threads());
  std::vector<AttentionItem> items, merges;
  int64_t used = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    AttentionTile& tile = tiles[i];
    const int64_t needed =
        p.num_kv_heads * tile.num_chunks * partial_size(tile.num_rows, p.head_dim);
    const bool split = tile.num_chunks > 1 && cost_of(tile) > kShareToSplit * share &&
                       used + needed <= p.workspace_length;
    if (split) {
      tile.partials = used;
      used += needed;
    }
    AttentionItem item{};
    item.tile = static_cast<int32_t>(i);
    const auto chunks = static_cast<int32_t>(tile.num_chunks);
    for (int32_t head = 0; head < p.num_kv_heads; ++head) {
      item.kv_head = head;
      const int32_t step = split ? 1 : chunks;
      for (int32_t chunk = 0; chunk < chunks; chunk += step) {
        item.first_chunk = chunk;
        item.end_chunk = chunk + step;
        items.push_back(item);
      }
      item.first_chunk = 0;
      item.end_chunk = chunks;
      if (split) merges.push_back(item);
    }
  }

  const double multiply_adds = total * 2 * static_cast<double>(p.head_dim);
  const AttentionWork work{
      .tiles = tiles.data(),
      .items = items.data(),
      .num_items = static_cast<int64_t>(items.size()),
      .merges = merges.data(),
      .num_merges = static_cast<int64_t>(merges.size()),
      .num_workers =
          std::min(num_threads(), 1 + static_cast<int64_t>(multiply_adds / kWorthAThread)),
  };
  PAGEDINFER_CPU_KERNEL(paged_attention_cpu)(p, work);
}

}  // namespace pagedinfer
