#include "runner/decode_inputs.h"

#include <algorithm>

#include "common/check.h"
#include "common/cuda_context.h"
#include "ops.h"
#include "runner/decode_inputs_cuda.h"

namespace pagedinfer {

namespace {

void decode_inputs_cpu(const DecodeInputsParams& p) {
  const int32_t *slots = p.packed, *lengths = p.packed + p.num_rows;
  const int32_t* new_blocks = p.packed + 2 * p.num_rows;
  for (int64_t i = 0; i < p.num_rows; ++i) {
    const int64_t slot = slots[i], length = lengths[i];
    if (slot < 0) {
      p.input_ids[i] = p.positions[i] = 0;
      p.slot_mapping[i] = -1;
      continue;
    }
    PAGEDINFER_CHECK(slot < p.num_slots, "decode_inputs: slots[", i, "] is ", slot,
                     "; expected less than num_slots=", p.num_slots);
    PAGEDINFER_CHECK(length > 0 && length <= p.num_columns * p.block_size,
                     "decode_inputs: lengths[", i, "] is ", length, "; expected 1 to ",
                     p.num_columns * p.block_size, ", what the block table has room for");
    const int64_t position = length - 1, place = position / p.block_size;
    int32_t* blocks = p.block_table + slot * p.num_columns;
    if (new_blocks[i] >= 0) blocks[place] = new_blocks[i];
    p.output_positions[slot] = length - p.num_prompt_tokens[slot];
    p.input_ids[i] = p.last_tokens[slot];
    p.positions[i] = position;
    p.slot_mapping[i] = blocks[place] * p.block_size + position % p.block_size;
    std::copy_n(blocks, place + 1, p.row_blocks + i * p.num_columns);
  }
}

void keep_tokens_cpu(const KeepTokensParams& p) {
  for (int64_t i = 0; i < p.num_rows; ++i) {
    const int64_t slot = p.slots[i];
    if (slot < 0) continue;
    PAGEDINFER_CHECK(slot < p.num_slots, "keep_tokens: slots[", i, "] is ", slot,
                     "; expected less than num_slots=", p.num_slots);
    p.last_tokens[slot] = std::max<int64_t>(p.token_ids[i], 0);
  }
}

// A contiguous tensor of this shape and dtype, on the device of the others.
void check_tensor(ArgumentChecker& check, const char* name, const Tensor& tensor,
                  std::initializer_list<const char*> dims, ScalarType dtype) {
  check.shape(name, tensor, dims);
  check.dtype(name, tensor, dtype);
  check.same_device(name, tensor);
  check.contiguous(name, tensor);
}

}  // namespace

void decode_inputs(const Tensor& packed, const Tensor& last_tokens, const Tensor& num_prompt_tokens,
                   int64_t block_size, Tensor block_table, Tensor output_positions,
                   Tensor input_ids, Tensor positions, Tensor slot_mapping, Tensor row_blocks) {
  ArgumentChecker check("decode_inputs");
  check_tensor(check, "packed", packed, {"3", "num_rows"}, ScalarType::Int);
  check_tensor(check, "last_tokens", last_tokens, {"num_slots"}, ScalarType::Long);
  check_tensor(check, "num_prompt_tokens", num_prompt_tokens, {"num_slots"}, ScalarType::Long);
  check_tensor(check, "block_table", block_table, {"num_slots", "num_columns"}, ScalarType::Int);
  check_tensor(check, "output_positions", output_positions, {"num_slots"}, ScalarType::Long);
  check_tensor(check, "input_ids", input_ids, {"num_rows"}, ScalarType::Long);
  check_tensor(check, "positions", positions, {"num_rows"}, ScalarType::Long);
  check_tensor(check, "slot_mapping", slot_mapping, {"num_rows"}, ScalarType::Long);
  check_tensor(check, "row_blocks", row_blocks, {"num_rows", "num_columns"}, ScalarType::Int);
  PAGEDINFER_CHECK(block_size > 0, "decode_inputs: block_size is ", block_size, "; expected > 0");

  const DecodeInputsParams params{
      .packed = static_cast<const int32_t*>(packed.const_data_ptr()),
      .last_tokens = static_cast<const int64_t*>(last_tokens.const_data_ptr()),
      .num_prompt_tokens = static_cast<const int64_t*>(num_prompt_tokens.const_data_ptr()),
      .block_table = static_cast<int32_t*>(block_table.mutable_data_ptr()),
      .output_positions = static_cast<int64_t*>(output_positions.mutable_data_ptr()),
      .input_ids = static_cast<int64_t*>(input_ids.mutable_data_ptr()),
      .positions = static_cast<int64_t*>(positions.mutable_data_ptr()),
      .slot_mapping = static_cast<int64_t*>(slot_mapping.mutable_data_ptr()),
      .row_blocks = static_cast<int32_t*>(row_blocks.mutable_data_ptr()),
      .num_rows = check.size("num_rows"),
      .num_slots = check.size("num_slots"),
      .num_columns = check.size("num_columns"),
      .block_size = block_size,
  };
  if (params.num_rows == 0) return;
  if (is_cpu(packed)) {
    decode_inputs_cpu(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(packed);
  check_cuda("decode_inputs", launch_decode_inputs(params, context.stream()));
#endif
}

void keep_tokens(const Tensor& slots, const Tensor& token_ids, Tensor last_tokens) {
  ArgumentChecker check("keep_tokens");
  check_tensor(check, "slots", slots, {"num_rows"}, ScalarType::Int);
  check_tensor(check, "token_ids", token_ids, {"num_rows"}, ScalarType::Long);
  check_tensor(check, "last_tokens", last_tokens, {"num_slots"}, ScalarType::Long);

  const KeepTokensParams params{
      .slots = static_cast<const int32_t*>(slots.const_data_ptr()),
      .token_ids = static_cast<const int64_t*>(token_ids.const_data_ptr()),
      .last_tokens = static_cast<int64_t*>(last_tokens.mutable_data_ptr()),
      .num_rows = check.size("num_rows"),
      .num_slots = check.size("num_slots"),
  };
  if (params.num_rows == 0) return;
  if (is_cpu(slots)) {
    keep_tokens_cpu(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(slots);
  check_cuda("keep_tokens", launch_keep_tokens(params, context.stream()));
#endif
}

}  // namespace pagedinfer
