// half_linear on the CPU: see half_linear.h for the maths and the tensors.
//
// How it is quick: a product of a half type costs two instructions more than one of float32, which
// turn the weight into float32. Several rows of input share them, as far as registers go, and with
// few rows they are quicker than memory is. So weights are used as they lie, and no copy of them is
// made; the rows of input, which every column needs, are packed as float32 once.
//
//   slab     rows whose packed input fits the L2 cache; packed together, one after the other
//   panel    rows that are multiplied together: their sums with a few columns fill the registers
//   block    columns that a thread works on; their sums with a panel wait in the L1 cache
//   chunk    a part of the width, so that a panel's part of it stays in the L1 cache
//   step     2 * kLanes elements of the width
//
// Each sum is kLanes sums, one a lane, that run along the whole width and are added at the end.

#include "common/parallel.h"
#include "layers/cpu_elements.h"
#include "layers/half_linear.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int64_t kStep = 2 * kLanes;

#if defined(__AVX512F__)
constexpr int kPanelRows = 8;
#else
constexpr int kPanelRows = 4;
#endif

constexpr int64_t kBlockColumns = 48;
// What threads share out: half a block, so that also few columns go round.
constexpr int64_t kUnitColumns = 24;

constexpr int64_t kChunkElements = 5120;       // of a panel: 20 KB
constexpr int64_t kSlabElements = 256 * 1024;  // 1 MB
// Some microseconds of work each, against what waking a thread costs.
constexpr int64_t kProductsPerTask = 128 * 1024;
constexpr int64_t kPackedElementsPerTask = 32 * 1024;

// Columns that are multiplied with a panel of so many rows at a time: divisors of a unit, such that
// rows * columns sums, the weights and a row are registers.
constexpr int columns_for(int rows) {
#if defined(__AVX512F__)
  return rows == 1 ? 8 : rows <= 4 ? 6 : 3;
#else
  return rows == 1 ? 6 : 3;
#endif
}

// Half of kStep elements as float32: of bfloat16 the even ones or the odd ones, of float16 the
// first or the last.
PAGEDINFER_SIMD FloatVector load_half(const BFloat16* from, int half) {
  IntVector pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return (FloatVector)(half == 0 ? pairs << 16 : pairs & static_cast<int32_t>(0xffff0000u));
}
PAGEDINFER_SIMD FloatVector load_half(const Half* from, int half) {
  from += half * kLanes;
#if defined(__AVX512F__)
  const __m256i elements = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_maskz_cvtph_ps(0xffff, elements);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  FloatVector to{};
  for (int i = 0; i < kLanes; ++i) to[i] = to_float(from[i]);
  return to;
#endif
}

// Loaded once for several uses: compilers would rather load it again for each of them.
PAGEDINFER_SIMD FloatVector in_register(FloatVector v) {
#if defined(__AVX2__)
  asm volatile("" : "+v"(v));
#endif
  return v;
}

// sums[row * kBlockColumns + column] += a panel's rows * columns, over `count` elements of them;
// with `first`, they are set. `rows`: as pack_panel leaves them.
//
// Weights are fetched `ahead` elements early: a row of them ends too soon for the hardware to see
// that the next is read on. (Behind the last column the fetch does nothing.)
template <int Rows, int Columns, typename T>
void add_products(const float* rows, const T* const (&columns)[Columns], int64_t count, bool first,
                  int64_t ahead, FloatVector* sums) {
  // Few rows are done with a column before memory answers: they want the next one in the L1 cache.
  constexpr int kPrefetchLevel = Rows <= 2 ? 3 : 2;
  FloatVector sum[Rows][Columns];
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) {
      sum[r][c] = first ? FloatVector{} : sums[r * kBlockColumns + c];
    }
  }
  const T* column[Columns];
  for (int c = 0; c < Columns; ++c) column[c] = columns[c];
  T last[Columns][kStep];
  const int64_t rest = count % kStep;
  int64_t steps = count / kStep;
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) {  // the elements behind the last whole step, and zeros
      if (rest == 0) break;
      for (int c = 0; c < Columns; ++c) {
        std::memset(last[c], 0, sizeof last[c]);
        std::memcpy(last[c], columns[c] + (count - rest), rest * sizeof(T));
        column[c] = last[c];
      }
      steps = 1;
    }
    for (int64_t step = 0; step < steps; ++step) {
      for (int c = 0; c < Columns; ++c) {
        __builtin_prefetch(column[c] + step * kStep + ahead, 0, kPrefetchLevel);
      }
      for (int half = 0; half < 2; ++half) {
        FloatVector weight[Columns];
        for (int c = 0; c < Columns; ++c) {
          weight[c] = in_register(load_half(column[c] + step * kStep, half));
        }
        for (int r = 0; r < Rows; ++r) {
          const FloatVector row = in_register(load(rows + (half * Rows + r) * kLanes));
          for (int c = 0; c < Columns; ++c) sum[r][c] = multiply_add(row, weight[c], sum[r][c]);
        }
      }
      rows += Rows * kStep;
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) sums[r * kBlockColumns + c] = sum[r][c];
  }
}

