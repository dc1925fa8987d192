// decode_linear on the GPU: see decode_linear.h for the maths and the tensors. On Hopper alone,
// through wgmma.
//
// With so few rows the time is that of reading the weight, so the weight is what the tensor cores
// take 64 rows at a time, and the rows of the input are the N of m64nNk16: out^T = weight input^T.
// What was measured, and what did not help: docs/decisions/0010.
//
// Grid: up to one block a multiprocessor. All chunks (64 of the inner dimension) of all tiles (64
// rows of the weight for each of kGroups warpgroups) are one sequence, of which each block has a
// range. Where ranges end inside of tiles, the block that is last with its part adds them all
// (decode_linear_sums.cuh); nobody waits for another block.
//
// In a block kGroups warpgroups compute; one warp fetches chunks of the weight and another those of
// the input, by the copy engine, into rings of their own. The first begins before the kernel ahead
// has ended, since no kernel writes weights (dependent_launch.cuh), and goes on until its ring, as
// deep as shared memory allows, is full.
//
// Shared memory: the ring of the weight, that of the input, barriers: a pair (full, empty) a stage.
//
// Template parameters: T, the element type; N, the rows of the input, rounded up; kGroups; kGated,
// whose tiles are made of 8 rows of the gate, the 8 of the other factor that belong to them, and so
// on.
//
// Invariants: what lies outside of a tensor is fetched as zeros and not written. A tile's parts are
// added in the order of the inner dimension, whoever is last. Tickets are zero between launches.
#include <algorithm>
#include <utility>

#include "common/dependent_launch.cuh"
#include "common/device_limits.h"
#include "common/hopper_primitives.cuh"
#include "common/tensor_map.h"
#include "layers/decode_linear_cuda.h"
#include "layers/decode_linear_sums.cuh"

namespace pagedinfer {

namespace decode {

namespace {

constexpr int kMaxStages = 24;  // of both rings
// Chunks of the weight that a block waits for at a time: enough for the memory's latency. Were it
// all that the ring has room for, the input, which is in the second-level cache, would come behind
// them. A layer at 64 rows: 132.3 us with 4, 130.8 with 6, 132.5 with all.
constexpr int kInFlight = 6;
constexpr int kBarrierBytes = 8;
constexpr int kAllBarrierBytes = kMaxStages * 2 * kBarrierBytes;
// Of each queue: tiles that are divided are fewer than multiprocessors, and have 8 warps at most.
constexpr int kTickets = 2048;
// Shared memory of a multiprocessor that is left for blocks of the kernel ahead and behind.
constexpr int kSharedForOthers = 9 * 1024;

__device__ unsigned all_tickets[kDecodeLinearQueues][kTickets];

// Registers are left for blocks of the kernel ahead and behind.
template <int N>
constexpr int kRegisters = N <= 32   ? 64
                           : N <= 64 ? 96
                                     : 128;

// A ring of stages in shared memory, and the place of one of its users.
struct Ring {
  uint32_t memory, barriers;
  int stage_bytes, stages;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t place() const { return memory + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + stage * 2 * kBarrierBytes; }
  __device__ __forceinline__ uint32_t empty() const { return full() + kBarrierBytes; }
  __device__ __forceinline__ void init_barriers(int consumers) const {
    for (int s = 0; s < stages; ++s) {
      init_barrier(barriers + s * 2 * kBarrierBytes, 1);
      init_barrier(barriers + s * 2 * kBarrierBytes + kBarrierBytes, consumers);
    }
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A place in the sequence of all tiles' chunks.
struct Place {
  int tile, chunk;
  const int chunks;  // of a tile

  __device__ __forceinline__ Place(int at, int chunks)
      : tile(at / chunks), chunk(at % chunks), chunks(chunks) {}
  __device__ __forceinline__ void advance() {
    if (++chunk == chunks) {
      chunk = 0;
      ++tile;
    }
  }
};

template <typename T, int N, int kGroups, bool kGated>
__global__ void __maxnreg__(kRegisters<N>)
    decode_linear_kernel(const __grid_constant__ KernelParams p,
                         [[maybe_unused]] const __grid_constant__ CUtensorMap weight_map,
                         [[maybe_unused]] const __grid_constant__ CUtensorMap input_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Sizes<N, kGroups, kGated>;
  extern __shared__ __align__(kPanelAlignment) char shared_memory[];
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / kWarp), 0);
  const int lane = threadIdx.x % kWarp;
  const auto memory = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const uint32_t inputs_at = memory + p.weight_stages * S::kWeightBytes;
  const uint32_t barriers = inputs_at + p.input_stages * S::kInputBytes;
  const Ring ring_of_weights{memory, barriers, S::kWeightBytes, p.weight_stages};
  Ring weights = ring_of_weights;
  Ring inputs{inputs_at, barriers + p.weight_stages * 2 * kBarrierBytes, S::kInputBytes,
              p.input_stages};
  const int begin = first_chunk(p, blockIdx.x), end = first_chunk(p, blockIdx.x + 1);

