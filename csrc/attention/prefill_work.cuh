// What a block of a prefill kernel does for one tile of the plan and one KV head.
#pragma once

#include "attention/kernel_params.cuh"

namespace pagedinfer::attention {

// The rows of one block and the keys that they see.
struct TileWork {
  PrefillTile tile;
  int kv_head, rows;             // rows: of the tile that exist
  int first_token, first_head;   // of its first row: see RowPlace
  int key_begin;                 // keys from here on to the last row's are seen by some row
  int all_see_from, all_see_to;  // keys in between are seen by every row
  int first_tile, num_tiles;     // of keys

  __device__ __forceinline__ TileWork(const KernelParams& p, const PrefillTile& tile, int kv_head,
                                      int tile_rows, int tile_keys)
      : tile(tile), kv_head(kv_head) {
    rows = smaller(tile_rows, tile.query_len * p.group - tile.first_row);
    first_token = tile.first_row / p.group;
    first_head = tile.first_row - first_token * p.group;
    const int before = tile.seq_len - tile.query_len;
    const int first_position = before + first_token;
    const int last_position = before + (tile.first_row + rows - 1) / p.group;
    key_begin = p.window > 0 ? larger(0, first_position - p.window + 1) : 0;
    all_see_from = p.window > 0 ? last_position - p.window + 1 : 0;
    all_see_to = first_position;
    first_tile = key_begin / tile_keys;
    num_tiles = larger(0, ceil_div(last_position + 1, tile_keys) - first_tile);
  }

  // A tile of the rows of a shared prefix, which all see all of its keys: one of `splits` parts of
  // these, which may have none.
  __device__ __forceinline__ TileWork(const KernelParams& p, const PrefillTile& tile, int kv_head,
                                      int tile_rows, int tile_keys, int split, int splits)
      : tile(tile), kv_head(kv_head), all_see_from(0) {
    rows = smaller(tile_rows, tile.query_len * p.group - tile.first_row);
    all_see_to = tile.seq_len - 1;
    const int tiles = ceil_div(tile.seq_len, tile_keys);
    const int part = ceil_div(tiles, splits);
    first_tile = split * part;
    key_begin = first_tile * tile_keys;
    num_tiles = larger(0, smaller(part, tiles - first_tile));
  }

  // The last key that a row of a tile of the plan sees; rows that do not exist are counted on.
  __device__ __forceinline__ int last_key(const KernelParams& p, int row) const {
    return all_see_to + RowPlace(p, first_head, row).token;
  }
};

// Where the output of a query head goes; `token` counts in the batch.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ T* output_of(const KernelParams& p, int token, int head) {
  return static_cast<T*>(p.op.out) + (token * p.op.num_heads + head) * HEAD_DIM;
}

}  // namespace pagedinfer::attention
