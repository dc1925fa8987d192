// attention_plan on the GPU: reads a batch's lengths on the device and writes down who computes
// what.
//
// The decode sequences' key tiles form one list, cut into equal ranges, one for each block of the
// decode grid; or their units are dealt to the blocks whole (UnitDeal). Every other sequence's
// packed query rows are cut into prefill tiles, sorted so that those with the most keys come first.
// What "decode", "tile", "unit" and "chunk" mean, and the arithmetic: see work_partition.h.
//
//   tensor            shape            dtype
//   query_start_loc   [num_seqs + 1]   int32
//   seq_lens          [num_seqs]       int32
//   plan              PlanLayout       int32, written: the header; BlockRecord [grid]; counters
//                                      [grid + 1], zeros, which the decode kernel leaves as they
//                                      are; SequenceRecord [num_seqs], and the same by length, if
//                                      units are dealt; scratch [num_seqs]; ZeroRun [num_seqs];
//                                      PrefillTile [num_prefill_tiles]
//
// Grid: one block of 1,024 threads; it runs once a step, not once a layer. Each thread takes every
// 1,024th sequence, block of the decode grid, and prefill tile.
//
// Shared memory: one set of counts a warp for the prefix sums; the histogram of the counting sort.
//
// Invariants: sequences without queries are skipped; those of length 0 only get zeros written.
#include "attention/attention_plan_cuda.h"

#include <climits>

#include "attention/work_partition.h"
#include "common/device_limits.h"

namespace pagedinfer {

namespace attention {

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBuckets = 256;  // of the counting sort, by the number of key tiles

struct PlanKernelParams {
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  int32_t* plan;
  int num_seqs, group, num_kv_heads, sliding_window, grid, num_sms;
  bool deterministic;
  SharedPrefixes prefixes;
};

// How many keys of a sequence are read with the prefix of its group.
__device__ int prefix_len(const SharedPrefixes& prefixes, int seq) {
  int len = 0;
  for (int g = 0; g < prefixes.num_groups; ++g) {
    if (seq >= prefixes.start[g] && seq < prefixes.start[g + 1]) len = prefixes.lens[g];
  }
  return len;
}

struct Counts {
  int tiles, decode_seqs, zero_runs, prefill_tiles;
};

__device__ Counts operator+(const Counts& a, const Counts& b) {
  return {a.tiles + b.tiles, a.decode_seqs + b.decode_seqs, a.zero_runs + b.zero_runs,
          a.prefill_tiles + b.prefill_tiles};
}

__device__ Counts shuffle_up(const Counts& a, int delta) {
  return {__shfl_up_sync(~0u, a.tiles, delta), __shfl_up_sync(~0u, a.decode_seqs, delta),
          __shfl_up_sync(~0u, a.zero_runs, delta), __shfl_up_sync(~0u, a.prefill_tiles, delta)};
}

// The sums over all threads before this one, and over all threads. Called by the whole block.
__device__ Counts exclusive_sum(const Counts& mine, Counts* warp_sums, Counts* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Counts sum = mine;
  for (int delta = 1; delta < 32; delta *= 2) {
    const Counts before = shuffle_up(sum, delta);
    if (lane >= delta) sum = sum + before;
  }
  __syncthreads();  // an earlier call's reads are done
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  Counts before_warp{}, all{};
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before_warp = all;
    all = all + warp_sums[w];
  }
  *total = all;
  return before_warp + Counts{sum.tiles - mine.tiles, sum.decode_seqs - mine.decode_seqs,
                              sum.zero_runs - mine.zero_runs,
                              sum.prefill_tiles - mine.prefill_tiles};
}

// A counting sort, the most tiles first: `put`(place, record, tiles) for each of `count` records,
// which `get`(i, &tiles) returns. The order of those in a bucket varies from run to run, and no
// result depends on it. Called by the whole block.
template <typename Record, typename Get, typename Put>
__device__ void sort_by_tiles(int count, int most_tiles, int* histogram, Counts* warp_sums,
                              const Get& get, const Put& put) {
  auto bucket_of = [&](int tiles) {
    return kBuckets - 1 -
           static_cast<int>(static_cast<int64_t>(tiles) * (kBuckets - 1) / larger(1, most_tiles));
  };
  int tiles;
  for (int i = threadIdx.x; i < kBuckets; i += kThreads) histogram[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    get(i, &tiles);
    atomicAdd(&histogram[bucket_of(tiles)], 1);
  }
  __syncthreads();
  const int in_bucket = threadIdx.x < kBuckets ? histogram[threadIdx.x] : 0;
  Counts unused;
  const int offset = exclusive_sum({in_bucket, 0, 0, 0}, warp_sums, &unused).tiles;
  if (threadIdx.x < kBuckets) histogram[threadIdx.x] = offset;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Record record = get(i, &tiles);
    put(atomicAdd(&histogram[bucket_of(tiles)], 1), record, tiles);
  }
  __syncthreads();
}