// Adds the halves of all 2 * Width vectors and puts two of them into one vector, until one is left:
// its lane i is the sum of v[i]'s lanes. All are added in one order.
template <int Width = kLanes / 2>
PAGEDINFER_SIMD FloatVector lane_sums(FloatVector (&v)[kLanes]) {
  IntVector own, other;  // of v[i] where a lane's bit `Width` is 0, of v[i + Width] elsewhere
  for (int lane = 0; lane < kLanes; ++lane) {
    const int from = lane & Width ? kLanes : 0;
    own[lane] = from + lane;
    other[lane] = from + (lane ^ Width);
  }
  for (int i = 0; i < Width; ++i) {
    v[i] =
        __builtin_shuffle(v[i], v[i + Width], own) + __builtin_shuffle(v[i], v[i + Width], other);
  }
  if constexpr (Width > 1) {
    return lane_sums<Width / 2>(v);
  } else {
    return v[0];
  }
}

template <typename T>
const T* input_row(const HalfLinearParams& p, int64_t row) {
  return static_cast<const T*>(p.input) + row / p.inner_rows * p.input_strides.group +
         row % p.inner_rows * p.input_strides.row;
}

template <typename T>
T* out_row(const HalfLinearParams& p, int64_t row) {
  return static_cast<T*>(p.out) + row / p.inner_rows * p.out_strides.group +
         row % p.inner_rows * p.out_strides.row;
}

// A panel of rows as float32 [steps, 2, rows, kLanes], with zeros behind their end.
template <typename T>
void pack_panel(const HalfLinearParams& p, int64_t first_row, int rows, float* to) {
  for (int r = 0; r < rows; ++r) {
    const T* from = input_row<T>(p, first_row + r);
    float* at = to + r * kLanes;
    for (int64_t k = 0; k < p.width; k += kStep) {
      T last[kStep] = {};
      const T* elements = from + k;
      if (p.width - k < kStep) {
        std::memcpy(last, elements, (p.width - k) * sizeof(T));
        elements = last;
      }
      for (int half = 0; half < 2; ++half) {
        store(at, load_half(elements, half));
        at += rows * kLanes;
      }
    }
  }
}

struct Block {
  int64_t first, count;  // columns
};

