// sum_experts on the GPU: see sum_experts.h for the maths and the tensors.
//
// Grid: a row is cut into pieces of kThreads vectors; a block owns one piece of one token, a thread
// one vector. Vectors are 16 bytes, or one element where rows do not start at such multiples.
// Shared memory: none. Template parameters: T, the element type; kVec, elements of a vector.
#include "common/dependent_launch.cuh"
#include "common/dtype.h"
#include "experts/sum_experts_cuda.h"
#include "layers/elements.cuh"

namespace pagedinfer {

namespace {

constexpr int kThreads = 128;

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    sum_experts_kernel(const __grid_constant__ SumExpertsParams p) {
  begin_dependent();
  const int64_t pieces = (p.width / kVec + kThreads - 1) / kThreads;
  const int64_t token = blockIdx.x / pieces;
  const int64_t i = ((blockIdx.x - token * pieces) * kThreads + threadIdx.x) * kVec;
  if (i >= p.width) return;
  const T* results = static_cast<const T*>(p.results) + token * p.k * p.width + i;
  float sums[kVec] = {};
  for (int j = 0; j < p.k; ++j) {
    const float weight = p.weights[token * p.k + j];
    const Vector<T, kVec> result = load_vector<kVec>(results + j * p.width);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums[e] += weight * to_float(result.elements[e]);
  }
  Vector<T, kVec> out;
#pragma unroll
  for (int e = 0; e < kVec; ++e) out.elements[e] = rounded<T>(sums[e]);
  store_vector(static_cast<T*>(p.out) + token * p.width + i, out);
}

}  // namespace

cudaError_t launch_sum_experts(const SumExpertsParams& p, cudaStream_t stream) {
  const bool vectors = vector_width({address_of(p.results), address_of(p.out),
                                     p.width * size_of(p.dtype)}) == kVectorBytes;
  return with_elements(p.dtype, vectors, [&]<typename T, int kVec>() {
    const int64_t blocks = (p.width / kVec + kThreads - 1) / kThreads * p.num_tokens;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    return launch_dependent(sum_experts_kernel<T, kVec>, static_cast<int>(blocks), kThreads, 0,
                            stream, p);
  });
}

}  // namespace pagedinfer