// The last of values[0 .. count) that is <= key; values ascend, values[0] <= key. `stride` int32s
// apart.
__device__ int last_at_most(const int32_t* values, int stride, int count, int key) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (values[static_cast<int64_t>(middle) * stride] <= key ? low : high) = middle;
  }
  return low;
}

__device__ BlockRecord block_record(int block, const Partition& partition,
                                    const SequenceRecord* sequences, int num_sequences, int units,
                                    int total, bool deterministic) {
  constexpr int kStride = sizeof(SequenceRecord) / kInts;
  // A range's end is cut the same way as the next range's begin.
  auto cut = [&](int tile, int* index) {
    *index = last_at_most(&sequences->list_begin, kStride, num_sequences, tile);
    const SequenceRecord& s = sequences[*index];
    const int begin = s.list_begin + (tile - s.list_begin) / s.num_tiles * s.num_tiles;
    return Unit{begin, s.num_tiles, chunk_tiles(s.num_tiles, deterministic)}.cut(tile);
  };
  const int first = partition.start(block), last = partition.start(block + 1);
  BlockRecord record{};
  if (first >= total) return record;
  int index, unused;
  const int begin = cut(first, &index);
  const int end = last >= total ? total : cut(last, &unused);
  if (begin >= end) return record;
  if (begin >= sequences[index].list_begin + units * sequences[index].num_tiles) ++index;
  record.sequence = sequences[index];
  record.num_tiles = end - begin;
  record.index = index;
  record.unit = (begin - record.sequence.list_begin) / record.sequence.num_tiles;
  record.tile = (begin - record.sequence.list_begin) % record.sequence.num_tiles;
  record.sequences_after = num_sequences - index - 1;
  record.total_tiles = total;
  const int first_unit = begin - record.tile;
  record.owner = partition.block_of(first_unit);
  record.first_parts = partition.num_blocks(first_unit, record.sequence.num_tiles);
  const SequenceRecord& s =
      sequences[last_at_most(&sequences->list_begin, kStride, num_sequences, end - 1)];
  const int last_unit = end - 1 - (end - 1 - s.list_begin) % s.num_tiles;
  record.last_parts = partition.num_blocks(last_unit, s.num_tiles);
  return record;
}

// The `index`th prefill tile in the order of the sequences, and how many key tiles it walks.
__device__ PrefillTile prefill_tile(const PlanKernelParams& p, const int32_t* prefill_begin,
                                    int index, int* cost) {
  const int seq = last_at_most(prefill_begin, 1, p.num_seqs, index);
  PrefillTile tile{};
  tile.seq = seq;
  tile.query_start = p.query_start_loc[seq];
  tile.query_len = p.query_start_loc[seq + 1] - tile.query_start;
  tile.seq_len = p.seq_lens[seq];
  tile.first_row = (index - prefill_begin[seq]) * kPrefillTileRows;
  const int last_row = smaller(tile.first_row + kPrefillTileRows, tile.query_len * p.group) - 1;
  const int last_position = tile.seq_len - tile.query_len + last_row / p.group;
  const int first_position = tile.seq_len - tile.query_len + tile.first_row / p.group;
  const int begin = p.sliding_window > 0 ? larger(0, first_position - p.sliding_window + 1) : 0;
  *cost = larger(0, ceil_div(last_position + 1, kTileTokens) - begin / kTileTokens);
  return tile;
}

