// How the GPU's attention work is counted, cut and found again: plain arithmetic, the same on the
// host and on the device, without CUDA headers, so that a host program can test it.
//
// Rows. The query rows of one sequence that read one KV head are packed: packed row r of KV head h
// is query token r / group and query head h * group + r % group, with group = num_heads /
// num_kv_heads.
//
// Decode. A sequence with one query token, or with at most kDecodeRows packed rows, is decode work:
// it is cut along its keys. A *unit* is one (sequence, KV head, slice of kDecodeRows packed rows);
// it has as many *tiles* of kTileTokens keys as its sequence. The tiles of all units, sequence by
// sequence and head by head, form one list, which is cut into contiguous ranges of equal length,
// one a block. A unit that lies in several ranges is computed in parts, which the last block to
// finish merges. Where there are many units they are dealt to the blocks whole instead (UnitDeal).
//
// In deterministic mode ranges are cut at *chunks* only: chunk_tiles tiles, a number that depends
// on the sequence's length alone. A chunk belongs to the range that its first tile falls into,
// starts from an empty state, and chunks are always folded one after another from the left, so that
// where a range ends does not show in the result.
//
// Prefill. Every other sequence is cut into tiles of kPrefillTileRows packed rows, each of which
// walks its keys alone.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PAGEDINFER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PAGEDINFER_HOST_DEVICE inline
#endif

namespace pagedinfer::attention {

constexpr int kTileTokens = 64;  // keys in a tile
constexpr int kDecodeRows = 16;  // packed rows of a unit: one m16 tile of the tensor cores

// Deterministic mode: at most so many chunks a sequence, none shorter than this.
constexpr int kMaxChunks = 16;
constexpr int kMinChunkTiles = 4;

// Places for partial results that a block has; slot s of block b is b * kSlotsPerBlock + s:
//   0 .. kMaxChunks - 2   its parts of the unit that began in an earlier range: slot 0 alone or, in
//                         deterministic mode, one for each chunk
//   kPrefixSlot, + 1      its part of a unit that begins in its range ("prefix"); in deterministic
//                         mode chunks are folded from the one into the other in turn
constexpr int kSlotsPerBlock = kMaxChunks + 1;
constexpr int kPrefixSlot = kMaxChunks - 1;

// Blocks of the decode grid for each multiprocessor. Two, with three stages of 32 KB each, is what
// brings the bare loads of a paged cache closest to the memory's rate on an H200 (4.34 of 4.39
// TB/s); one block with six stages reached 4.1. Small heads have half the bytes to a step's
// instructions: a third block gave 64 x 2,048 3.69 TB/s instead of 3.51.
PAGEDINFER_HOST_DEVICE constexpr int decode_blocks_per_sm(int64_t head_dim) {
  return head_dim <= 64 ? 3 : 2;
}

// Blocks of the decode kernel: fixed, so that a captured graph stays valid for any lengths.
inline int decode_grid(int num_sms, int64_t head_dim) {
  return num_sms * decode_blocks_per_sm(head_dim);
}

constexpr int kPrefillTileRows = 128;  // packed rows of a prefill tile

// What takes a multiprocessor how long, in units of 0.18 us at a head_dim of 128 on an H200: a
// prefill tile's products with kTileTokens keys, and its begin and end; a tile of a decode unit,
// where so few multiprocessors decode that the memory's rate is not their limit.
constexpr int kPrefillKeysCost = 5, kPrefillItemCost = 8, kDecodeTileCost = 4;
// Of 100 multiprocessors: with more than these decode is at the memory's rate.
constexpr int kDecodeShare = 70;

PAGEDINFER_HOST_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
PAGEDINFER_HOST_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
PAGEDINFER_HOST_DEVICE int larger(int a, int b) { return a > b ? a : b; }

PAGEDINFER_HOST_DEVICE bool is_decode(int query_len, int group) {
  return query_len == 1 || query_len * group <= kDecodeRows;
}

// Prefill beside decode: how many of `sms` multiprocessors prefill first, one block each, while
// the others decode; those then help with what is left of the decode work. Prefill is bound by the
// tensor cores and decode by the memory: each gets multiprocessors in proportion to the time that
// it takes of them, but decode no more than the memory has use for.
PAGEDINFER_HOST_DEVICE int prefill_blocks_beside_decode(int sms, int64_t prefill_cost,
                                                        int64_t decode_cost) {
  if (decode_cost == 0) return sms;
  const auto share = static_cast<int>((sms * prefill_cost + prefill_cost + decode_cost - 1) /
                                      (prefill_cost + decode_cost));
  return larger(1, smaller(sms, larger(share, sms - sms * kDecodeShare / 100)));
}

// Slices of kDecodeRows packed rows that a decode sequence has for each KV head: more than one only
// for a single query token whose group is larger than a slice.
PAGEDINFER_HOST_DEVICE int row_slices(int group) { return ceil_div(group, kDecodeRows); }

// The keys that any of a sequence's queries can see are first_key <= key < seq_len.
PAGEDINFER_HOST_DEVICE int first_key(int seq_len, int query_len, int sliding_window) {
  return sliding_window > 0 ? larger(0, seq_len - query_len - sliding_window + 1) : 0;
}

// A window as the kernels hold it: wider than any sequence is as good as none.
inline int window_of(int64_t sliding_window) {
  return sliding_window < (1 << 30) ? static_cast<int>(sliding_window) : 0;
}

PAGEDINFER_HOST_DEVICE int chunk_tiles(int num_tiles, bool deterministic) {
  return deterministic ? larger(kMinChunkTiles, ceil_div(num_tiles, kMaxChunks)) : 1;
}

// The list of `total` tiles, cut into ranges of the same length for at most `blocks` blocks; the
// last one may be shorter, and blocks after it have none. Sharing the remainder out instead would
// not end sooner, and it moves the cuts away from multiples of the length, where the units of an
// even batch are cut least.
struct Partition {
  int length;

