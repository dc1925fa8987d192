// decode_inputs: the input tensors of a step in which every request computes the token that it drew
// last, from the state that the device keeps by slot; and what a step drew, kept there.
//
//   for each row i of the step, with slot = slots[i], length = lengths[i], position = length - 1,
//   place = position / block_size:
//     block_table[slot, place] = new_blocks[i]                     if that is not -1
//     output_positions[slot] = length - num_prompt_tokens[slot]
//     input_ids[i] = last_tokens[slot];  positions[i] = position
//     slot_mapping[i] = block_table[slot, place] * block_size + position % block_size
//     row_blocks[i, :place + 1] = block_table[slot, :place + 1]    the rest is left as it is
//   slot -1 is padding: input_ids 0, positions 0, slot_mapping -1, and nothing else.
#pragma once

#include <cstdint>

namespace pagedinfer {

struct DecodeInputsParams {
  const int32_t* packed;             // [3, num_rows]: slots, lengths, new blocks
  const int64_t* last_tokens;        // [num_slots]
  const int64_t* num_prompt_tokens;  // [num_slots]
  int32_t* block_table;              // [num_slots, num_columns]
  int64_t* output_positions;         // [num_slots]
  int64_t* input_ids;                // [num_rows]
  int64_t* positions;                // [num_rows]
  int64_t* slot_mapping;             // [num_rows]
  int32_t* row_blocks;               // [num_rows, num_columns]
  int64_t num_rows, num_slots, num_columns, block_size;
};

// last_tokens[slots[i]] = max(token_ids[i], 0) where slots[i] is not -1.
struct KeepTokensParams {
  const int32_t* slots;      // [num_rows]
  const int64_t* token_ids;  // [num_rows]; -1: none was drawn
  int64_t* last_tokens;      // [num_slots]
  int64_t num_rows, num_slots;
};

}  // namespace pagedinfer