__global__ __launch_bounds__(kThreads) void attention_plan_kernel(
    const __grid_constant__ PlanKernelParams p) {
  __shared__ Counts warp_sums[kWarps];
  __shared__ int histogram[kBuckets];
  __shared__ int max_cost, least_tiles, most_tiles;
  __shared__ unsigned long long prefill_cost;

  const PlanLayout layout(p.grid, p.num_seqs);
  auto* header = reinterpret_cast<PlanHeader*>(p.plan);
  auto* blocks = reinterpret_cast<BlockRecord*>(p.plan + layout.blocks);
  auto* sequences = reinterpret_cast<SequenceRecord*>(p.plan + layout.sequences);
  auto* by_length = reinterpret_cast<SequenceRecord*>(p.plan + layout.by_length);
  auto* zero_runs = reinterpret_cast<ZeroRun*>(p.plan + layout.zero_runs);
  auto* prefill_tiles = reinterpret_cast<PrefillTile*>(p.plan + layout.prefill_tiles);
  int32_t* prefill_begin = p.plan + layout.prefill_begin;
  const int units = p.num_kv_heads * row_slices(p.group);

  if (threadIdx.x == 0) max_cost = most_tiles = 0, least_tiles = INT_MAX, prefill_cost = 0;
  for (int i = threadIdx.x; i <= p.grid; i += kThreads) p.plan[layout.counters + i] = 0;
  __syncthreads();  // before any warp counts its sequences in

  // Sequences: what each is, and its place among its like.
  Counts before{};
  for (int base = 0; base < p.num_seqs; base += kThreads) {
    const int seq = base + threadIdx.x;
    SequenceRecord s{};
    Counts mine{};
    if (seq < p.num_seqs) {
      s.seq = seq;
      s.query_start = p.query_start_loc[seq];
      s.query_len = p.query_start_loc[seq + 1] - s.query_start;
      s.seq_len = p.seq_lens[seq];
      if (s.query_len > 0 && s.seq_len <= 0) {
        mine.zero_runs = 1;
      } else if (s.query_len > 0 && is_decode(s.query_len, p.group)) {
        s.first_key = p.prefixes.num_groups > 0
                          ? prefix_len(p.prefixes, seq)
                          : first_key(s.seq_len, s.query_len, p.sliding_window);
        s.first_tile = s.first_key / kTileTokens;
        s.num_tiles = ceil_div(s.seq_len, kTileTokens) - s.first_tile;
        mine.decode_seqs = 1;
        mine.tiles = units * s.num_tiles;
        atomicMin(&least_tiles, s.num_tiles);
        atomicMax(&most_tiles, s.num_tiles);
      } else if (s.query_len > 0) {
        mine.prefill_tiles = ceil_div(s.query_len * p.group, kPrefillTileRows);
        atomicMax(&max_cost, ceil_div(s.seq_len, kTileTokens));
      }
    }
    Counts total;
    const Counts place = before + exclusive_sum(mine, warp_sums, &total);
    before = before + total;
    if (seq < p.num_seqs) prefill_begin[seq] = place.prefill_tiles;
    if (mine.zero_runs) zero_runs[place.zero_runs] = {s.query_start, s.query_len};
    if (mine.decode_seqs) {
      s.list_begin = place.tiles;
      sequences[place.decode_seqs] = s;
    }
  }
  if (threadIdx.x == 0) {
    *header = PlanHeader{
        .total_tiles = before.tiles,
        .num_decode_seqs = before.decode_seqs,
        .num_zero_runs = before.zero_runs,
        .num_prefill_tiles = before.prefill_tiles,
        .first_padded_row = p.query_start_loc[p.num_seqs],
        .deterministic = p.deterministic,
    };
  }
  __syncthreads();

  // Decode: units that are dealt, by falling length, or the grid's ranges.
  const UnitDeal deal{before.decode_seqs * units, p.grid};
  const bool deals = deal.pays(least_tiles, most_tiles, before.tiles);
  if (deals) {
    sort_by_tiles<SequenceRecord>(
        before.decode_seqs, most_tiles, histogram, warp_sums,
        [&](int i, int* tiles) {
          *tiles = sequences[i].num_tiles;
          return sequences[i];
        },
        [&](int place, const SequenceRecord& s, int) { by_length[place] = s; });
  }
  const Partition partition(before.tiles, p.grid);
  for (int b = threadIdx.x; b < p.grid; b += kThreads) {
    BlockRecord record{};
    if (deals) {
      set_dealt_unit(record, by_length, UnitDeal::unit(b, p.grid, 0), units);
      record.total_tiles = before.tiles;
      record.dealt_units = deal.num_units;
    } else {
      record = block_record(b, partition, sequences, before.decode_seqs, units, before.tiles,
                            p.deterministic);
    }
    record.first_padded_row = p.query_start_loc[p.num_seqs];
    record.deterministic = p.deterministic;
    record.has_zero_runs = before.zero_runs > 0;
    blocks[b] = record;
  }

  // Prefill.
  if (before.prefill_tiles == 0) return;
  int64_t cost_sum = 0;
  sort_by_tiles<PrefillTile>(
      before.prefill_tiles, max_cost, histogram, warp_sums,
      [&](int i, int* cost) { return prefill_tile(p, prefill_begin, i, cost); },
      [&](int place, const PrefillTile& tile, int cost) {
        prefill_tiles[place] = tile;
        cost_sum += cost * kPrefillKeysCost + kPrefillItemCost;
      });
  if (cost_sum > 0) atomicAdd(&prefill_cost, cost_sum * p.num_kv_heads);
  __syncthreads();
  if (threadIdx.x == 0) {
    header->prefill_blocks =
        prefill_blocks_beside_decode(p.num_sms, static_cast<int64_t>(prefill_cost),
                                     static_cast<int64_t>(before.tiles) * kDecodeTileCost);
  }
}

}  // namespace

}  // namespace attention