  PAGEDINFER_HOST_DEVICE Partition(int total, int blocks)
      : length(larger(1, ceil_div(total, blocks))) {}

  // May lie past the list's end.
  PAGEDINFER_HOST_DEVICE int start(int block) const { return block * length; }

  PAGEDINFER_HOST_DEVICE int block_of(int tile) const { return tile / length; }

  // How many blocks the tiles begin .. begin + num_tiles - 1 lie in.
  PAGEDINFER_HOST_DEVICE int num_blocks(int begin, int num_tiles) const {
    return block_of(begin + num_tiles - 1) - block_of(begin) + 1;
  }
};

// Units dealt to the blocks whole, the longest first: nothing is cut and merged. Of many units, of
// which none is long beside a block's share. All but the last are dealt beforehand, so that a
// block's copies can run ahead into its next unit; those are taken by the blocks that are done.
struct UnitDeal {
  int num_units, blocks;

  // Whether that is faster than ranges, given the tiles of the shortest and the longest unit and of
  // all together. The bounds lie between what won and what lost (docs/decisions/0002). A unit that
  // is taken begins with an empty ring, which a block's share of `share` tiles has to win back:
  // less than 28 do not where units are even (the longest below 5/4 of the mean), since ranges then
  // end together too; 10 do otherwise. No unit may be longer than a share, even ones than 4/7 of
  // it. And what blocks without a unit in the last round could compute meanwhile may be an eighth
  // of all at most.
  PAGEDINFER_HOST_DEVICE bool pays(int least_tiles, int most_tiles, int total_tiles) const {
    const int share = total_tiles / blocks, last_round = num_units % blocks;
    const bool even = most_tiles * int64_t{4} * num_units < int64_t{5} * total_tiles;
    const int idle = last_round == 0 ? 0 : blocks - last_round;
    return may_pay(num_units, blocks) && share >= (even ? 28 : 10) &&
           share * 4 >= most_tiles * (even ? 7 : 4) &&
           int64_t{8} * least_tiles * idle <= total_tiles;
  }

  // False: it is not, whatever the lengths. Known on the host.
  PAGEDINFER_HOST_DEVICE static bool may_pay(int64_t num_units, int blocks) {
    return num_units > blocks;
  }

  // How many units each block has of its own: half a round to one and a half are left to be taken.
  PAGEDINFER_HOST_DEVICE int own() const {
    return larger(1, (2 * num_units - blocks) / (2 * blocks));
  }

