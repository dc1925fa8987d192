// The elements of the layer kernels on the GPU, vectors of them, and the choice of both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "common/element_type.cuh"
#include "common/vector_width.h"

namespace pagedinfer {

constexpr int64_t kVectorBytes = 16;

// `kCount` neighbouring elements, loaded and stored as one.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T elements[kCount];
};

template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}

template <int kCount, typename T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, kCount>& vector) {
  *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
}

// `kCount` neighbouring floats; four of them start at a multiple of 16 bytes.
template <int kCount>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[kCount]) {
  constexpr int kStep = kCount % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const Vector<float, kStep> four = load_vector<kStep>(from + i);
#pragma unroll
    for (int e = 0; e < kStep; ++e) to[i + e] = four.elements[e];
  }
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T rounded(float x);
template <>
__device__ __forceinline__ float rounded<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half rounded<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// What a value is after a stay in memory as T.
template <typename T>
__device__ __forceinline__ float rounded_through(float x) {
  return to_float(rounded<T>(x));
}

// x / (1 + e^-x). The fast exponential and division err by some units in float32's last place, far
// below what a half type keeps; float32 takes the exact ones.
template <typename T>
__device__ __forceinline__ float silu(float x) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(x, 1.0f + __expf(-x));
  } else {
    return x / (1.0f + expf(-x));
  }
}

// Calls launch.operator()<T, kCount>() with the element type of `dtype` and either as many elements
// as 16 bytes hold or, where `vectors` is false (rows that do not start or end at such multiples),
// one.
template <typename Launch>
cudaError_t with_elements(DType dtype, bool vectors, const Launch& launch) {
  return with_element_type(dtype, [&]<typename T>() {
    return vectors ? launch.template operator()<T, kVectorBytes / sizeof(T)>()
                   : launch.template operator()<T, 1>();
  });
}

}  // namespace pagedinfer
