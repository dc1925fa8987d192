// expert_gate_up and expert_down on the GPU: see expert_gemm.h for the maths and the tensors.
//
// Made for few rows an expert, where the time is that of reading the weights once. Grid: pieces of
// kWeightRows weight rows x tiles; a block owns one piece for one tile's rows, and walks along the
// width in steps of kStep elements, kStages - 1 of them on their way from memory. A tile that is
// not there (expert -1) costs a block that ends at once; that is what lets the grid, and so a CUDA
// graph, stay the same whatever the routing.
//
// The four warps share the tile's rows and the piece's weight rows out among them, in fragments of
// mma.sync (16 rows x 8 weight rows). For gate_up a piece is half gate rows and half the up rows
// that belong to them, at the same places in each thread's fragments, which are multiplied there.
//
// Shared memory: kStages x (kWeightRows + ROWS) x kStep elements. Template parameters: T, the
// element type; ROWS, block_rows; GATE_UP, which op.
#include "attention/mma_primitives.cuh"
#include "common/dependent_launch.cuh"
#include "common/dtype.h"
#include "experts/expert_gemm_cuda.h"
#include "layers/elements.cuh"

namespace pagedinfer {

namespace {

using attention::commit_copies;
using attention::copy_async;
using attention::load_matrices;
using attention::multiply_add;
using attention::pack;
using attention::shared_address;
using attention::wait_copies;

constexpr int kThreads = 128;
constexpr int kWeightRows = 64;
constexpr int kStep = 64;
constexpr int kChunks = kStep / 8;                // of 16 bytes
constexpr int kRowsOfAPass = kThreads / kChunks;  // rows that all threads copy at a time
using Rows = attention::TileRows<kStep>;

// How the warps share a tile: kAlong of them along its rows, the others along the weight rows.
template <int ROWS>
struct Shares {
  static constexpr int kAlong = ROWS == 16 ? 1 : 2;
  static constexpr int kAcross = 4 / kAlong;
  static constexpr int kRowFragments = ROWS / 16 / kAlong;
  static constexpr int kWeightFragments = kWeightRows / 8 / kAcross;
  static constexpr int kStages = ROWS == 16 ? 6 : 4;
  static constexpr int kStageBytes = (kWeightRows + ROWS) * Rows::kRowBytes;
};

// The first of the eight weight rows, within the piece, of a warp's i-th fragment.
template <int FRAGMENTS, bool GATE_UP>
__device__ __forceinline__ int weight_row_of(int across, int i) {
  if constexpr (!GATE_UP) return (across * FRAGMENTS + i) * 8;
  constexpr int kHalf = FRAGMENTS / 2;
  return i < kHalf ? (across * kHalf + i) * 8 : kWeightRows / 2 + (across * kHalf + i - kHalf) * 8;
}

template <typename T>
__device__ __forceinline__ float silu(float x) {
  return rounded_through<T>(__fdividef(x, 1.0f + __expf(-x)));
}

template <typename T, int ROWS, bool GATE_UP>
__global__ void __launch_bounds__(kThreads)
    expert_gemm_kernel(const __grid_constant__ ExpertGemmParams p) {
  using S = Shares<ROWS>;
  constexpr int kColumns = GATE_UP ? kWeightRows / 2 : kWeightRows;  // of the output, a piece
  extern __shared__ __align__(128) unsigned char memory[];
  begin_dependent();

  const int num_tiles = static_cast<int>(p.num_tiles);
  const int piece = blockIdx.x / num_tiles;
  const ExpertTile tile = p.tiles[blockIdx.x - piece * num_tiles];
  if (tile.expert < 0) return;

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunk = thread % kChunks, first_row = thread / kChunks;
  const int width = static_cast<int>(p.width), columns = static_cast<int>(p.columns);
  const int first_column = piece * kColumns;

  // Where this thread's chunks come from; a row that is not there is filled with zeros.
  constexpr int kWeightPasses = kWeightRows / kRowsOfAPass, kInputPasses = ROWS / kRowsOfAPass;
  const T* weight = static_cast<const T*>(p.weight) +
                    tile.expert * static_cast<int64_t>(GATE_UP ? 2 * columns : columns) * width;
  const T* weight_rows[kWeightPasses];
  bool weight_there[kWeightPasses];
#pragma unroll
  for (int i = 0; i < kWeightPasses; ++i) {
    const int row = i * kRowsOfAPass + first_row;
    const bool is_up = GATE_UP && row >= kColumns;
    const int column = first_column + (is_up ? row - kColumns : row);
    weight_there[i] = column < columns;
    weight_rows[i] =
        weight +
        (weight_there[i] ? column + (is_up ? columns : 0) : 0) * static_cast<int64_t>(width) +
        chunk * 8;
  }
  const T* input_rows[kInputPasses];
  bool input_there[kInputPasses];
#pragma unroll
  for (int i = 0; i < kInputPasses; ++i) {
    const int position = tile.begin + i * kRowsOfAPass + first_row;
    input_there[i] = position < tile.end;
    int64_t row = 0;
    if (input_there[i]) {
      row = GATE_UP ? p.pairs[position] / static_cast<int>(p.k) : position;
    }
    input_rows[i] = static_cast<const T*>(p.input) + row * width + chunk * 8;
  }

  const uint32_t shared = shared_address(memory);
  const int num_steps = (width + kStep - 1) / kStep;
  const auto fetch = [&](int step) {
    if (step < num_steps) {
      const uint32_t stage = shared + step % S::kStages * S::kStageBytes;
      const bool there = step * kStep + chunk * 8 < width;
#pragma unroll
      for (int i = 0; i < kWeightPasses; ++i) {
        const bool valid = there && weight_there[i];
        copy_async(stage + Rows::offset(i * kRowsOfAPass + first_row, chunk),
                   valid ? weight_rows[i] + step * kStep : weight_rows[i], valid);
      }
#pragma unroll
      for (int i = 0; i < kInputPasses; ++i) {
        const bool valid = there && input_there[i];
        copy_async(stage + Rows::offset(kWeightRows + i * kRowsOfAPass + first_row, chunk),
                   valid ? input_rows[i] + step * kStep : input_rows[i], valid);
      }
    }
    commit_copies();
  };

  float sums[S::kRowFragments][S::kWeightFragments][4] = {};
  const int along = warp % S::kAlong, across = warp / S::kAlong;
#pragma unroll
  for (int step = 0; step < S::kStages - 1; ++step) fetch(step);
  for (int step = 0; step < num_steps; ++step) {
    wait_copies<S::kStages - 2>();
    __syncthreads();  // the step is there for all, and the stage before it has been used up
    fetch(step + S::kStages - 1);
    const uint32_t stage = shared + step % S::kStages * S::kStageBytes;
#pragma unroll
    for (int part = 0; part < kStep / 16; ++part) {
      uint32_t rows[S::kRowFragments][4];
#pragma unroll
      for (int m = 0; m < S::kRowFragments; ++m) {
        const int row = kWeightRows + (along * S::kRowFragments + m) * 16 + lane % 16;
        load_matrices(rows[m], stage + Rows::offset(row, 2 * part + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < S::kWeightFragments; n += 2) {
        uint32_t weights[4];  // two fragments of eight weight rows
        const int row = weight_row_of<S::kWeightFragments, GATE_UP>(across, n + lane / 16);
        load_matrices(weights, stage + Rows::offset(row + lane % 8, 2 * part + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < S::kRowFragments; ++m) {
          multiply_add<T>(sums[m][n], rows[m], weights[0], weights[1]);
          multiply_add<T>(sums[m][n + 1], rows[m], weights[2], weights[3]);
        }
      }
    }
  }

  // Out: a thread has two neighbouring columns of rows lane / 4 and lane / 4 + 8 of each fragment.
  T* out = static_cast<T*>(p.out);
  constexpr int kResults = GATE_UP ? S::kWeightFragments / 2 : S::kWeightFragments;
#pragma unroll
  for (int m = 0; m < S::kRowFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = tile.begin + (along * S::kRowFragments + m) * 16 + half * 8 + lane / 4;
      if (position >= tile.end) continue;
      const int64_t row = GATE_UP ? position : p.pairs[position];
#pragma unroll
      for (int n = 0; n < kResults; ++n) {
        const int column =
            first_column + weight_row_of<S::kWeightFragments, GATE_UP>(across, n) + lane % 4 * 2;
        if (column >= columns) continue;
        float low = sums[m][n][2 * half], high = sums[m][n][2 * half + 1];
        if constexpr (GATE_UP) {
          const float (&up)[4] = sums[m][n + kResults];
          low = silu<T>(rounded_through<T>(low)) * rounded_through<T>(up[2 * half]);
          high = silu<T>(rounded_through<T>(high)) * rounded_through<T>(up[2 * half + 1]);
        }
        *reinterpret_cast<uint32_t*>(out + row * columns + column) = pack<T>(low, high);
      }
    }
  }
}

template <typename T, int ROWS, bool GATE_UP>
cudaError_t launch(const ExpertGemmParams& p, cudaStream_t stream) {
  constexpr int kBytes = Shares<ROWS>::kStages * Shares<ROWS>::kStageBytes;
  constexpr int64_t kColumns = GATE_UP ? kWeightRows / 2 : kWeightRows;
  const int64_t blocks = (p.columns + kColumns - 1) / kColumns * p.num_tiles;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = expert_gemm_kernel<T, ROWS, GATE_UP>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  return launch_dependent(kernel, static_cast<int>(blocks), kThreads, kBytes, stream, p);
}

template <typename T>
cudaError_t launch_of_type(const ExpertGemmParams& p, cudaStream_t stream) {
  if (p.block_rows == 16) {
    return p.is_gate_up ? launch<T, 16, true>(p, stream) : launch<T, 16, false>(p, stream);
  }
  if (p.block_rows == 64) {
    return p.is_gate_up ? launch<T, 64, true>(p, stream) : launch<T, 64, false>(p, stream);
  }
  return cudaErrorInvalidValue;  // not reached: the entry checks block_rows
}

}  // namespace

cudaError_t launch_expert_gemm(const ExpertGemmParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::float16:
      return launch_of_type<__half>(p, stream);
    case DType::bfloat16:
      return launch_of_type<__nv_bfloat16>(p, stream);
    default:
      return cudaErrorInvalidValue;  // not reached: the entry checks dtypes
  }
}

}  // namespace pagedinfer