  Place place(begin, p.chunks);
  const auto fetch_weights = [&] {
    arrive_expecting(weights.full(), S::kWeightBytes);
    const int column = place.chunk * kChunk, first = place.tile * S::kFeatures;
    if constexpr (kGated) {
      fetch_box(weights.place(), &weight_map, column, 0, 0, first / kGroupRows, 0, weights.full());
    } else {
      fetch_matrix_box(weights.place(), &weight_map, column, first, weights.full());
    }
    weights.advance();
    place.advance();
  };
  const int ahead = min(p.in_flight, end - begin);
  if (threadIdx.x == S::kComputing) {
    weights.init_barriers(S::kWarps);
    inputs.init_barriers(S::kWarps);
    publish_barriers();
    for (int i = 0; i < ahead; ++i) fetch_weights();
  }
  __syncthreads();
  let_successor_start();

  if (warp == S::kWarps) {
    if (lane == 0) {
      Ring landed = ring_of_weights;
      for (int i = ahead; i < end - begin; ++i) {
        wait_barrier(landed.full(), landed.parity);
        landed.advance();
        if (i >= p.weight_stages) wait_barrier(weights.empty(), weights.parity ^ 1);
        fetch_weights();
      }
    }
  } else if (warp == S::kWarps + 1) {
    wait_for_predecessor();
    if (lane == 0) {
      for (int i = begin; i < end; ++i) {
        wait_barrier(inputs.empty(), inputs.parity ^ 1);
        arrive_expecting(inputs.full(), S::kInputBytes);
        fetch_matrix_box(inputs.place(), &input_map, place.chunk * kChunk, 0, inputs.full());
        inputs.advance();
        place.advance();
      }
    }
  } else {
    wait_for_predecessor();  // for the memory that is written
    const int warpgroup = warp / 4;
    WarpSums<T, N, kGroups, kGated> sums;
    for (int at = begin; at < end;) {
      const int tile = at / p.chunks, first = at % p.chunks;
      const int last = min(p.chunks, first + end - at);
      uint32_t weights_empty = 0, inputs_empty = 0;  // of the chunk before
      const auto release = [&] {
        if (lane == 0) {
          arrive(weights_empty);
          arrive(inputs_empty);
        }
      };
      for (int chunk = first; chunk < last; ++chunk) {
        wait_barrier(weights.full(), weights.parity);
        wait_barrier(inputs.full(), inputs.parity);
        const uint64_t a =
            PanelRows<kChunk>::descriptor(weights.place() + warpgroup * 64 * kPanelRowBytes);
        const uint64_t b = PanelRows<kChunk>::descriptor(inputs.place());
        fence_products();
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
          multiply_rows<T, N>(sums.c, a + PanelRows<kChunk>::columns(k),
                              b + PanelRows<kChunk>::columns(k), chunk > first || k > 0);
        }
        commit_products();
        if (chunk > first) {
          wait_products<1>();
          release();
        }
        weights_empty = weights.empty();
        inputs_empty = inputs.empty();
        weights.advance();
        inputs.advance();
      }
      wait_products<0>();
      pin(sums.c);
      release();
      const bool is_whole = last - first == p.chunks;
      if (is_whole || sums.combine(p, tile, first == 0, warp, lane)) {
        sums.write(p, tile, warp, lane);
      }
      at += last - first;
    }
  }
#endif
}

// ---- launch ----

// How the work is cut.
struct Cut {
  int groups;  // warpgroups that compute: kGroups
  int blocks;
  bool divides;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int tiles_of(const DecodeLinearParams& p, int groups) {
  return static_cast<int>(ceil_div(p.num_features, 64 * groups));
}

int chunks_of(const DecodeLinearParams& p) {
  return static_cast<int>(ceil_div(p.in_features, kChunk));
}

// The rows that the kernel for `num_rows` has.
int width_of(int64_t num_rows) { return static_cast<int>(ceil_div(num_rows, 16) * 16); }

// With more tiles than multiprocessors each block takes whole ones: gate and up of Llama-3-8B 130.5
// us a layer, and 133.9 in equal shares. With fewer a tile is divided among as many blocks as there
// is room for, but not into parts of less than kLeastChunks, which take less than their addition.
// Narrow tiles have half as many parts to add, and read the input more often, which is ahead with
// many rows only: 128.9 and 130.5 us at 64, 156.7 and 144.3 at 24 (docs/decisions/0010).
Cut cut_of(const DecodeLinearParams& p, const DeviceLimits& limits) {
  constexpr int kWide = 2, kNarrow = 1, kRowsOfNarrow = 48, kLeastChunks = 8;
  if (tiles_of(p, kWide) >= limits.num_sms) return {kWide, limits.num_sms, false};
  const int groups = p.num_rows > kRowsOfNarrow && !p.gated ? kNarrow : kWide;
  const int tiles = tiles_of(p, groups);
  const int parts = std::max(1, std::min(limits.num_sms / tiles, chunks_of(p) / kLeastChunks));
  return {groups, std::min(tiles * parts, limits.num_sms), parts > 1};
}

cudaError_t make_matrix_map(const void* matrix, DType dtype, int64_t columns, int64_t rows,
                            int64_t stride, int box_rows, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(box_rows)};
  return make_tensor_map(matrix, dtype, 2, sizes, strides, box, map);
}

// A box is 8 rows of the gate, the 8 of the other factor, and so on.
cudaError_t make_gated_map(const DecodeLinearParams& p, int box_features, CUtensorMap* map) {
  const auto columns = static_cast<cuuint64_t>(p.in_features), row = columns * 2;
  const auto features = static_cast<cuuint64_t>(p.out_features());
  const cuuint64_t sizes[] = {columns, kGroupRows, 2, features / kGroupRows, 1};
  const cuuint64_t strides[] = {row, features * row, kGroupRows * row, 2 * features * row};
  const cuuint32_t box[] = {kPanelColumns, kGroupRows, 2,
                            static_cast<cuuint32_t>(box_features / kGroupRows), 1};
  return make_tensor_map(p.weight, p.dtype, 5, sizes, strides, box, map);
}

template <typename T, int N, int kGroups, bool kGated>
cudaError_t launch(const DecodeLinearParams& p, const Cut& cut, const DeviceLimits& limits,
                   cudaStream_t stream) {
  using S = Sizes<N, kGroups, kGated>;
  CUtensorMap weight_map, input_map;
  cudaError_t status = kGated ? make_gated_map(p, S::kFeatures, &weight_map)
                              : make_matrix_map(p.weight, p.dtype, p.in_features, p.num_features,
                                                p.in_features, S::kFeatures, &weight_map);
  if (status != cudaSuccess) return status;
  status =
      make_matrix_map(p.input, p.dtype, p.in_features, p.num_rows, p.input_stride, N, &input_map);
  if (status != cudaSuccess) return status;
  void* tickets = nullptr;
  status = cudaGetSymbolAddress(&tickets, all_tickets);
  if (status != cudaSuccess) return status;

  constexpr int kInputStages = N <= 96 ? 8 : 7;
  const int input_bytes = kInputStages * S::kInputBytes;
  const int room = limits.shared_per_block - kSharedForOthers - kAllBarrierBytes - input_bytes;
  const int weight_stages = std::min(room / S::kWeightBytes, kMaxStages - kInputStages);
  const int bytes = weight_stages * S::kWeightBytes + input_bytes + kAllBarrierBytes;
  const auto kernel = decode_linear_kernel<T, N, kGroups, kGated>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const KernelParams params{.op = p,
                            .tickets = static_cast<unsigned*>(tickets) + p.queue * kTickets,
                            .chunks = chunks_of(p),
                            .tiles = tiles_of(p, kGroups),
                            .weight_stages = weight_stages,
                            .input_stages = kInputStages,
                            .in_flight = std::min(kInFlight, weight_stages),
                            .divides = cut.divides};
  return launch_dependent(kernel, cut.blocks, S::kThreads, bytes, stream, params, weight_map,
                          input_map);
}

// Calls launch.operator()<N>() with the least N that holds the rows.
template <int... kWidths, typename Launch>
cudaError_t with_width(int64_t num_rows, std::integer_sequence<int, kWidths...>,
                       const Launch& launch) {
  cudaError_t status = cudaErrorInvalidValue;  // not reached: the entry checks how many there are
  (void)((num_rows <= kWidths && (status = launch.template operator()<kWidths>(), true)) || ...);
  return status;
}

using Widths = std::integer_sequence<int, 16, 32, 48, 64, 80, 96, 112, 128>;

}  // namespace

}  // namespace decode

