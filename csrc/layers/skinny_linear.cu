// skinny_linear on the GPU: see skinny_linear.h for the maths and the tensors.
//
// Its time is that of reading the weight once, so all is arranged for reads in flight: they begin
// before the kernel ahead has ended (dependent_launch.cuh), since no kernel writes weights, and
// nothing in the loop waits for another thread.
//
// Grid: one block a multiprocessor, each with an equal range of the outputs; a warp takes every
// kWarps'th output of its block's range. For an output the warp walks the row of the weight (gated:
// the two rows) in chunks of kVectors vectors a lane. A lane reads what it has itself copied, so a
// lane waits for its own copies only.
// Shared memory: the input's rows, normed if there is a norm; its weight; then the ring, p.stages
// chunks of each warp. More than half of a multiprocessor's, unless the work is short, so that no
// two blocks share one: while the blocks of the kernel ahead end one by one, others would stay
// without.
// Template parameters: T; kVec, elements of a vector; kRows, of the input (surplus ones repeat the
// last); kParts, weight rows to an output.
#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/device_limits.h"
#include "layers/elements.cuh"
#include "layers/row_math.cuh"
#include "layers/skinny_linear_cuda.h"

namespace pagedinfer {

namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarp;
constexpr int kCopyBytes = 16;  // what a lane copies at once: a vector

// Of each part, so that a chunk has as many bytes whatever the parts.
template <int kParts>
constexpr int kVectors = 4 / kParts;
constexpr int kWarpStageBytes = 4 * kWarp * kCopyBytes;
constexpr int kStageBytes = kWarps * kWarpStageBytes;

// Chunks of the ring: the most that fit.
constexpr int kStages[] = {6, 4, 3, 2};
constexpr int kFewChunks = 4, kStagesOfFewChunks = 3;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct KernelParams {
  SkinnyLinearParams op;
  int stages;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes.
__device__ __forceinline__ void copy_vector(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Until the oldest chunk of a full ring is there.
__device__ __forceinline__ void wait_oldest(int stages) {
  switch (stages) {  // one of kStages
    case 6:
      return wait_copies<5>();
    case 4:
      return wait_copies<3>();
    case 3:
      return wait_copies<2>();
    default:
      return wait_copies<1>();
  }
}

// A lane's walk over the chunks of its warp's outputs, in the order in which they are copied.
template <typename T, int kVec, int kParts>
struct WeightReader {
  const char* weight;         // this lane's vector 0 of the current chunk
  int64_t part_bytes;         // from the first row of an output to the second
  int64_t next_output;        // bytes from the end of a row to this warp's next one
  int vectors, vectors_left;  // of a row, from this lane's on
  int outputs_left;

  __device__ __forceinline__ void copy(uint32_t stage) {
    if (outputs_left > 0) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kVectors<kParts>; ++j) {
          if (j * kWarp < vectors_left) {
            copy_vector(stage + (part * kVectors<kParts> + j) * kWarp * kCopyBytes,
                        weight + part * part_bytes + j * kWarp * kCopyBytes);
          }
        }
      }
      weight += kVectors<kParts> * kWarp * kCopyBytes;
      vectors_left -= kVectors<kParts> * kWarp;
      if (vectors_left <= -lane()) {
        weight += next_output;
        vectors_left = vectors;
        --outputs_left;
      }
    }
    commit_copies();  // also when there is nothing left: the waits count groups
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarp; }
};

// Products of neighbouring elements are summed apart: half the chain of dependent additions.
template <typename T, int kVec>
__device__ __forceinline__ void add_products(float (&sums)[2], const Vector<T, kVec>& x,
                                             const Vector<T, kVec>& w) {
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    sums[e % 2] = fmaf(to_float(x.elements[e]), to_float(w.elements[e]), sums[e % 2]);
  }
}