// The results of a panel of rows with a block of columns. `packed`: as pack_panel leaves it.
template <int Rows, typename T>
void panel_of_block(const HalfLinearParams& p, const float* packed, int64_t first_row,
                    Block block) {
  constexpr int kColumns = columns_for(Rows);
  const T* weight = static_cast<const T*>(p.weight);
  FloatVector sums[Rows * kBlockColumns];
  if (block.count < kBlockColumns) std::memset(sums, 0, sizeof sums);

  const int64_t ahead = (Rows <= 2 ? kColumns : kUnitColumns) * p.weight_stride;
  const int64_t longest = kChunkElements / Rows / kStep * kStep;
  int64_t begin = 0;
  do {
    const int64_t count = p.width - begin < longest ? p.width - begin : longest;
    for (int64_t c = 0; c < block.count; c += kColumns) {
      const T* columns[kColumns];
      for (int i = 0; i < kColumns; ++i) {  // behind the end the last one again: nobody reads that
        const int64_t column = c + i < block.count ? c + i : block.count - 1;
        columns[i] = weight + (block.first + column) * p.weight_stride + begin;
      }
      add_products<Rows, kColumns>(packed + Rows * begin, columns, count, begin == 0, ahead,
                                   sums + c);
    }
    begin += count;
  } while (begin < p.width);

  const T* bias = static_cast<const T*>(p.bias);
  for (int r = 0; r < Rows; ++r) {
    float results[kBlockColumns];
    for (int64_t c = 0; c < kBlockColumns; c += kLanes) {
      FloatVector v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = sums[r * kBlockColumns + c + i];
      store(results + c, lane_sums(v));
    }
    if (bias != nullptr) {
      for (int64_t c = 0; c < block.count; ++c) results[c] += to_float(bias[block.first + c]);
    }
    T row[kBlockColumns];
#pragma omp simd
    for (int64_t c = 0; c < kBlockColumns; ++c) row[c] = rounded<T>(results[c]);
    std::memcpy(out_row<T>(p, first_row + r) + block.first, row, block.count * sizeof(T));
  }
}

// panel_of_block for a number of rows that is known now.
template <typename T, int Rows = kPanelRows>
void panel_of_block(int rows, const HalfLinearParams& p, const float* packed, int64_t first_row,
                    Block block) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return panel_of_block<T, Rows - 1>(rows, p, packed, first_row, block);
  }
  panel_of_block<Rows, T>(p, packed, first_row, block);
}

int64_t packed_width(int64_t width) { return (width + kStep - 1) / kStep * kStep; }

// At least eight panels, however wide: each slab reads all weights.
int64_t rows_of_slab(int64_t num_rows, int64_t width) {
  int64_t rows = kSlabElements / (packed_width(width) + 1) / kPanelRows * kPanelRows;
  if (rows < 8 * kPanelRows) rows = 8 * kPanelRows;
  return rows < num_rows ? rows : num_rows;
}

template <typename T>
void multiply_slab(const HalfLinearParams& p, int64_t first_row, int64_t num_rows) {
  const int64_t panels = (num_rows + kPanelRows - 1) / kPanelRows;
  const int64_t packed_row = packed_width(p.width);
  const auto rows_of = [&](int64_t panel) {
    const int64_t left = num_rows - panel * kPanelRows;
    return static_cast<int>(left < kPanelRows ? left : kPanelRows);
  };

  const int64_t panels_per_task = kPackedElementsPerTask / (kPanelRows * packed_row + 1) + 1;
  parallel_for(panels, panels_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      pack_panel<T>(p, first_row + i * kPanelRows, rows_of(i),
                    p.packed + i * kPanelRows * packed_row);
    }
  });

  const int64_t units = (p.num_columns + kUnitColumns - 1) / kUnitColumns;
  const int64_t units_per_task = kProductsPerTask / (kUnitColumns * packed_row * num_rows + 1) + 1;
  parallel_for(units, units_per_task, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kUnitColumns < p.num_columns ? end * kUnitColumns : p.num_columns;
    for (int64_t c = begin * kUnitColumns; c < last; c += kBlockColumns) {
      const Block block{.first = c, .count = last - c < kBlockColumns ? last - c : kBlockColumns};
      for (int64_t i = 0; i < panels; ++i) {
        panel_of_block<T>(rows_of(i), p, p.packed + i * kPanelRows * packed_row,
                          first_row + i * kPanelRows, block);
      }
    }
  });
}

template <typename T>
void multiply(const HalfLinearParams& p) {
  const int64_t slab = rows_of_slab(p.num_rows, p.width);
  for (int64_t row = 0; row < p.num_rows; row += slab) {
    multiply_slab<T>(p, row, p.num_rows - row < slab ? p.num_rows - row : slab);
  }
}

}  // namespace

int64_t half_linear_packed_size(int64_t num_rows, int64_t width) {
  return rows_of_slab(num_rows, width) * packed_width(width);
}

void half_linear_cpu(const HalfLinearParams& p) {
  p.dtype == DType::bfloat16 ? multiply<BFloat16>(p) : multiply<Half>(p);
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