cudaError_t attention_plan_sizes_cuda(const AttentionPlanShape& shape, AttentionPlanSizes* sizes) {
  using namespace attention;
  DeviceLimits limits;
  if (cudaError_t status = device_limits(&limits); status != cudaSuccess) return status;
  const int grid = decode_grid(limits.num_sms, shape.head_dim);
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t prefill_tiles =
      max_prefill_tiles(shape.num_seqs, shape.num_tokens, shape.max_query_len, group);
  sizes->plan = PlanLayout(grid, shape.num_seqs).prefill_tiles +
                prefill_tiles * static_cast<int64_t>(sizeof(PrefillTile) / kInts);
  // Of each row: head_dim sums, the maximum and the sum of the exponentials.
  sizes->workspace = grid * static_cast<int64_t>(kSlotsPerBlock) *
                     partial_rows(shape.max_query_len, group) * (shape.head_dim + 2);
  return cudaSuccess;
}

cudaError_t launch_attention_plan(const AttentionPlanParams& params, cudaStream_t stream) {
  using namespace attention;
  const AttentionPlanShape& shape = params.shape;
  DeviceLimits limits;
  if (cudaError_t status = device_limits(&limits); status != cudaSuccess) return status;
  const int grid = decode_grid(limits.num_sms, shape.head_dim);
  const PlanKernelParams kernel_params{
      .query_start_loc = params.query_start_loc,
      .seq_lens = params.seq_lens,
      .plan = params.plan,
      .num_seqs = static_cast<int>(shape.num_seqs),
      .group = static_cast<int>(shape.num_heads / shape.num_kv_heads),
      .num_kv_heads = static_cast<int>(shape.num_kv_heads),
      .sliding_window = window_of(params.sliding_window),
      .grid = grid,
      .num_sms = limits.num_sms,
      .deterministic = params.deterministic,
      .prefixes = params.prefixes,
  };
  attention_plan_kernel<<<1, kThreads, 0, stream>>>(kernel_params);
  return cudaGetLastError();
}

}  // namespace pagedinfer
