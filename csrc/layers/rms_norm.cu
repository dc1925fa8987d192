// rms_norm on the GPU: see rms_norm.h for the maths and the tensors.
//
// Grid: a row is one thread's, one part of a warp's, or one block's, by its length; short rows
// share a block of kThreadsOfShortRows threads. Every thread holds its share of the row, of the
// residual and of the weight in registers, loaded before anything is waited for, so memory is read
// once. Rows longer than that allows, or whose vectors do not start at multiples of 16 bytes, go to
// rms_norm_any, which reads the row twice (the second time from a cache). The launch is dependent
// (dependent_launch.cuh); of few rows, the residual is asked for before the kernel ahead has ended.
// Shared memory: one partial sum per warp.
// Template parameters: T, the element type; kVec, elements of a vector; kPerThread, vectors a
// thread holds; kRow, whose a row is; kResidual, whether there is one.
#include "common/dependent_launch.cuh"
#include "common/dtype.h"
#include "layers/elements.cuh"
#include "layers/rms_norm_cuda.h"
#include "layers/row_math.cuh"
#include "layers/row_place.cuh"

namespace pagedinfer {

namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 16;
constexpr int kThreadsOfShortRows = 128;
constexpr int kMaxThreadsOfLongRows = kMaxWarps * kWarp;
// From so many rows on a kernel's beginning is little of its time, and nothing is asked for early.
constexpr int64_t kManyRows = 1024;

enum class Row {
  shares_block,  // with others: a power of two of threads, up to a warp
  of_block,      // whose last threads may hold fewer vectors
  of_whole_block
};

// The sum over `threads` neighbouring threads: a power of two up to a warp, or the whole block. All
// threads of the block call it, once.
__device__ __forceinline__ float sum_over(float value, int threads) {
  const int lanes = threads < kWarp ? threads : kWarp;
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  if (threads <= kWarp) return value;

  // Every thread adds the warps' sums up by itself: sooner done than with shuffles.
  __shared__ float4 partial[kMaxWarps / 4];
  const int num_warps = threads / kWarp;
  if (threadIdx.x % kWarp == 0) {
    reinterpret_cast<float*>(partial)[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  value = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxWarps; i += 4) {
    if (i >= num_warps) break;
    const float4 four = partial[i / 4];
    const float second = i + 1 < num_warps ? four.y : 0.0f;
    const float third = i + 2 < num_warps ? four.z : 0.0f;
    const float fourth = i + 3 < num_warps ? four.w : 0.0f;
    value += (four.x + second) + (third + fourth);
  }
  return value;
}

template <typename T, int kVec, int kPerThread, Row kRow, bool kResidual>
__global__ void __launch_bounds__(kMaxThreadsOfLongRows)
    rms_norm_in_registers(const __grid_constant__ RmsNormParams p, int log2_threads_per_row) {
  constexpr bool kBlockPerRow = kRow != Row::shares_block;
  const int threads_per_row = kBlockPerRow ? blockDim.x : 1 << log2_threads_per_row;
  const int thread = kBlockPerRow ? threadIdx.x : threadIdx.x & (threads_per_row - 1);
  const unsigned r =
      kBlockPerRow ? blockIdx.x : (blockIdx.x * blockDim.x + threadIdx.x) >> log2_threads_per_row;
  const RowPlace place = place_of(r, static_cast<unsigned>(p.inner_rows));
  const int vectors = r < p.num_rows ? static_cast<int>(p.hidden / kVec) : 0;
  const float inverse_hidden = 1.0f / static_cast<float>(p.hidden);

  const T* input = place.in(static_cast<const T*>(p.input), p.input_strides);
  T* residual = place.in(static_cast<T*>(p.residual), p.residual_strides);
  T* out = place.in(static_cast<T*>(p.out), p.out_strides);
  const T* weight = static_cast<const T*>(p.weight);
  const auto element = [&](int j) { return (thread + j * threads_per_row) * kVec; };
  const auto holds = [&](int j) {
    return kRow == Row::of_whole_block || thread + j * threads_per_row < vectors;
  };

  let_successor_start();
  if constexpr (kResidual && kBlockPerRow && kVec > 1) {
    if (threadIdx.x == 0 && p.num_rows < kManyRows) {
      ask_for(residual, static_cast<int>(p.hidden * sizeof(T)));
    }
  }
  wait_for_predecessor();
  Vector<T, kVec> x[kPerThread], residuals[kPerThread], weights[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (!holds(j)) continue;
    x[j] = load_vector<kVec>(input + element(j));
    if constexpr (kResidual) residuals[j] = load_vector<kVec>(residual + element(j));
    weights[j] = load_vector<kVec>(weight + element(j));
  }

  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (!holds(j)) continue;
    if constexpr (kResidual) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        x[j].elements[e] =
            rounded<T>(to_float(residuals[j].elements[e]) + to_float(x[j].elements[e]));
      }
      store_vector(residual + element(j), x[j]);
    }
    sum += sum_of_squares(x[j]);
  }

  const float mean = sum_over(sum, threads_per_row) * inverse_hidden;
  const float factor = rsqrtf(mean + p.epsilon);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (holds(j)) store_vector(out + element(j), normalised(x[j], factor, weights[j]));
  }
}

