// Products of a warpgroup (wgmma, sm_90a): one function for each shape of operands.
//
// Tiles in shared memory are made of *panels* of 8 rows x 64 16-bit columns, which is what the copy
// engine writes and wgmma reads with a swizzle of 128 bytes: rows of 128 bytes, 16-byte chunk c of
// row r at chunk c xor r. See PanelRows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace pagedinfer {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kGroupShift = 3, kGroupRows = 1 << kGroupShift;  // rows of a panel
constexpr int kPanelBytes = kGroupRows * kPanelRowBytes;
constexpr int kPanelAlignment = kPanelBytes;

// Before the first product that reads or adds to registers which were written since.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the latest `N` committed groups are done.
template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler may not move a use of these registers over this.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Rows of HEAD_DIM 16-bit elements in shared memory: groups of 8 rows, one after another, each the
// panels of these rows from the left. So the rows of a page of the cache, whole groups, lie in one
// piece, and one box of the copy engine writes them.
template <int HEAD_DIM>
struct PanelRows {
  static_assert(HEAD_DIM % kPanelColumns == 0);
  static constexpr int kRowBytes = HEAD_DIM * 2;
  static constexpr int kGroupBytes = kGroupRows * kRowBytes;

  // Of 16-byte chunk `chunk` of a row.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row / kGroupRows * kGroupBytes + chunk / 8 * kPanelBytes +
           row % kGroupRows * kPanelRowBytes + ((chunk ^ row) & 7) * 16;
  }

  // How a product finds such rows: the distance of groups, and that of panels, which matters where
  // the rows are the summed dimension.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
    constexpr uint64_t kDistances = uint64_t{kGroupBytes >> 4} << 32 | uint64_t{kPanelBytes >> 4}
                                                                           << 16;
    return kSwizzle128 | kDistances | ((address & 0x3FFFF) >> 4);
  }

  // What to add to a descriptor for the i-th 16 columns, and for the i-th 16 rows.
  static constexpr __device__ int columns(int i) { return (i / 4 * kPanelBytes + i % 4 * 32) >> 4; }
  static constexpr __device__ int rows(int i) { return i * 2 * kGroupBytes >> 4; }
};

// clang-format off
#define PAGEDINFER_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PAGEDINFER_NAMES_16 PAGEDINFER_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PAGEDINFER_NAMES_24 PAGEDINFER_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PAGEDINFER_NAMES_32 PAGEDINFER_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PAGEDINFER_NAMES_40 PAGEDINFER_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PAGEDINFER_NAMES_48 PAGEDINFER_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PAGEDINFER_NAMES_56 PAGEDINFER_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PAGEDINFER_NAMES_64 PAGEDINFER_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PAGEDINFER_NAMES_72 PAGEDINFER_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PAGEDINFER_NAMES_80 PAGEDINFER_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PAGEDINFER_NAMES_88 PAGEDINFER_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PAGEDINFER_NAMES_96 PAGEDINFER_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PAGEDINFER_NAMES_104 PAGEDINFER_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define PAGEDINFER_NAMES_112 PAGEDINFER_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define PAGEDINFER_NAMES_120 PAGEDINFER_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PAGEDINFER_NAMES_128 PAGEDINFER_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define PAGEDINFER_AT(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define PAGEDINFER_FLOATS_8(c) PAGEDINFER_AT(c, 0)
#define PAGEDINFER_FLOATS_16(c) PAGEDINFER_FLOATS_8(c), PAGEDINFER_AT(c, 8)
#define PAGEDINFER_FLOATS_24(c) PAGEDINFER_FLOATS_16(c), PAGEDINFER_AT(c, 16)
#define PAGEDINFER_FLOATS_32(c) PAGEDINFER_FLOATS_24(c), PAGEDINFER_AT(c, 24)
#define PAGEDINFER_FLOATS_40(c) PAGEDINFER_FLOATS_32(c), PAGEDINFER_AT(c, 32)
#define PAGEDINFER_FLOATS_48(c) PAGEDINFER_FLOATS_40(c), PAGEDINFER_AT(c, 40)
#define PAGEDINFER_FLOATS_56(c) PAGEDINFER_FLOATS_48(c), PAGEDINFER_AT(c, 48)
#define PAGEDINFER_FLOATS_64(c) PAGEDINFER_FLOATS_56(c), PAGEDINFER_AT(c, 56)
#define PAGEDINFER_FLOATS_72(c) PAGEDINFER_FLOATS_64(c), PAGEDINFER_AT(c, 64)
#define PAGEDINFER_FLOATS_80(c) PAGEDINFER_FLOATS_72(c), PAGEDINFER_AT(c, 72)
#define PAGEDINFER_FLOATS_88(c) PAGEDINFER_FLOATS_80(c), PAGEDINFER_AT(c, 80)
#define PAGEDINFER_FLOATS_96(c) PAGEDINFER_FLOATS_88(c), PAGEDINFER_AT(c, 88)
#define PAGEDINFER_FLOATS_104(c) PAGEDINFER_FLOATS_96(c), PAGEDINFER_AT(c, 96)
#define PAGEDINFER_FLOATS_112(c) PAGEDINFER_FLOATS_104(c), PAGEDINFER_AT(c, 104)
#define PAGEDINFER_FLOATS_120(c) PAGEDINFER_FLOATS_112(c), PAGEDINFER_AT(c, 112)
#define PAGEDINFER_FLOATS_128(c) PAGEDINFER_FLOATS_120(c), PAGEDINFER_AT(c, 120)
// clang-format on

