// How the blocks of a team read their row: 16 bytes a thread, several loads in flight, columns
// upcast to fp32.
//
// A row is cut into vectors of 16 bytes, counted from the 16-byte boundary at or before its first
// column, so that rows may start anywhere. Every warp of the team has a stretch of vectors of its
// own, in the order of ids: rank by rank, warp by warp.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "sampler/team.cuh"
#include "sampler/token_order.h"
#include "sampler/upcast.h"

namespace pagedinfer {
namespace sampling {

// Vectors of the beginning of its warp's stretch that a thread holds at once.
constexpr int kChunk = 8;

// The larger of two, NaN if either is.
__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The columns in 16 bytes as fp32.
__device__ inline void unpack(const uint4& raw, float (&x)[4], const float*) {
  x[0] = float_of(raw.x);
  x[1] = float_of(raw.y);
  x[2] = float_of(raw.z);
  x[3] = float_of(raw.w);
}

__device__ inline void unpack(const uint4& raw, float (&x)[8], const BFloat16*) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = float_of(words[i] << 16);
    x[2 * i + 1] = float_of(words[i] & 0xffff0000u);
  }
}

__device__ inline void unpack(const uint4& raw, float (&x)[8], const Float16*) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i])));
    x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i] >> 16)));
  }
}

// The larger of the columns in 4 bytes each, NaN where either is.
__device__ inline uint32_t packed_max_or_nan(uint32_t a, uint32_t b, const float*) {
  return bits_of(max_or_nan(float_of(a), float_of(b)));
}
__device__ inline uint32_t packed_max_or_nan(uint32_t a, uint32_t b, const BFloat16*) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ inline uint32_t packed_max_or_nan(uint32_t a, uint32_t b, const Float16*) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Four bytes of -inf.
__device__ inline uint32_t minus_infinity(const float*) { return 0xff800000u; }
__device__ inline uint32_t minus_infinity(const BFloat16*) { return 0xff80ff80u; }
__device__ inline uint32_t minus_infinity(const Float16*) { return 0xfc00fc00u; }

// kAligned: rows start at multiples of 16 bytes and the vocabulary ends at one, as it nearly always
// is; then no vector has columns that must not be looked at.
template <typename T, bool kAligned>
struct Row {
  static constexpr int kVector = 16 / sizeof(T);  // columns in one

  const uint4* vectors;
  int skipped;  // elements of the first vector that belong to no column
  int vocab_size;
  int num_vectors;
  int vectors_a_warp;