bool decode_linear_serves_device() {
#ifdef PAGEDINFER_WITH_SM90A
  DeviceLimits limits;
  return device_limits(&limits) == cudaSuccess && limits.compute_capability == 90;
#else
  return false;
#endif
}

int64_t decode_linear_workspace_floats(const DecodeLinearParams& p) {
  using namespace decode;
  DeviceLimits limits;
  if (device_limits(&limits) != cudaSuccess) return 0;  // the launch will say why
  const Cut cut = cut_of(p, limits);
  return cut.divides ? int64_t{cut.blocks} * 2 * 64 * cut.groups * width_of(p.num_rows) : 0;
}

cudaError_t launch_decode_linear(const DecodeLinearParams& p, cudaStream_t stream) {
  using namespace decode;
  DeviceLimits limits;
  if (cudaError_t status = device_limits(&limits); status != cudaSuccess) return status;
  const Cut cut = cut_of(p, limits);
  const auto with_type = [&]<typename T>() {
    return with_width(p.num_rows, Widths(), [&]<int N>() {
      if (p.gated) return launch<T, N, 2, true>(p, cut, limits, stream);
      return cut.groups == 1 ? launch<T, N, 1, false>(p, cut, limits, stream)
                             : launch<T, N, 2, false>(p, cut, limits, stream);
    });
  };
  return p.dtype == DType::float16 ? with_type.operator()<__half>()
                                   : with_type.operator()<__nv_bfloat16>();
}

}  // namespace pagedinfer