// One block to a row, whatever its length and alignment. A thread reads in the second pass what it
// wrote itself in the first.
template <typename T, int kVec>
__global__ void __launch_bounds__(kMaxThreadsOfLongRows)
    rms_norm_any(const __grid_constant__ RmsNormParams p) {
  const RowPlace place = place_of(blockIdx.x, static_cast<unsigned>(p.inner_rows));
  const T* input = place.in(static_cast<const T*>(p.input), p.input_strides);
  T* residual = place.in(static_cast<T*>(p.residual), p.residual_strides);
  T* out = place.in(static_cast<T*>(p.out), p.out_strides);
  const T* weight = static_cast<const T*>(p.weight);
  const T* normed = p.residual != nullptr ? residual : input;

  begin_dependent();
  float sum = 0.0f;
  for (int64_t i = threadIdx.x * kVec; i < p.hidden; i += blockDim.x * kVec) {
    Vector<T, kVec> v = load_vector<kVec>(input + i);
    if (p.residual != nullptr) {
      const Vector<T, kVec> before = load_vector<kVec>(residual + i);
      for (int e = 0; e < kVec; ++e) {
        v.elements[e] = rounded<T>(to_float(before.elements[e]) + to_float(v.elements[e]));
      }
      store_vector(residual + i, v);
    }
    sum += sum_of_squares(v);
  }

  const float mean = sum_over(sum, blockDim.x) / static_cast<float>(p.hidden);
  const float factor = rsqrtf(mean + p.epsilon);
  for (int64_t i = threadIdx.x * kVec; i < p.hidden; i += blockDim.x * kVec) {
    const Vector<T, kVec> v = load_vector<kVec>(normed + i);
    store_vector(out + i, normalised(v, factor, load_vector<kVec>(weight + i)));
  }
}

template <typename T, int kVec, int kPerThread, bool kResidual>
cudaError_t launch_in_registers(const RmsNormParams& p, cudaStream_t stream) {
  const int64_t threads_needed = (p.hidden / kVec + kPerThread - 1) / kPerThread;
  if (threads_needed > kWarp) {
    const int64_t threads = (threads_needed + kWarp - 1) / kWarp * kWarp;
    const bool whole = threads * kPerThread * kVec == p.hidden;
    const auto kernel =
        whole ? rms_norm_in_registers<T, kVec, kPerThread, Row::of_whole_block, kResidual>
              : rms_norm_in_registers<T, kVec, kPerThread, Row::of_block, kResidual>;
    return launch_dependent(kernel, static_cast<unsigned>(p.num_rows),
                            static_cast<unsigned>(threads), 0, stream, p, 0);
  }
  int log2_threads_per_row = 0;
  while (1 << log2_threads_per_row < threads_needed) ++log2_threads_per_row;
  const int64_t rows_per_block = kThreadsOfShortRows >> log2_threads_per_row;
  const int64_t blocks = (p.num_rows + rows_per_block - 1) / rows_per_block;
  return launch_dependent(rms_norm_in_registers<T, kVec, kPerThread, Row::shares_block, kResidual>,
                          static_cast<unsigned>(blocks), kThreadsOfShortRows, 0, stream, p,
                          log2_threads_per_row);
}

template <typename T, int kVec, bool kResidual>
cudaError_t launch(const RmsNormParams& p, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kVec;
  if constexpr (kVec > 1) {
    // Two vectors a thread for all but the shortest: a barrier of half the warps.
    if (vectors <= kMaxThreadsOfLongRows / 2) {
      return launch_in_registers<T, kVec, 1, kResidual>(p, stream);
    }
    if (vectors <= 2 * kMaxThreadsOfLongRows) {
      return launch_in_registers<T, kVec, 2, kResidual>(p, stream);
    }
    if (vectors <= 4 * kMaxThreadsOfLongRows) {
      return launch_in_registers<T, kVec, 4, kResidual>(p, stream);
    }
  }
  const int64_t warps = (vectors + kWarp - 1) / kWarp;
  const int64_t threads = (warps < kMaxWarps ? warps : kMaxWarps) * kWarp;
  return launch_dependent(rms_norm_any<T, kVec>, static_cast<unsigned>(p.num_rows),
                          static_cast<unsigned>(threads), 0, stream, p);
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  if (p.num_rows > kMaxGridRows) return cudaErrorInvalidConfiguration;
  const int64_t element = size_of(p.dtype);
  const bool vectors =
      vector_width({address_of(p.input), address_of(p.weight), address_of(p.residual),
                    address_of(p.out), p.hidden * element, p.input_strides.group * element,
                    p.input_strides.row * element, p.residual_strides.group * element,
                    p.residual_strides.row * element, p.out_strides.group * element,
                    p.out_strides.row * element}) == kVectorBytes;
  return with_elements(p.dtype, vectors, [&]<typename T, int kVec>() {
    return p.residual != nullptr ? launch<T, kVec, true>(p, stream)
                                 : launch<T, kVec, false>(p, stream);
  });
}

}  // namespace pagedinfer
