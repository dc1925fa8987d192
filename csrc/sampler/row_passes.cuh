// The passes that the blocks of a team make over their row, and the state that these share.
#pragma once

#include <cmath>
#include <cstdint>

#include "sampler/row_bins.cuh"
#include "sampler/row_reader.cuh"
#include "sampler/team.cuh"
#include "sampler/token_list.cuh"
#include "sampler/token_order.h"

namespace pagedinfer {
namespace sampling {

// A top-k up to this is drawn from a list that the first pass makes: row_shortlist.cuh.
constexpr int kLongestShortlist = 256;
constexpr int kCoarseBins = 256;  // by z, a block's largest logit at the top
constexpr int kCoarseBinsPerUnit = 8;

// One of the tokens that are drawn from.
struct alignas(16) KeptToken {
  uint64_t weight;
  uint32_t id;
};

// The estimate of a top-p without a top-k: row_nucleus.cuh.
constexpr int kMassBins = 192;
constexpr int kMassBinsPerOctave = 8;
constexpr float kNarrowestWindow = 128.0f, kWidestWindow = 700.0f;  // tokens on each side

// What a block keeps in shared memory: 44 KB.
struct Shared {
  RowParameters parameters;
  uint64_t random_bits;
  union {  // never in use together
    Bins bins;
    uint32_t mass_of_lanes[kMassBins * kWarpSize];
    struct {
      uint64_t merged[kListCapacity];   // the team's list
      SharedSum part_weight[kThreads];  // of parts of a list
    };
    KeptToken kept[kLongestShortlist];
  };
  TokenList list;
  SharedSum kept_weight[kWarps];  // of each warp's stretch of the row
  uint64_t scratch[kWarps];
  // One for each exchange in the team, so that none is overwritten while others read it.
  uint64_t first_code, raw_total, rank, above_total, below_total;
  uint64_t row_raw_total;        // of all parts
  float token_logit;             // of the token whose log-probability is asked for
  float part_largest, part_top;  // of this block's part of the row
  uint32_t mass[kMassBins];      // of this block's part, from part_top down
  uint32_t team_mass[kMassBins];
  float window_from, window_to;
  uint64_t listed_total;
  BinCut cut;
  uint32_t coarse_count[kCoarseBins];
  int depth;
  int crossing_part, num_crossing;
  uint64_t crossing_need;
  uint64_t boundary;
  int drawn_warp;
  uint64_t random;
};

template <typename T, bool kAligned>
struct RowPasses {
  static constexpr int kVector = Row<T, kAligned>::kVector;

  const Row<T, kAligned> row;
  Shared& shared;
  const RowParameters& parameters;
  float inverse_temperature;
  float largest;
  bool backward;  // the direction of the next pass

  __device__ float scaled(float logit) const {
    return scaled_logit(logit, largest, inverse_temperature);
  }

  // The direction of this pass; the next one turns round.
  __device__ bool turn() {
    backward = !backward;
    return !backward;
  }

  // ---- exchanges in the team ----

  __device__ uint64_t team_min(uint64_t value, uint64_t& slot) {
    value = block_min(value, shared.scratch);
    if (threadIdx.x == 0) slot = value;
    Team::sync();
    uint64_t values[kMaxTeam];
    gather(slot, value, values);
#pragma unroll
    for (const uint64_t theirs : values) value = theirs < value ? theirs : value;
    return value;
  }

  __device__ uint64_t team_sum(uint64_t value, uint64_t& slot) {
    value = block_sum(value, shared.scratch);
    if (threadIdx.x == 0) slot = value;
    Team::sync();
    return sum_over_team<uint64_t>(slot);
  }

  // The largest logit of the row from those of the blocks' parts, NaN if one is.
  __device__ float largest_of_parts() const {
    float most = -INFINITY, parts[kMaxTeam];
    gather(shared.part_largest, -INFINITY, parts);
#pragma unroll
    for (const float part : parts) most = max_or_nan(most, part);
    return most;
  }

  // ---- passes over the row ----
  // The first one goes forward and is given the beginning of the warp's stretch, Row::load_chunk.