// Brings the input's rows into shared memory, normed if there is a norm. The whole block calls it,
// and no thread may read another's part before a barrier.
template <typename T, int kVec, int kRows>
__device__ void bring_input(const SkinnyLinearParams& p, T* rows, const T* norm_weight) {
  const int vectors = static_cast<int>(p.in_features / kVec);
  float sums[kRows] = {};
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = r < p.num_rows ? r : static_cast<int>(p.num_rows) - 1;
      const T* input = static_cast<const T*>(p.input) + row * p.input_stride;
      const Vector<T, kVec> x = load_vector<kVec>(input + i * kVec);
      store_vector(rows + r * p.in_features + i * kVec, x);
      sums[r] += sum_of_squares(x);
    }
  }
  if (p.norm_weight == nullptr) return;

  __shared__ float partial[kRows][kWarps];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      sums[r] += __shfl_xor_sync(0xffffffff, sums[r], offset);
    }
    if (threadIdx.x % kWarp == 0) partial[r][threadIdx.x / kWarp] = sums[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[r][w];
    const float factor = rsqrtf(sum / static_cast<float>(p.in_features) + p.epsilon);
    T* row = rows + r * p.in_features;
    for (int i = threadIdx.x; i < vectors; i += kThreads) {  // what this thread has written
      const Vector<T, kVec> weight = load_vector<kVec>(norm_weight + i * kVec);
      store_vector(row + i * kVec, normalised(load_vector<kVec>(row + i * kVec), factor, weight));
    }
  }
}

template <typename T, int kVec, int kRows, int kParts>
__global__ void __launch_bounds__(kThreads, 1)
    skinny_linear_kernel(const __grid_constant__ KernelParams kernel_params) {
  const SkinnyLinearParams& p = kernel_params.op;
  const int stages = kernel_params.stages;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int vectors = static_cast<int>(p.in_features / kVec);
  T* rows = reinterpret_cast<T*>(shared);
  T* norm_weight = rows + kRows * p.in_features;
  T* ring_begin = norm_weight + (p.norm_weight != nullptr ? p.in_features : 0);
  char* own_ring =
      reinterpret_cast<char*>(ring_begin) + warp * stages * kWarpStageBytes + lane * kCopyBytes;
  const uint32_t ring = shared_address(own_ring);

  let_successor_start();
  const int64_t outputs = p.out_features();
  const int64_t first = outputs * blockIdx.x / gridDim.x + warp;
  const int64_t end = outputs * (blockIdx.x + 1) / gridDim.x;
  const int64_t row_bytes = p.in_features * static_cast<int64_t>(sizeof(T));
  const int count = first < end ? static_cast<int>((end - first + kWarps - 1) / kWarps) : 0;
  const int chunks = (vectors + kVectors<kParts> * kWarp - 1) / (kVectors<kParts> * kWarp);
  WeightReader<T, kVec, kParts> reader{
      .weight = static_cast<const char*>(p.weight) + first * row_bytes + lane * kCopyBytes,
      .part_bytes = outputs * row_bytes,
      .next_output = kWarps * row_bytes - int64_t{chunks} * kVectors<kParts> * kWarp * kCopyBytes,
      .vectors = vectors - lane,
      .vectors_left = vectors - lane,
      .outputs_left = count,
  };
  if (p.norm_weight != nullptr) {
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      copy_vector(shared_address(norm_weight + i * kVec),
                  static_cast<const T*>(p.norm_weight) + i * kVec);
    }
  }
  commit_copies();
  for (int ahead = 0; ahead < stages - 1; ++ahead) reader.copy(ring + ahead * kWarpStageBytes);

  wait_for_predecessor();
  wait_oldest(stages);
  bring_input<T, kVec, kRows>(p, rows, norm_weight);
  __syncthreads();

  int stage = 0, copy_stage = stages - 1;
  for (int output = 0; output < count; ++output) {
    const int64_t feature = first + int64_t{output} * kWarps;
    float before = 0.0f;
    if (p.residual != nullptr && lane < p.num_rows) {
      before = to_float(static_cast<const T*>(p.residual)[lane * p.residual_stride + feature]);
    }
    float sums[kParts][kRows][2] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      reader.copy(ring + copy_stage * kWarpStageBytes);
      copy_stage = copy_stage + 1 == stages ? 0 : copy_stage + 1;
      wait_oldest(stages);
      const char* own = own_ring + stage * kWarpStageBytes;
      stage = stage + 1 == stages ? 0 : stage + 1;
#pragma unroll
      for (int j = 0; j < kVectors<kParts>; ++j) {
        const int i = (chunk * kVectors<kParts> + j) * kWarp + lane;
        if (i >= vectors) break;
        Vector<T, kVec> w[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          w[part] = load_vector<kVec>(
              reinterpret_cast<const T*>(own + (part * kVectors<kParts> + j) * kWarp * kCopyBytes));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Vector<T, kVec> x = load_vector<kVec>(rows + r * p.in_features + i * kVec);
#pragma unroll
          for (int part = 0; part < kParts; ++part) add_products(sums[part][r], x, w[part]);
        }
      }
    }

    float results[kParts] = {};  // of row `lane`
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float sum = sums[part][r][0] + sums[part][r][1];
        for (int offset = kWarp / 2; offset > 0; offset /= 2) {
          sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
        if (lane == r) results[part] = sum;
      }
    }
    if (lane < p.num_rows) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (p.bias != nullptr) {
          results[part] += to_float(static_cast<const T*>(p.bias)[feature + part * outputs]);
        }
        results[part] = rounded_through<T>(results[part]);
      }
      float result = results[0];
      if constexpr (kParts == 2) {
        result = rounded_through<T>(silu<T>(results[0])) * results[1];
      }
      if (p.residual != nullptr) result = before + result;
      static_cast<T*>(p.out)[lane * p.out_stride + feature] = rounded<T>(result);
    }
    __syncwarp();
  }
}