  // The turn-th of them: there and back over the blocks, so that each has about as many keys.
  PAGEDINFER_HOST_DEVICE static int unit(int block, int blocks, int turn) {
    return turn * blocks + (turn % 2 == 0 ? block : blocks - 1 - block);
  }

  // The others: what is asked for as the `asked`th, from 0; none if not below num_units.
  PAGEDINFER_HOST_DEVICE int taken(int asked) const { return own() * blocks + asked; }

  // How often all blocks together ask: for each of the others, and each once in vain.
  PAGEDINFER_HOST_DEVICE int times_asked() const { return num_units - own() * blocks + blocks; }
};

// A unit's place in the list, and how it is cut.
struct Unit {
  int begin;      // its first tile in the list
  int num_tiles;  // > 0
  int chunk;      // chunk_tiles(num_tiles, deterministic)

  PAGEDINFER_HOST_DEVICE int num_chunks() const { return ceil_div(num_tiles, chunk); }

  // The first chunk that begins at or after `tile` of the list; num_chunks() if none does.
  PAGEDINFER_HOST_DEVICE int chunk_at(int tile) const {
    return tile <= begin ? 0 : smaller(ceil_div(tile - begin, chunk), num_chunks());
  }

  // Where a cut of the list at `tile` of this unit is made: the next chunk's begin.
  PAGEDINFER_HOST_DEVICE int cut(int tile) const {
    return begin + smaller(chunk_at(tile) * chunk, num_tiles);
  }
};

// Where a block's part of a unit lies, outside deterministic mode. `prefix`: the unit begins in the
// block's range. Part i of a unit is that of the ith block from the one that owns the prefix on.
PAGEDINFER_HOST_DEVICE int part_slot(int block, bool prefix) {
  return block * kSlotsPerBlock + (prefix ? kPrefixSlot : 0);
}

// The same in deterministic mode. Of a unit that begins in its range, a block has one part, the
// fold of all its chunks there; of one that began in an earlier range, one part for each chunk.
// They are numbered in the order in which they are merged.
struct ChunkSlots {
  Partition partition;
  Unit unit;
  int first_block;    // owns the prefix
  int prefix_chunks;  // chunks in it

  PAGEDINFER_HOST_DEVICE ChunkSlots(const Partition& partition, const Unit& unit)
      : partition(partition),
        unit(unit),
        first_block(partition.block_of(unit.begin)),
        prefix_chunks(unit.chunk_at(partition.start(first_block + 1))) {}

  PAGEDINFER_HOST_DEVICE int num_parts() const { return 1 + unit.num_chunks() - prefix_chunks; }

  // The slot of a block's prefix once it holds the chunks up to and including `chunk`.
  PAGEDINFER_HOST_DEVICE int prefix_slot(int block, int chunk) const {
    return block * kSlotsPerBlock + kPrefixSlot + (chunk & 1);
  }

  PAGEDINFER_HOST_DEVICE int later_slot(int block, int chunk) const {
    return block * kSlotsPerBlock + chunk - unit.chunk_at(partition.start(block));
  }