  // The code of the first token in the order. Its logit is not finite if the row cannot be sampled.
  __device__ uint64_t find_first(const uint4 (&raw)[kChunk]) {
    float best = -INFINITY, poison = -INFINITY;
    int best_column = -1;
    row.scan_chunk_and_rest(raw, [&](int vector, const float (&x)[kVector]) {
      float most = x[0];
#pragma unroll
      for (int i = 1; i < kVector; ++i) most = max_or_nan(most, x[i]);
      poison = max_or_nan(poison, most);
      if (most > best) {
        int place = kVector - 1;
#pragma unroll
        for (int i = kVector - 2; i >= 0; --i) {
          if (x[i] == most) place = i;
        }
        best = most;
        best_column = row.first_column(vector) + place;
      }
    });
    uint64_t code = kLastCode;
    if (!(poison < INFINITY)) {
      code = 0;
    } else if (best_column >= 0) {
      code = order_code(best, best_column);
    }
    return team_min(code, shared.first_code);
  }

  // The largest logit of each of this thread's columns-modulo-a-vector, and of the row. Not finite
  // if the row cannot be sampled.
  __device__ float find_largest(const uint4 (&raw)[kChunk], float (&groups)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) groups[i] = -INFINITY;
    row.scan_chunk_and_rest(raw, [&](int, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) groups[i] = max_or_nan(groups[i], x[i]);
    });
    float most = groups[0];
#pragma unroll
    for (int i = 1; i < kVector; ++i) most = max_or_nan(most, groups[i]);
    return logit_of_code(team_min(order_code(most, 0), shared.first_code));
  }

