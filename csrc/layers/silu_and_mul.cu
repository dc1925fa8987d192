// silu_and_mul on the GPU: see silu_and_mul.h for the maths and the tensors.
//
// Grid: a row is cut into pieces of kThreads vectors; a block owns one piece, a thread one vector
// of the gate and the one of the same place of the other half. Vectors are 16 bytes, or one element
// where rows do not start at such multiples. Shared memory: none. Template parameters: T, the
// element type; kVec, elements of a vector.
#include "common/dependent_launch.cuh"
#include "common/dtype.h"
#include "layers/elements.cuh"
#include "layers/row_place.cuh"
#include "layers/silu_and_mul_cuda.h"

namespace pagedinfer {

namespace {

constexpr int kThreads = 256;

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    silu_and_mul_kernel(const __grid_constant__ SiluAndMulParams p, unsigned pieces_per_row) {
  const unsigned r = blockIdx.x / pieces_per_row, piece = blockIdx.x - r * pieces_per_row;
  const int64_t i = (static_cast<int64_t>(piece) * kThreads + threadIdx.x) * kVec;
  if (i >= p.width) return;

  const RowPlace place = place_of(r, static_cast<unsigned>(p.inner_rows));
  const T* input = place.in(static_cast<const T*>(p.input), p.input_strides) + i;
  begin_dependent();
  const Vector<T, kVec> gate = load_vector<kVec>(input);
  const Vector<T, kVec> up = load_vector<kVec>(input + p.width);
  Vector<T, kVec> out;
#pragma unroll
  for (int e = 0; e < kVec; ++e) {
    const float activated = rounded_through<T>(silu<T>(to_float(gate.elements[e])));
    out.elements[e] = rounded<T>(activated * to_float(up.elements[e]));
  }
  store_vector(place.in(static_cast<T*>(p.out), p.out_strides) + i, out);
}

}  // namespace

cudaError_t launch_silu_and_mul(const SiluAndMulParams& p, cudaStream_t stream) {
  const int64_t element = size_of(p.dtype);
  const bool vectors =
      vector_width({address_of(p.input), address_of(p.out), p.width * element,
                    p.input_strides.group * element, p.input_strides.row * element,
                    p.out_strides.group * element, p.out_strides.row * element}) == kVectorBytes;
  return with_elements(p.dtype, vectors, [&]<typename T, int kVec>() {
    const int64_t pieces = (p.width / kVec + kThreads - 1) / kThreads;
    if (p.num_rows * pieces > kMaxGridRows) return cudaErrorInvalidConfiguration;
    return launch_dependent(silu_and_mul_kernel<T, kVec>,
                            static_cast<unsigned>(p.num_rows * pieces), kThreads, 0, stream, p,
                            static_cast<unsigned>(pieces));
  });
}

}  // namespace pagedinfer
