// decode_inputs and keep_tokens on the GPU: see decode_inputs.h for the maths and the tensors.
//
// Grid of decode_inputs: one block of threads per row, which copies the row's blocks; thread 0
// writes the rest. A new block is written and copied by one and the same thread, so none waits for
// another. Grid of keep_tokens: a thread per row. Shared memory: none. The launches are dependent
// (dependent_launch.cuh).
#include "common/dependent_launch.cuh"
#include "runner/decode_inputs_cuda.h"

namespace pagedinfer {

namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    decode_inputs_kernel(const __grid_constant__ DecodeInputsParams p) {
  const int64_t row = blockIdx.x;
  begin_dependent();
  const int slot = p.packed[row];
  const int length = p.packed[p.num_rows + row];
  const int new_block = p.packed[2 * p.num_rows + row];
  if (slot < 0) {
    if (threadIdx.x == 0) p.input_ids[row] = p.positions[row] = 0, p.slot_mapping[row] = -1;
    return;
  }
  const int block_size = static_cast<int>(p.block_size);
  const int position = length - 1, place = position / block_size;
  int32_t* blocks = p.block_table + slot * p.num_columns;
  int32_t* row_blocks = p.row_blocks + row * p.num_columns;
  if (threadIdx.x == 0) {
    const int64_t block = new_block < 0 ? blocks[place] : new_block;
    p.input_ids[row] = p.last_tokens[slot];
    p.positions[row] = position;
    p.slot_mapping[row] = block * block_size + position % block_size;
    p.output_positions[slot] = length - p.num_prompt_tokens[slot];
  }
  for (int i = threadIdx.x; i <= place; i += kThreads) {
    if (i == place && new_block >= 0) {
      blocks[i] = row_blocks[i] = new_block;
    } else {
      row_blocks[i] = blocks[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    keep_tokens_kernel(const __grid_constant__ KeepTokensParams p) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  begin_dependent();
  if (row >= p.num_rows) return;
  const int slot = p.slots[row];
  const int64_t token = p.token_ids[row];
  if (slot >= 0) p.last_tokens[slot] = token < 0 ? 0 : token;
}

}  // namespace

cudaError_t launch_decode_inputs(const DecodeInputsParams& p, cudaStream_t stream) {
  return launch_dependent(decode_inputs_kernel, static_cast<unsigned>(p.num_rows), kThreads, 0,
                          stream, p);
}

cudaError_t launch_keep_tokens(const KeepTokensParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.num_rows + kThreads - 1) / kThreads);
  return launch_dependent(keep_tokens_kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace pagedinfer