  // Lists the tokens of the bins up to `bin`.
  __device__ void list_top(int bin) {
    clear_list();
    const float below = -static_cast<float>(bin + 1) / kBinsPerUnit;
    row.scan_stretch(turn(), [&](int vector, const float (&x)[kVector]) {
      uint32_t listed = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (scaled(x[i]) > below) listed |= 1u << i;
      }
      shared.list.add(listed, x, row.first_column(vector));
    });
  }

  // Counts (or weighs, as the need has it) the tokens up to the limit by their bins.
  template <bool kLimited>
  __device__ void fill_bins(bool by_count, uint64_t limit) {
    shared.bins.clear();
    row.template scan_stretch<kLimited ? 1 : 4>(turn(), [&](int vector, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float z = scaled(x[i]);
        const int bin = bin_of(z);
        if (bin == kLastBin) continue;
        if (kLimited && order_code(x[i], row.first_column(vector) + i) > limit) continue;
        if (by_count) {
          shared.bins.add_count(bin);
        } else {
          shared.bins.add_weight(bin, weight_of(exponential(z)));
        }
      }
    });
  }

  // Counts (or weighs) the window's tokens up to the limit by their next digit.
  __device__ void fill_digits(const Window& window, bool by_count, uint64_t limit) {
    shared.bins.clear();
    row.template scan_stretch<1>(turn(), [&](int vector, const float (&x)[kVector]) {
      for_columns(in_bin(window.bin, x), vector, [&](int column, float logit) {
        const uint64_t code = order_code(logit, column);
        if (!is_inside(window, window.bin, code) || code > limit) return;
        if (by_count) {
          shared.bins.add_count(next_digit(window, code));
        } else {
          shared.bins.add_weight(next_digit(window, code), weight_of(exponential(scaled(logit))));
        }
      });
    });
  }

  // Lists the window's tokens up to the limit, and sums for each warp's stretch what the tokens
  // before the window weigh, of those that min-p keeps. (They are before the limit too: a window
  // holds a boundary, and no boundary lies past the limit.)
  __device__ void collect(const Window& window, uint64_t limit) {
    clear_list();
    const float above_bin = -static_cast<float>(window.bin) / kBinsPerUnit;
    const float min_p = parameters.min_p;
    uint64_t kept = 0;
    row.scan_stretch(turn(), [&](int vector, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float z = scaled(x[i]);
        const float e = exponential(z);
        if (z > above_bin && e >= min_p) kept += weight_of(e);
      }
      if (window.bin == kLastBin) return;  // the empty window
      for_columns(in_bin(window.bin, x), vector, [&](int column, float logit) {
        const uint64_t code = order_code(logit, column);
        const float e = exponential(scaled(logit));
        if (is_above(window, window.bin, code)) {
          if (e >= min_p) kept += weight_of(e);
        } else if (is_inside(window, window.bin, code) && code <= limit) {
          shared.list.add(code);
        }
      });
    });
    kept = warp_sum(kept);
    if (lane_index() == 0) shared.kept_weight[warp_index()].set(kept);
  }

  // Which of a vector's tokens are in the bin. (A comparison is cheaper than bin_of.)
  __device__ uint32_t in_bin(int bin, const float (&x)[kVector]) const {
    const float top = -static_cast<float>(bin) / kBinsPerUnit;
    const float below = -static_cast<float>(bin + 1) / kBinsPerUnit;
    uint32_t columns = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float z = scaled(x[i]);
      if (z <= top && z > below) columns |= 1u << i;
    }
    return columns;
  }

  // Calls visit(column, logit) for those columns of a vector whose bits are set. Few are, so their
  // logits are read again rather than held in registers that can be indexed.
  template <typename Visit>
  __device__ void for_columns(uint32_t bits, int vector, const Visit& visit) const {
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1) {
      const int column = row.first_column(vector) + __ffs(static_cast<int>(bits)) - 1;
      visit(column, row.logit(column));
    }
  }

  // The weight of the row at temperature 1, for the log-probability, into shared.row_raw_total.
  __device__ void find_raw_total() {
    uint64_t total = 0;
    row.scan_stretch(turn(), [&](int, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        total += weight_of(exponential(scaled_logit(x[i], largest, 1.0f)));
      }
    });
    total = team_sum(total, shared.raw_total);
    if (threadIdx.x == 0) shared.row_raw_total = total;
  }

  // ---- the bins and the list ----
  // Functions of their own, since they are long and called from several places, and of each
  // kernel's own, so that they leave those registers alone which that kernel needs meanwhile.

  static __device__ __noinline__ void cut_bins(Bins& bins, Need need, BinCut& result) {
    sampling::cut_bins(bins, need, result);
  }
  static __device__ __noinline__ int merge_lists(const TokenList& list, uint64_t* merged) {
    return sampling::merge_lists(list, merged);
  }
  static __device__ __noinline__ void sort_codes(uint64_t* codes, int size) {
    sampling::sort_codes(codes, size);
  }

  __device__ void clear_list() {
    if (threadIdx.x == 0) shared.list.size = 0;
    if (lane_index() == 0) shared.kept_weight[warp_index()].set(0);
    __syncthreads();
  }

  __device__ uint64_t weight_of_code(uint64_t code) const {
    return weight_of(exponential(scaled(logit_of_code(code))));
  }

  __device__ uint64_t listed_weight(int size) {
    uint64_t sum = 0;
    for (int i = threadIdx.x; i < size; i += kThreads) sum += weight_of_code(shared.merged[i]);
    return block_sum(sum, shared.scratch);
  }

  // The last token of the shortest part of the merged list that weighs at least `need`; kLastCode
  // if the whole list does not.
  __device__ uint64_t cut_list(int size, uint64_t need) {
    const int each = (size + kThreads - 1) / kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, size);
    const int end = min(begin + each, size);
    uint64_t sum = 0;
    for (int i = begin; i < end; ++i) sum += weight_of_code(shared.merged[i]);
    if (threadIdx.x == 0) shared.boundary = kLastCode;
    uint64_t through = block_sum_before(sum, shared.scratch);
    if (through < need && through + sum >= need) {
      int i = begin;
      while ((through += weight_of_code(shared.merged[i])) < need) ++i;
      shared.boundary = shared.merged[i];
    }
    __syncthreads();
    return shared.boundary;
  }

  // Adds the merged list's tokens up to the boundary to the weights of the stretches they are from.
  __device__ void weigh_listed(int size, uint64_t boundary) {
    for (int i = threadIdx.x; i < size; i += kThreads) {
      const uint64_t code = shared.merged[i];
      if (code <= boundary) weigh_token(code);
    }
  }

  __device__ void weigh_token(uint64_t code) {
    const int warp = row.warp_of(static_cast<int>(id_of_code(code)));
    if (warp / kWarps != Team::rank()) return;
    const float e = exponential(scaled(logit_of_code(code)));
    if (e >= parameters.min_p) shared.kept_weight[warp % kWarps].add(weight_of(e));
  }
};

}  // namespace sampling
}  // namespace pagedinfer