  PAGEDINFER_HOST_DEVICE int slot(int part) const {
    if (part == 0) return prefix_slot(first_block, prefix_chunks - 1);
    const int chunk = prefix_chunks + part - 1;
    return later_slot(partition.block_of(unit.begin + chunk * unit.chunk), chunk);
  }
};

// ---- the plan's buffer: int32s, in this order, every record on a multiple of 16 bytes ----

struct alignas(16) PlanHeader {
  int total_tiles;        // of the decode list
  int num_decode_seqs;    // SequenceRecords
  int num_zero_runs;      // ZeroRuns
  int num_prefill_tiles;  // PrefillTiles
  int first_padded_row;   // rows from here on belong to no sequence
  int deterministic;
  int prefill_blocks;  // see prefill_blocks_beside_decode
  int unused;
};

// A decode sequence.
struct alignas(16) SequenceRecord {
  int seq;
  int query_start, query_len;
  int seq_len;
  int first_key;
  int first_tile;  // first_key / kTileTokens
  int num_tiles;   // from first_tile on, > 0
  int list_begin;  // the first tile of its first unit in the list
};

// What one block of the decode grid does: `num_tiles` tiles from `tile` of `unit` of `sequence` on.
// All that it needs to begin and to end, so that it waits for one read only. Blocks without tiles
// have the fields from first_padded_row on.
struct alignas(16) BlockRecord {
  int num_tiles;
  int index;  // of the SequenceRecord
  int unit;   // KV head * row_slices + slice
  int tile;   // within the unit
  SequenceRecord sequence;
  int owner;            // the block in whose range the first unit begins: it may be an earlier one
  int first_parts;      // how many blocks that unit lies in
  int last_parts;       // the same of the last unit of the range
  int sequences_after;  // SequenceRecords past `index`
  int total_tiles;      // of the list
  int first_padded_row;
  int dealt_units;  // > 0: a UnitDeal of so many, of which the block's first is `unit`; 0: ranges
  bool deterministic, has_zero_runs;
};

// Makes `record` that of a dealt unit; `units`: how many a sequence has.
PAGEDINFER_HOST_DEVICE void set_dealt_unit(BlockRecord& record, const SequenceRecord* by_length,
                                           int unit, int units) {
  record.index = unit / units;
  record.unit = unit - record.index * units;
  record.tile = 0;
  record.sequence = by_length[record.index];
  record.num_tiles = record.sequence.num_tiles;
}

// Rows of a sequence of length 0.
struct alignas(8) ZeroRun {
  int first_row, num_rows;
};

// Rows first_row .. first_row + kPrefillTileRows - 1 of a sequence, for every KV head.
struct alignas(16) PrefillTile {
  int seq;
  int query_start, query_len;
  int seq_len;
  int first_row;
  int unused[3];
};

constexpr int kInts = sizeof(int32_t);

// Offsets, in int32s, of the plan's arrays. They depend on the grid and num_seqs alone: a buffer
// may have been made for more tokens than the batch has.
struct PlanLayout {
  int64_t blocks, counters, units_asked, sequences, by_length, prefill_begin, zero_runs,
      prefill_tiles;

  PAGEDINFER_HOST_DEVICE PlanLayout(int grid, int64_t num_seqs) {
    blocks = sizeof(PlanHeader) / kInts;
    counters = blocks + grid * static_cast<int64_t>(sizeof(BlockRecord) / kInts);
    units_asked = counters + grid;
    sequences = counters + (grid + 1 + 3) / 4 * 4;
    by_length = sequences + num_seqs * static_cast<int64_t>(sizeof(SequenceRecord) / kInts);
    prefill_begin = by_length + num_seqs * static_cast<int64_t>(sizeof(SequenceRecord) / kInts);
    zero_runs = prefill_begin + (num_seqs + 4) / 4 * 4;
    prefill_tiles =
        zero_runs + (num_seqs * static_cast<int64_t>(sizeof(ZeroRun) / kInts) + 3) / 4 * 4;
  }
};

// Whether a batch of such queries can hold prefill work. Known on the host.
PAGEDINFER_HOST_DEVICE bool may_prefill(int64_t max_query_len, int64_t group) {
  return max_query_len > 1 && max_query_len * group > kDecodeRows;
}

// No batch of this shape has more prefill tiles (each one counts once for all KV heads).
inline int64_t max_prefill_tiles(int64_t num_seqs, int64_t num_tokens, int64_t max_query_len,
                                 int64_t group) {
  if (!may_prefill(max_query_len, group)) return 0;
  const int64_t rows = num_tokens * group;
  const int64_t by_seqs =
      num_seqs * ((max_query_len * group + kPrefillTileRows - 1) / kPrefillTileRows);
  const int64_t prefills = rows / (kDecodeRows + 1);
  const int64_t by_rows = rows / kPrefillTileRows + (num_seqs < prefills ? num_seqs : prefills);
  return by_seqs < by_rows ? by_seqs : by_rows;
}

// Rows that a partial result has room for.
inline int64_t partial_rows(int64_t max_query_len, int64_t group) {
  const int64_t rows = (max_query_len > 1 ? max_query_len : 1) * group;
  return rows < kDecodeRows ? rows : kDecodeRows;
}

}  // namespace pagedinfer::attention