// c [64 x N] = a [64 x 16] b^T, b [N x 16], or += where `accumulate`. Both lie in shared memory,
// the summed dimension along their rows: 16 columns of a tile's panel. With g = lane / 4 and t =
// lane % 4 warp w of the warpgroup holds rows 16 w + g (c[4 j + 0], c[4 j + 1]) and 16 w + g + 8
// (c[4 j + 2], c[4 j + 3]) at columns 8 j + 2 t and 8 j + 2 t + 1.
template <typename T, int N>
__device__ __forceinline__ void multiply_rows(float (&c)[N / 2], uint64_t a, uint64_t b,
                                              bool accumulate);

// The same with a in registers, laid out as for multiply_columns.
template <typename T, int N>
__device__ __forceinline__ void multiply_rows(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                              bool accumulate);

// c [64 x N] += a [64 x 16] b, b [16 x N]: 16 rows of a tile in shared memory. a lies in registers:
// of a matrix laid out as c above, columns 16 i .. 16 i + 15 are the pairs c[8 i + 2 k], c[8 i + 2
// k + 1], k = 0 .. 3.
template <typename T, int N>
__device__ __forceinline__ void multiply_columns(float (&c)[N / 2], const uint32_t (&a)[4],
                                                 uint64_t b);

// COUNT, the accumulator's registers, is also the number of the first operand behind them.
#define PAGEDINFER_MULTIPLY_ROWS(T, NAME, N, COUNT, B, FLAG)                                     \
  template <>                                                                                    \
  __device__ __forceinline__ void multiply_rows<T, N>(float (&c)[N / 2], uint64_t a, uint64_t b, \
                                                      bool accumulate) {                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" FLAG                                       \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                 \
                 " {" PAGEDINFER_NAMES_##COUNT "}, %" #COUNT ", %" B ", p, 1, 1, 0, 0;\n}"       \
                 : PAGEDINFER_FLOATS_##COUNT(c)                                                  \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                           \
  }
#define PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(N, COUNT, B, FLAG)          \
  PAGEDINFER_MULTIPLY_ROWS(__nv_bfloat16, "bf16", N, COUNT, B, FLAG) \
  PAGEDINFER_MULTIPLY_ROWS(__half, "f16", N, COUNT, B, FLAG)
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(16, 8, "9", "10")
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(32, 16, "17", "18")
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(48, 24, "25", "26")
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(64, 32, "33", "34")
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(80, 40, "41", "42")
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(96, 48, "49", "50")
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(112, 56, "57", "58")
PAGEDINFER_MULTIPLY_ROWS_OF_BOTH(128, 64, "65", "66")

#define PAGEDINFER_MULTIPLY_HELD_ROWS(T, NAME, N, COUNT, A1, A2, A3, B, FLAG)                     \
  template <>                                                                                     \
  __device__ __forceinline__ void multiply_rows<T, N>(float (&c)[N / 2], const uint32_t (&a)[4],  \
                                                      uint64_t b, bool accumulate) {              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" FLAG                                        \
                 ", 0;\n"                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                  \
                 " {" PAGEDINFER_NAMES_##COUNT "}, {%" #COUNT ", %" A1 ", %" A2 ", %" A3 "}, %" B \
                                               ", p, 1, 1, 0;\n}"                                 \
                 : PAGEDINFER_FLOATS_##COUNT(c)                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                            \
                   "r"(static_cast<int>(accumulate)));                                            \
  }
PAGEDINFER_MULTIPLY_HELD_ROWS(__nv_bfloat16, "bf16", 128, 64, "65", "66", "67", "68", "69")
PAGEDINFER_MULTIPLY_HELD_ROWS(__half, "f16", 128, 64, "65", "66", "67", "68", "69")

#define PAGEDINFER_MULTIPLY_COLUMNS(T, NAME, N, COUNT, A1, A2, A3, B)                          \
  template <>                                                                                  \
  __device__ __forceinline__ void multiply_columns<T, N>(float (&c)[N / 2],                    \
                                                         const uint32_t (&a)[4], uint64_t b) { \
    asm volatile(                                                                              \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                        \
        " {" PAGEDINFER_NAMES_##COUNT "}, {%" #COUNT ", %" A1 ", %" A2 ", %" A3 "}, %" B       \
                                      ", p, 1, 1, 1;\n}"                                       \
        : PAGEDINFER_FLOATS_##COUNT(c)                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
  }
PAGEDINFER_MULTIPLY_COLUMNS(__nv_bfloat16, "bf16", 64, 32, "33", "34", "35", "36")
PAGEDINFER_MULTIPLY_COLUMNS(__nv_bfloat16, "bf16", 128, 64, "65", "66", "67", "68")
PAGEDINFER_MULTIPLY_COLUMNS(__nv_bfloat16, "bf16", 256, 128, "129", "130", "131", "132")
PAGEDINFER_MULTIPLY_COLUMNS(__half, "f16", 64, 32, "33", "34", "35", "36")
PAGEDINFER_MULTIPLY_COLUMNS(__half, "f16", 128, 64, "65", "66", "67", "68")
PAGEDINFER_MULTIPLY_COLUMNS(__half, "f16", 256, 128, "129", "130", "131", "132")

#undef PAGEDINFER_MULTIPLY_ROWS_OF_BOTH
#undef PAGEDINFER_MULTIPLY_ROWS
#undef PAGEDINFER_MULTIPLY_HELD_ROWS
#undef PAGEDINFER_MULTIPLY_COLUMNS

}  // namespace pagedinfer
