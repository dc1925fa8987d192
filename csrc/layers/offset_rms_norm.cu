// offset_rms_norm on the GPU: see offset_rms_norm.h for the maths and the tensors.
//
// A row is one team's: a warp's where rows are short (heads), else a block's, so that a block of
// kThreads has one row or eight. Each thread takes every so many vectors of the row, twice: once
// for the sum of squares, once, from the cache, for the output. Vectors are 16 bytes, or one
// element where rows do not start at such multiples. Shared memory: a float for each warp. Template
// parameters: T, the element type; kVec, elements of a vector; kTeam, threads of a row.
#include "common/dependent_launch.cuh"
#include "common/dtype.h"
#include "common/warp.cuh"
#include "layers/elements.cuh"
#include "layers/offset_rms_norm_cuda.h"
#include "layers/row_place.cuh"

namespace pagedinfer {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kShortRow = 512;  // a warp reads it in two vectors a thread

// The sum over a team of `kTeam` threads, which all of them get.
template <int kTeam>
__device__ __forceinline__ float sum_of_team(float x) {
  x = warp_sum(x);
  if constexpr (kTeam > 32) {
    __shared__ float sums[kWarps];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) x += sums[warp];
  }
  return x;
}

template <typename T, int kVec, int kTeam>
__global__ void __launch_bounds__(kThreads)
    offset_rms_norm_kernel(const __grid_constant__ OffsetRmsNormParams p) {
  begin_dependent();
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (r >= p.num_rows) return;  // whole teams
  const RowPlace place = place_of(static_cast<unsigned>(r), static_cast<unsigned>(p.inner_rows));
  const T* input = place.in(static_cast<const T*>(p.input), p.input_strides);
  const T* weight = static_cast<const T*>(p.weight);
  const int first = threadIdx.x % kTeam * kVec;
  float squares = 0.0f;
  for (int64_t i = first; i < p.width; i += kTeam * kVec) {
    const Vector<T, kVec> x = load_vector<kVec>(input + i);
#pragma unroll
    for (int e = 0; e < kVec; ++e) squares += to_float(x.elements[e]) * to_float(x.elements[e]);
  }
  const float mean = sum_of_team<kTeam>(squares) / static_cast<float>(p.width);
  const float factor = rsqrtf(mean + p.epsilon);
  T* out = place.in(static_cast<T*>(p.out), p.out_strides);
  const T* addend =
      p.addend ? place.in(static_cast<const T*>(p.addend), p.addend_strides) : nullptr;
  for (int64_t i = first; i < p.width; i += kTeam * kVec) {
    const Vector<T, kVec> x = load_vector<kVec>(input + i);
    const Vector<T, kVec> w = load_vector<kVec>(weight + i);
    Vector<T, kVec> y{};
    if (addend) y = load_vector<kVec>(addend + i);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float scale = 1.0f + to_float(w.elements[e]);
      const float norm = rounded_through<T>(to_float(x.elements[e]) * factor * scale);
      y.elements[e] = rounded<T>(addend ? to_float(y.elements[e]) + norm : norm);
    }
    store_vector(out + i, y);
  }
}

}  // namespace

cudaError_t launch_offset_rms_norm(const OffsetRmsNormParams& p, cudaStream_t stream) {
  const int64_t element = size_of(p.dtype);
  const bool vectors =
      vector_width({address_of(p.input), address_of(p.weight), address_of(p.addend),
                    address_of(p.out), p.width * element, p.input_strides.group * element,
                    p.input_strides.row * element, p.addend_strides.group * element,
                    p.addend_strides.row * element, p.out_strides.group * element,
                    p.out_strides.row * element}) == kVectorBytes;
  if (p.num_rows > kMaxGridRows) return cudaErrorInvalidConfiguration;
  return with_elements(p.dtype, vectors, [&]<typename T, int kVec>() {
    if (p.width <= kShortRow) {
      const int blocks = static_cast<int>((p.num_rows + kWarps - 1) / kWarps);
      return launch_dependent(offset_rms_norm_kernel<T, kVec, 32>, blocks, kThreads, 0, stream, p);
    }
    return launch_dependent(offset_rms_norm_kernel<T, kVec, kThreads>, static_cast<int>(p.num_rows),
                            kThreads, 0, stream, p);
  });
}

}  // namespace pagedinfer
