// rms_norm on the GPU: see rms_norm.h for the maths and the tensors.
//
// Grid: few rows, or short ones: a row is one thread's, one part of a warp's, or one block's, by
// its length; short rows share a block of kThreadsOfShortRows threads. Every thread holds its share
// of the row, of the residual and of the weight in registers, loaded before anything is waited for,
// so memory is read once. Many rows of a block each: rms_norm_streamed, whose blocks stay and walk
// the rows, each row copied to shared memory kAhead rows before it is used: a block that takes one
// row and ends has too little in flight. Rows longer than that allows, or whose vectors do not
// start at multiples of 16 bytes, go to rms_norm_any, which reads the row twice (the second time
// from a cache). Shared memory: one partial sum per warp; when streamed, kAhead + 1 rows of input
// and residual. Template parameters: T, the element type; kVec, elements of a vector; kPerThread,
// vectors a thread holds; kBlockPerRow, whether a row is a block's or shares it (a power of two of
// threads).
#include <algorithm>

#include "attention/device_limits.h"
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
constexpr int64_t kManyRows = 1024;
constexpr int kAhead = 3;                // rows
constexpr int kStreamedBlocksPerSM = 2;  // of the longest rows; registers for no more

// The sum over `threads` neighbouring threads: a power of two up to a warp, or the whole block. All
// threads of the block call it; one call after another uses another `buffer`, 0 and 1 in turn.
__device__ __forceinline__ float sum_over(float value, int threads, int buffer = 0) {
  const int lanes = threads < kWarp ? threads : kWarp;
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  if (threads <= kWarp) return value;

  // Every thread adds the warps' sums up by itself: sooner done than with shuffles.
  __shared__ float4 partials[2][kMaxWarps / 4];
  float4* partial = partials[buffer];
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

template <typename T, int kVec, int kPerThread, bool kBlockPerRow>
__global__ void __launch_bounds__(kMaxThreadsOfLongRows)
    rms_norm_in_registers(const __grid_constant__ RmsNormParams p, int log2_threads_per_row) {
  const int threads_per_row = kBlockPerRow ? blockDim.x : 1 << log2_threads_per_row;
  const int thread = kBlockPerRow ? threadIdx.x : threadIdx.x & (threads_per_row - 1);
  const unsigned r =
      kBlockPerRow ? blockIdx.x : (blockIdx.x * blockDim.x + threadIdx.x) >> log2_threads_per_row;
  const RowPlace place = place_of(r, static_cast<unsigned>(p.inner_rows));
  const int vectors = r < p.num_rows ? static_cast<int>(p.hidden / kVec) : 0;

  const T* input = place.in(static_cast<const T*>(p.input), p.input_strides);
  T* residual = place.in(static_cast<T*>(p.residual), p.residual_strides);
  const T* weight = static_cast<const T*>(p.weight);

  begin_dependent();
  Vector<T, kVec> inputs[kPerThread], residuals[kPerThread], weights[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = thread + j * threads_per_row;
    if (i >= vectors) continue;
    inputs[j] = load_vector<kVec>(input + i * kVec);
    if (p.residual != nullptr) residuals[j] = load_vector<kVec>(residual + i * kVec);
    weights[j] = load_vector<kVec>(weight + i * kVec);
  }

  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = thread + j * threads_per_row;
    if (i >= vectors) continue;
    if (p.residual != nullptr) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        inputs[j].elements[e] =
            rounded<T>(to_float(residuals[j].elements[e]) + to_float(inputs[j].elements[e]));
      }
      store_vector(residual + i * kVec, inputs[j]);
    }
    sum += sum_of_squares(inputs[j]);
  }

  const float mean = sum_over(sum, threads_per_row) / static_cast<float>(p.hidden);
  const float factor = rsqrtf(mean + p.epsilon);
  T* out = place.in(static_cast<T*>(p.out), p.out_strides);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = thread + j * threads_per_row;
    if (i < vectors) store_vector(out + i * kVec, normalised(inputs[j], factor, weights[j]));
  }
}