  __device__ Row(const T* logits, int vocab_size)
      : vectors(
            reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(logits) & ~uintptr_t{15})),
        skipped(kAligned
                    ? 0
                    : static_cast<int>((reinterpret_cast<uintptr_t>(logits) & 15) / sizeof(T))),
        vocab_size(vocab_size),
        num_vectors((skipped + vocab_size + kVector - 1) / kVector) {
    const int warps = Team::size() * kWarps;
    const int steps = (num_vectors + kWarpSize - 1) / kWarpSize;
    vectors_a_warp = (steps + warps - 1) / warps * kWarpSize;
  }

  // The warp, counted over the team, whose stretch holds this column.
  __device__ int warp_of(int column) const { return (column + skipped) / kVector / vectors_a_warp; }
  __device__ int first_column(int vector) const { return vector * kVector - skipped; }
  __device__ int stretch_begin(int team_warp) const { return team_warp * vectors_a_warp; }
  __device__ int stretch_end(int team_warp) const {
    return min((team_warp + 1) * vectors_a_warp, num_vectors);
  }

  // A vector's columns; -inf where there is none, as for all of a vector past `end`.
  __device__ uint4 load(int vector, int end) const {
    const uint32_t none = minus_infinity(static_cast<const T*>(nullptr));
    uint4 raw = {none, none, none, none};
    if (vector >= end) return raw;
    if (!kAligned && (vector == 0 || vector == num_vectors - 1)) return load_end(vector);
    return vectors[vector];
  }

  // The same of the row's first or last vector, column by column: not a byte outside the row is
  // read.
  __device__ uint4 load_end(int vector) const {
    asm volatile("" : "+r"(vector));  // or all calls' addresses are kept from before the loops
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    const auto* row = reinterpret_cast<const Bits*>(vectors) + skipped;
    const auto none = static_cast<Bits>(minus_infinity(static_cast<const T*>(nullptr)));
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int column = first_column(vector) + i;
      const uint32_t bits = column < 0 || column >= vocab_size ? none : row[column];
      words[i * sizeof(T) / 4] |= bits << (i * sizeof(T) % 4 * 8);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ static void columns(const uint4& raw, float (&x)[kVector]) {
    unpack(raw, x, static_cast<const T*>(nullptr));
  }

  __device__ void read(int vector, int end, float (&x)[kVector]) const {
    columns(load(vector, end), x);
  }

  __device__ float logit(int column) const {
    return upcast(reinterpret_cast<const T*>(vectors)[column + skipped]);
  }

  // Calls visit(vector, x) for the vectors of [begin, end), shared out among the lanes of a warp,
  // and for some past the end that hold -inf, which no visit may mind. Loads are started kInFlight
  // at once.
  template <int kInFlight, typename Visit>
  __device__ void scan(int begin, int end, bool backward, const Visit& visit) const {
    constexpr int kStep = kWarpSize * kInFlight;
    const int steps = end > begin ? (end - begin + kStep - 1) / kStep : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int vector = begin + (backward ? steps - 1 - step : step) * kStep + lane_index();
      uint4 raw[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) raw[i] = load(vector + i * kWarpSize, end);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        float x[kVector];
        columns(raw[i], x);
        visit(vector + i * kWarpSize, x);
      }
    }
  }

  // The same over this warp's stretch of the row. Passes go forward and backward in turn: what the
  // last one read at its end is still in the cache.
  template <int kInFlight = 4, typename Visit>
  __device__ void scan_stretch(bool backward, const Visit& visit) const {
    const int team_warp = Team::rank() * kWarps + warp_index();
    scan<kInFlight>(stretch_begin(team_warp), stretch_end(team_warp), backward, visit);
  }

  // The first kChunk vectors of each lane of this warp's stretch.
  __device__ void load_chunk(uint4 (&raw)[kChunk]) const {
    const int team_warp = Team::rank() * kWarps + warp_index();
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      raw[i] =
          load(stretch_begin(team_warp) + i * kWarpSize + lane_index(), stretch_end(team_warp));
    }
  }

  // The largest of each of their columns, NaN if one is. Found before they are unpacked: unpacked
  // columns of two bytes would be kept in twice the registers until they are visited.
  __device__ static void largest_of_chunk(const uint4 (&raw)[kChunk], float (&largest)[kVector]) {
    const T* type = nullptr;
    uint4 most = raw[0];
#pragma unroll
    for (int i = 1; i < kChunk; ++i) {
      most = {packed_max_or_nan(most.x, raw[i].x, type), packed_max_or_nan(most.y, raw[i].y, type),
              packed_max_or_nan(most.z, raw[i].z, type), packed_max_or_nan(most.w, raw[i].w, type)};
    }
    columns(most, largest);
  }

  // Calls visit(vector, x) for those, then for the rest of the stretch.
  template <typename Visit>
  __device__ void scan_chunk_and_rest(const uint4 (&raw)[kChunk], const Visit& visit) const {
    const int team_warp = Team::rank() * kWarps + warp_index();
    const int begin = stretch_begin(team_warp), end = stretch_end(team_warp);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float x[kVector];
      columns(raw[i], x);
      visit(begin + i * kWarpSize + lane_index(), x);
    }
    scan<4>(begin + kChunk * kWarpSize, end, false, visit);
  }
};

}  // namespace sampling
}  // namespace pagedinfer
