// The instructions that the tensor-core kernels are made of, one function each (sm_80 and newer),
// and the layout of their tiles in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace pagedinfer::attention {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, asynchronously; zeros, and nothing is read, unless
// `valid`.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// The same, always valid, of what is read once: the second-level cache gives it up first.
__device__ __forceinline__ void copy_async_once(uint32_t to, const void* from) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from), "l"(policy)
               : "memory");
}

// Adds 1 and returns what was there; releases what this thread has seen, acquires what others have.
__device__ __forceinline__ int count_in(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// 4 bytes, through the first-level cache.
__device__ __forceinline__ void copy_async_int(uint32_t to, const int32_t* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the latest `N` committed groups of this thread are there.
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The same for a number that is known at run time only, at most 5.
__device__ __forceinline__ void wait_copies(int n) {
  switch (n) {
    case 0:
      wait_copies<0>();
      break;
    case 1:
      wait_copies<1>();
      break;
    case 2:
      wait_copies<2>();
      break;
    case 3:
      wait_copies<3>();
      break;
    case 4:
      wait_copies<4>();
      break;
    default:
      wait_copies<5>();
      break;
  }
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c [16 x 8] += a [16 x 16] b [16 x 8]. With g = lane / 4 and t = lane % 4 a lane holds
//   a: rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8 (and the next column each)
//   b: column g at rows 2t, 2t + 8 (and the next row each)
//   c: row g at columns 2t, 2t + 1; row g + 8 at the same
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Two floats, rounded to nearest, as one register: `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// 2^x; of -inf: 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rows of HEAD_DIM 16-bit elements in shared memory, in 16-byte chunks, laid out so that the eight
// rows which ldmatrix reads at a time lie in different banks: where a row is a multiple of 128
// bytes, chunk c of row r lies at chunk c xor (r mod 8); otherwise rows are an odd number of chunks
// apart.
template <int HEAD_DIM>
struct TileRows {
  static_assert(HEAD_DIM % 16 == 0);
  static constexpr int kChunks = HEAD_DIM / 8;
  static constexpr bool kSwizzled = kChunks % 8 == 0;
  static constexpr int kRowBytes = (kSwizzled ? kChunks : kChunks | 1) * 16;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + (kSwizzled ? chunk ^ (row & 7) : chunk) * 16;
  }

  // Where chunk 2 i + c of a row lies, given where its chunk c < 2 does; rows begin at multiples of
  // 128 bytes. The same in one instruction.
  static __device__ __forceinline__ uint32_t slice(uint32_t address, int i) {
    return kSwizzled ? (address ^ (i % 4 * 32)) + i / 4 * 128 : address + i * 32;
  }
};

// How THREADS threads walk rows of CHUNKS 16-byte chunks: the j-th chunk of thread `thread`.
// Written so that the compiler sees what does not change with j.
template <int THREADS, int CHUNKS>
struct ChunkWalk {
  static constexpr bool kWholeRows = THREADS % CHUNKS == 0;

  static __device__ __forceinline__ int row(int thread, int j) {
    return kWholeRows ? j * (THREADS / CHUNKS) + thread / CHUNKS : (j * THREADS + thread) / CHUNKS;
  }
  static __device__ __forceinline__ int chunk(int thread, int j) {
    return kWholeRows ? thread % CHUNKS : (j * THREADS + thread) % CHUNKS;
  }
};

}  // namespace pagedinfer::attention