__device__ __forceinline__ void copy_vector(void* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

// Without a residual. A thread copies what it uses itself, and so waits for its own copies only.
template <typename T, int kVec, int kPerThread>
__global__ void __launch_bounds__(kMaxThreadsOfLongRows, kStreamedBlocksPerSM)
    rms_norm_streamed(const __grid_constant__ RmsNormParams p) {
  constexpr int kStages = kAhead + 1;
  extern __shared__ __align__(16) char shared[];
  using V = Vector<T, kVec>;
  // [stage][vector of the thread][thread]
  V* own = reinterpret_cast<V*>(shared) + threadIdx.x;
  const auto at = [&](int stage, int j) -> V& {
    return own[(stage * kPerThread + j) * blockDim.x];
  };
  const int vectors = static_cast<int>(p.hidden / kVec);
  const auto inner = static_cast<unsigned>(p.inner_rows);
  const auto copy_row = [&](unsigned r, int stage) {
    if (r < p.num_rows) {
      const T* input = place_of(r, inner).in(static_cast<const T*>(p.input), p.input_strides);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int i = threadIdx.x + j * blockDim.x;
        if (i < vectors) copy_vector(&at(stage, j), input + i * kVec);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  begin_dependent();
  unsigned next = blockIdx.x;
  for (int ahead = 0; ahead < kAhead; ++ahead, next += gridDim.x) copy_row(next, ahead);
  V weights[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < vectors) weights[j] = load_vector<kVec>(static_cast<const T*>(p.weight) + i * kVec);
  }

  int stage = 0, copy_stage = kAhead, buffer = 0;
  for (unsigned r = blockIdx.x; r < p.num_rows; r += gridDim.x, next += gridDim.x) {
    copy_row(next, copy_stage);
    copy_stage = copy_stage + 1 == kStages ? 0 : copy_stage + 1;
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead) : "memory");
    V x[kPerThread];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (threadIdx.x + j * blockDim.x >= vectors) continue;
      x[j] = at(stage, j);
      sum += sum_of_squares(x[j]);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
    const float mean = sum_over(sum, blockDim.x, buffer) / static_cast<float>(p.hidden);
    buffer ^= 1;
    const float factor = rsqrtf(mean + p.epsilon);
    T* out = place_of(r, inner).in(static_cast<T*>(p.out), p.out_strides);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i < vectors) store_vector(out + i * kVec, normalised(x[j], factor, weights[j]));
    }
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

template <typename T, int kVec, int kPerThread>
cudaError_t launch_in_registers(const RmsNormParams& p, cudaStream_t stream) {
  const int64_t threads_needed = (p.hidden / kVec + kPerThread - 1) / kPerThread;
  if (threads_needed > kWarp) {
    const int64_t threads = (threads_needed + kWarp - 1) / kWarp * kWarp;
    return launch_dependent(rms_norm_in_registers<T, kVec, kPerThread, true>,
                            static_cast<unsigned>(p.num_rows), static_cast<unsigned>(threads), 0,
                            stream, p, 0);
  }
  int log2_threads_per_row = 0;
  while (1 << log2_threads_per_row < threads_needed) ++log2_threads_per_row;
  const int64_t rows_per_block = kThreadsOfShortRows >> log2_threads_per_row;
  const int64_t blocks = (p.num_rows + rows_per_block - 1) / rows_per_block;
  return launch_dependent(rms_norm_in_registers<T, kVec, kPerThread, false>,
                          static_cast<unsigned>(blocks), kThreadsOfShortRows, 0, stream, p,
                          log2_threads_per_row);
}

template <typename T, int kVec, int kPerThread>
cudaError_t launch_streamed(const RmsNormParams& p, cudaStream_t stream) {
  attention::DeviceLimits limits;
  if (cudaError_t status = attention::device_limits(&limits); status != cudaSuccess) return status;
  const int64_t warps = (p.hidden / kVec + kPerThread * kWarp - 1) / (kPerThread * kWarp);
  const int threads = static_cast<int>(warps) * kWarp;
  const int bytes = (kAhead + 1) * threads * kPerThread * static_cast<int>(kVectorBytes);
  const auto kernel = rms_norm_streamed<T, kVec, kPerThread>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  // No more blocks than are on the chip at once: each has its rows from the beginning.
  const int64_t blocks =
      int64_t{limits.num_sms} * kStreamedBlocksPerSM * kMaxThreadsOfLongRows / threads;
  return launch_dependent(kernel, static_cast<unsigned>(std::min(blocks, p.num_rows)), threads,
                          bytes, stream, p);
}

template <typename T, int kVec>
cudaError_t launch(const RmsNormParams& p, cudaStream_t stream) {
  const int64_t vectors = p.hidden / kVec;
  if constexpr (kVec > 1) {
    if (p.num_rows >= kManyRows && vectors > 4 * kWarp && p.residual == nullptr) {
      if (vectors <= kMaxThreadsOfLongRows) return launch_streamed<T, kVec, 1>(p, stream);
      if (vectors <= 2 * kMaxThreadsOfLongRows) return launch_streamed<T, kVec, 2>(p, stream);
    }
    if (vectors <= kMaxThreadsOfLongRows) return launch_in_registers<T, kVec, 1>(p, stream);
    if (vectors <= 2 * kMaxThreadsOfLongRows) return launch_in_registers<T, kVec, 2>(p, stream);
    if (vectors <= 4 * kMaxThreadsOfLongRows) return launch_in_registers<T, kVec, 4>(p, stream);
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
  return with_elements(p.dtype, vectors,
                       [&]<typename T, int kVec>() { return launch<T, kVec>(p, stream); });
}

}  // namespace pagedinfer
