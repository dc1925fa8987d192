// What a warp of the decode_linear kernel does with its sums: adds the parts of a tile that several
// blocks have computed, and writes the outputs.
#pragma once

#include <type_traits>

#include "common/warp.cuh"
#include "common/wgmma.cuh"
#include "layers/decode_linear.h"
#include "layers/elements.cuh"

namespace pagedinfer::decode {

constexpr int kChunk = kPanelColumns;  // of the inner dimension
constexpr int kWarpgroup = 128;

// N: rows of the input, in part beyond its end. kGroups: warpgroups that compute, 64 rows of the
// weight each.
template <int N, int kGroups, bool kGated>
struct Sizes {
  static constexpr int kWeightRows = 64 * kGroups;  // of a tile
  static constexpr int kFeatures = kGated ? kWeightRows / 2 : kWeightRows;
  static constexpr int kWarps = 4 * kGroups;  // that compute
  static constexpr int kComputing = kGroups * kWarpgroup;
  static constexpr int kThreads = kComputing + 2 * kWarp;
  static constexpr int kWeightBytes = kWeightRows * kPanelRowBytes;  // of a stage
  static constexpr int kInputBytes = N * kPanelRowBytes;
  static constexpr int kPartFloats = kWeightRows * N;
};

struct KernelParams {
  DecodeLinearParams op;
  unsigned* tickets;  // [tiles, warps]: parts that are ready; zeros before and after
  int chunks, tiles;
  int weight_stages, input_stages;
  int in_flight;  // chunks of the weight, at most weight_stages
  bool divides;   // tiles, so that all blocks have equally many chunks

  __device__ int num_rows() const { return static_cast<int>(op.num_rows); }
  __device__ int out_features() const { return static_cast<int>(op.out_features()); }
};

// All chunks of all tiles, one tile after another, are cut into one range for each block.
__device__ __forceinline__ int first_chunk(const KernelParams& p, int block) {
  const int blocks = gridDim.x;
  return p.divides ? block * (p.tiles * p.chunks) / blocks : block * p.tiles / blocks * p.chunks;
}

// The block whose range this chunk is in, where tiles are divided.
__device__ __forceinline__ int block_of(const KernelParams& p, int chunk) {
  return ((chunk + 1) * static_cast<int>(gridDim.x) - 1) / (p.tiles * p.chunks);
}

__device__ __forceinline__ uint32_t bits(__nv_bfloat162 pair) {
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t bits(__half2 pair) {
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename T>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    return bits(__floats2half2_rn(low, high));
  } else {
    return bits(__floats2bfloat162_rn(low, high));
  }
}

// The sums of a warp over all rows, as wgmma leaves them. With g = lane / 4 and t = lane % 4 these
// are, at rows 8 j + 2 t and the next, c[4 j] and c[4 j + 1] of the warp's feature g, c[4 j + 2]
// and c[4 j + 3] of its feature g + 8 or, if gated, the other factor's feature g.
template <typename T, int N, int kGroups, bool kGated>
struct WarpSums {
  using S = Sizes<N, kGroups, kGated>;
  float c[N / 2];

  // Where `block` keeps its part of a divided tile: of its first tile, or of its last.
  static __device__ __forceinline__ float4* part(const KernelParams& p, int block, bool is_last) {
    return static_cast<float4*>(p.op.workspace) +
           static_cast<int64_t>(block * 2 + is_last) * (S::kPartFloats / 4) + threadIdx.x;
  }

  __device__ __forceinline__ void store(float4* to, int num_rows) const {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if (8 * j < num_rows) {
        to[j * S::kComputing] = float4{c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3]};
      }
    }
  }

  __device__ __forceinline__ void add(const float4* from, int num_rows) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if (8 * j < num_rows) {
        const float4 v = __ldcg(from + j * S::kComputing);
        c[4 * j] += v.x;
        c[4 * j + 1] += v.y;
        c[4 * j + 2] += v.z;
        c[4 * j + 3] += v.w;
      }
    }
  }

  // Puts this block's part of a divided tile where others find it. True for the last of the tile's
  // blocks, which then has the sums of all, added in the order of their chunks whoever is last.
  // `begins`: this part is the tile's first.
  __device__ __forceinline__ bool combine(const KernelParams& p, int tile, bool begins, int warp,
                                          int lane) {
    const int first = block_of(p, tile * p.chunks);
    const int last = block_of(p, (tile + 1) * p.chunks - 1);
    const auto parts = static_cast<unsigned>(last - first + 1);
    store(part(p, blockIdx.x, begins), p.num_rows());
    __threadfence();
    __syncwarp();
    unsigned* ticket = p.tickets + tile * S::kWarps + warp;
    unsigned before = 0;
    if (lane == 0) before = atomicAdd(ticket, 1);
    before = __shfl_sync(~0u, before, 0);
    if (before + 1 < parts) return false;
    __threadfence();
    if (lane == 0) *ticket = 0;
    if (parts == 2) {  // a + b = b + a
      add(begins ? part(p, last, false) : part(p, first, true), p.num_rows());
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) c[i] = 0.0f;
      for (int block = first; block <= last; ++block) {
        add(part(p, block, block == first), p.num_rows());
      }
    }
    return true;
  }

  static __device__ __forceinline__ float gated(float gate, float up) {
    return rounded_through<T>(silu<T>(rounded_through<T>(gate))) * rounded_through<T>(up);
  }

  // Adds the bias, rounds, and writes.
  __device__ __forceinline__ void write(const KernelParams& p, int tile, int warp, int lane) const {
    constexpr int kWarpFeatures = kGated ? 8 : 16;
    const int features = p.out_features(), num_rows = p.num_rows();
    const int first = tile * S::kFeatures + warp * kWarpFeatures;
    float bias[2] = {};
    if (p.op.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int feature = first + lane / 4 + (kGated ? 0 : 8 * i);
        if (feature < features) {
          bias[i] =
              to_float(static_cast<const T*>(p.op.bias)[feature + (kGated ? i * features : 0)]);
        }
      }
    }
    const int column = first + 2 * (lane % 4);
    T* to = static_cast<T*>(p.op.out) + lane / 4 * p.op.out_stride + column;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if (8 * j < num_rows) {
        const float low[] = {c[4 * j] + bias[0], c[4 * j + 1] + bias[0]};
        const float high[] = {c[4 * j + 2] + bias[1], c[4 * j + 3] + bias[1]};
        const bool inside = 8 * j + lane / 4 < num_rows;
        const auto write_pair = [&](int offset, float a, float b) {
          const uint32_t pair = transpose_8x8(rounded_pair<T>(a, b));
          if (inside && column + offset < features)
            *reinterpret_cast<uint32_t*>(to + offset) = pair;
        };
        if constexpr (kGated) {
          write_pair(0, gated(low[0], high[0]), gated(low[1], high[1]));
        } else {
          write_pair(0, low[0], low[1]);
          write_pair(8, high[0], high[1]);
        }
        to += 8 * p.op.out_stride;
      }
    }
  }
};

}  // namespace pagedinfer::decode
