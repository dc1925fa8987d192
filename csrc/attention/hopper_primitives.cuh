// The instructions of sm_90a that the wgmma kernel is made of, one function each: barriers in
// shared memory, boxes of a tensor fetched by the copy engine, and products of a warpgroup.
//
// Tiles in shared memory are made of *panels* of 8 rows x 64 16-bit columns, which is what the copy
// engine writes and wgmma reads with a swizzle of 128 bytes: rows of 128 bytes, 16-byte chunk c of
// row r at chunk c xor r. See PanelRows.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace pagedinfer::attention {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kGroupShift = 3, kGroupRows = 1 << kGroupShift;  // rows of a panel
constexpr int kPanelBytes = kGroupRows * kPanelRowBytes;
constexpr int kPanelAlignment = kPanelBytes;

// ---- barriers (mbarrier): a phase completes when `arrivals` have arrived and all bytes are there
// ----

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After init_barrier, before the block's __syncthreads: the copy engine sees the barriers too.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same, and the phase waits for so many more bytes of the copy engine.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete. A new barrier counts as past parity 1.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Whether it is complete, without a wait.
__device__ __forceinline__ bool test_barrier(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// What this thread wrote to shared memory is seen by wgmma and the copy engine after the next
// barrier.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Named barriers of `threads` threads: those that wait and those that only report.
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- the copy engine ----

// The box of `map` at these coordinates, the innermost first, to `to`; zeros for what lies outside
// of the tensor. Its bytes count at the barrier.
__device__ __forceinline__ void fetch_box(uint32_t to, const CUtensorMap* map, int c0, int c1,
                                          int c2, int c3, int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- registers: every warp of a warpgroup calls these ----

template <int REGISTERS>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma ----

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
#define PAGEDINFER_REGISTERS_AT(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define PAGEDINFER_REGISTERS_32(c) \
  PAGEDINFER_REGISTERS_AT(c, 0), PAGEDINFER_REGISTERS_AT(c, 8), PAGEDINFER_REGISTERS_AT(c, 16), PAGEDINFER_REGISTERS_AT(c, 24)
#define PAGEDINFER_REGISTERS_64(c) PAGEDINFER_REGISTERS_32(c), \
  PAGEDINFER_REGISTERS_AT(c, 32), PAGEDINFER_REGISTERS_AT(c, 40), PAGEDINFER_REGISTERS_AT(c, 48), PAGEDINFER_REGISTERS_AT(c, 56)
#define PAGEDINFER_REGISTERS_128(c) PAGEDINFER_REGISTERS_64(c), \
  PAGEDINFER_REGISTERS_AT(c, 64), PAGEDINFER_REGISTERS_AT(c, 72), PAGEDINFER_REGISTERS_AT(c, 80), PAGEDINFER_REGISTERS_AT(c, 88), \
  PAGEDINFER_REGISTERS_AT(c, 96), PAGEDINFER_REGISTERS_AT(c, 104), PAGEDINFER_REGISTERS_AT(c, 112), PAGEDINFER_REGISTERS_AT(c, 120)
#define PAGEDINFER_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PAGEDINFER_NAMES_64 PAGEDINFER_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PAGEDINFER_NAMES_128 PAGEDINFER_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
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
                 : PAGEDINFER_REGISTERS_##COUNT(c)                                               \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                           \
  }
PAGEDINFER_MULTIPLY_ROWS(__nv_bfloat16, "bf16", 64, 32, "33", "34")
PAGEDINFER_MULTIPLY_ROWS(__nv_bfloat16, "bf16", 128, 64, "65", "66")
PAGEDINFER_MULTIPLY_ROWS(__half, "f16", 64, 32, "33", "34")
PAGEDINFER_MULTIPLY_ROWS(__half, "f16", 128, 64, "65", "66")

#define PAGEDINFER_MULTIPLY_HELD_ROWS(T, NAME, N, COUNT, A1, A2, A3, B, FLAG)                     \
  template <>                                                                                     \
  __device__ __forceinline__ void multiply_rows<T, N>(float (&c)[N / 2], const uint32_t (&a)[4],  \
                                                      uint64_t b, bool accumulate) {              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" FLAG                                        \
                 ", 0;\n"                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                  \
                 " {" PAGEDINFER_NAMES_##COUNT "}, {%" #COUNT ", %" A1 ", %" A2 ", %" A3 "}, %" B \
                                               ", p, 1, 1, 0;\n}"                                 \
                 : PAGEDINFER_REGISTERS_##COUNT(c)                                                \
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
        : PAGEDINFER_REGISTERS_##COUNT(c)                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
  }
PAGEDINFER_MULTIPLY_COLUMNS(__nv_bfloat16, "bf16", 64, 32, "33", "34", "35", "36")
PAGEDINFER_MULTIPLY_COLUMNS(__nv_bfloat16, "bf16", 128, 64, "65", "66", "67", "68")
PAGEDINFER_MULTIPLY_COLUMNS(__nv_bfloat16, "bf16", 256, 128, "129", "130", "131", "132")
PAGEDINFER_MULTIPLY_COLUMNS(__half, "f16", 64, 32, "33", "34", "35", "36")
PAGEDINFER_MULTIPLY_COLUMNS(__half, "f16", 128, 64, "65", "66", "67", "68")
PAGEDINFER_MULTIPLY_COLUMNS(__half, "f16", 256, 128, "129", "130", "131", "132")

#undef PAGEDINFER_MULTIPLY_ROWS
#undef PAGEDINFER_MULTIPLY_HELD_ROWS
#undef PAGEDINFER_MULTIPLY_COLUMNS
#undef PAGEDINFER_NAMES_32
#undef PAGEDINFER_NAMES_64
#undef PAGEDINFER_NAMES_128
#undef PAGEDINFER_REGISTERS_AT
#undef PAGEDINFER_REGISTERS_32
#undef PAGEDINFER_REGISTERS_64
#undef PAGEDINFER_REGISTERS_128

}  // namespace pagedinfer::attention