// What the norm's sums take, which is not in the dynamic part.
constexpr int kSumsBytes = static_cast<int>(kMaxSkinnyRows * kWarps * sizeof(float));

// 0 if not even two stages fit beside so many rows.
int stages_beside(int64_t input_bytes, int shared_per_block) {
  for (const int stages : kStages) {
    if (input_bytes + stages * kStageBytes + kSumsBytes <= shared_per_block) return stages;
  }
  return 0;
}

template <typename T, int kVec, int kRows, int kParts>
cudaError_t launch(const SkinnyLinearParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const int64_t outputs = p.out_features();
  const int64_t blocks = std::min<int64_t>(outputs, limits.num_sms);
  const int64_t input_bytes =
      (kRows + (p.norm_weight != nullptr)) * p.in_features * static_cast<int64_t>(sizeof(T));
  int stages = stages_beside(input_bytes, limits.shared_per_block);
  if (stages == 0) return cudaErrorNotSupported;
  // Where a warp has a few chunks in all, most are there before the wait, and two blocks on one
  // multiprocessor do no harm: they may be there the earlier.
  const int64_t chunk = int64_t{kVectors<kParts>} * kWarp * kVec;
  const int64_t chunks =
      ceil_div(ceil_div(outputs, blocks), kWarps) * ceil_div(p.in_features, chunk);
  int bytes = static_cast<int>(input_bytes) + stages * kStageBytes;
  if (chunks <= kFewChunks && stages > kStagesOfFewChunks) {
    stages = kStagesOfFewChunks;
    bytes = static_cast<int>(input_bytes) + stages * kStageBytes;
  } else {
    bytes = std::min(std::max(bytes, limits.shared_per_sm / 2 + 1),
                     limits.shared_per_block - kSumsBytes);
  }

  const auto kernel = skinny_linear_kernel<T, kVec, kRows, kParts>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return launch_dependent(kernel, static_cast<unsigned>(blocks), kThreads, bytes, stream,
                          KernelParams{.op = p, .stages = stages});
}

}  // namespace

cudaError_t launch_skinny_linear(const SkinnyLinearParams& p, cudaStream_t stream) {
  DeviceLimits limits;
  if (cudaError_t status = device_limits(&limits); status != cudaSuccess) return status;
  return with_elements(p.dtype, true, [&]<typename T, int kVec>() {
    const auto with_parts = [&]<int kParts>() {
      if constexpr (kVec > 1) {
        if (p.num_rows == 1) return launch<T, kVec, 1, kParts>(p, limits, stream);
        if (p.num_rows == 2) return launch<T, kVec, 2, kParts>(p, limits, stream);
        return launch<T, kVec, 4, kParts>(p, limits, stream);
      } else {
        return cudaErrorInvalidValue;  // not reached: the entry checks alignment
      }
    };
    return p.gated ? with_parts.template operator()<2>() : with_parts.template operator()<1>();
  });
}

}  // namespace pagedinfer
