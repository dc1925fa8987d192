// sample_tokens on the GPU: see sample_tokens.h for the maths and the tensors.
//
// Grid: a team of 1, 2, 4 or 8 blocks per row (a cluster; always 1 before sm_90), the more the
// fewer rows there are. A row's passes read it from device memory once and then mostly from L2:
//
//   greedy      1 pass: the first of the order
//   otherwise   1 pass: the largest logit of every thread's columns, and of the row
//   top-k, or top-p that leaves few tokens
//               1 pass: the tokens at the top into a list, as far down as those largest logits show
//               to be enough; the list is sorted and cut
//   any other   1 pass: counts and weights by bins, which tell in which bin the boundary lies;
//   crowded
//               bins are narrowed, 1 pass a digit (only where thousands of logits tie or nearly so)
//               1 pass: that bin's tokens into the list, and the weights of all before them
//   the draw    from the weights of each warp's stretch of the row; only one stretch is read again
//
// Shared memory: 43 KB a block. Row strides and addresses are free. Padding rows (slot -1) return
// at once. Invariants: whatever decides is an integer or a comparison, so that neither the team's
// size nor timing shows in the result; a barrier of the team (Team::sync) lies between a block's
// last read of another's shared memory and the next write there.
#include <cmath>

#include "sampler/row_bins.cuh"
#include "sampler/row_reader.cuh"
#include "sampler/sample_tokens_cuda.h"
#include "sampler/team.cuh"
#include "sampler/token_list.cuh"
#include "sampler/token_order.h"

namespace pagedinfer {

namespace {

using namespace sampling;

// A top-k up to this is looked for among the list's tokens at once; a top-p without one, among this
// many. A thread's columns are split over the lanes of a vector, so a block alone knows the largest
// of 2,048 groups of columns, enough to find a bound for 1,024 tokens.
constexpr int kLongestListedTopK = 1024;
constexpr int kListedForTopP = 256;

struct Shared {
  RowParameters parameters;
  union {
    Bins bins;
    uint64_t merged[kListCapacity];  // the team's list; only when no bins are in use
  };
  TokenList list;
  SharedSum kept_weight[kWarps];  // of each warp's stretch of the row
  uint64_t scratch[kWarps];
  // One for each exchange in the team, so that none is overwritten while others read it.
  uint64_t first_code, listed_total, raw_total;
  BinCut cut;
  uint64_t boundary;
  int drawn_warp;
  uint64_t random;
};

template <typename T, bool kAligned>
struct RowSampler {
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
    uint64_t least = value;
    for (int rank = 0; rank < Team::size(); ++rank) {
      const uint64_t theirs = Team::of(slot, rank);
      least = theirs < least ? theirs : least;
    }
    return least;
  }

  __device__ uint64_t team_sum(uint64_t value, uint64_t& slot) {
    value = block_sum(value, shared.scratch);
    if (threadIdx.x == 0) slot = value;
    Team::sync();
    uint64_t sum = 0;
    for (int rank = 0; rank < Team::size(); ++rank) sum += Team::of(slot, rank);
    return sum;
  }

  // ---- passes over the row ----

  // The code of the first token in the order. Its logit is not finite if the row cannot be sampled.
  __device__ uint64_t find_first() {
    float best = -INFINITY, poison = -INFINITY;
    int best_vector = -1;
    row.scan_stretch(turn(), [&](int vector, const float (&x)[kVector]) {
      float most = x[0];
#pragma unroll
      for (int i = 1; i < kVector; ++i) most = max_or_nan(most, x[i]);
      poison = max_or_nan(poison, most);
      if (most > best) {
        best = most;
        best_vector = vector;
      }
    });
    uint64_t code = kLastCode;
    if (!(poison < INFINITY)) {
      code = 0;
    } else if (best_vector >= 0) {
      float x[kVector];
      row.read(best_vector, row.num_vectors, x);
#pragma unroll
      for (int i = kVector - 1; i >= 0; --i) {
        if (x[i] == best) code = order_code(best, row.first_column(best_vector) + i);
      }
    }
    return team_min(code, shared.first_code);
  }

  // The largest logit of each of this thread's columns-modulo-a-vector, and of the row. Not finite
  // if the row cannot be sampled.
  __device__ float find_largest(float (&groups)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) groups[i] = -INFINITY;
    row.scan_stretch(turn(), [&](int, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) groups[i] = max_or_nan(groups[i], x[i]);
    });
    float most = groups[0];
#pragma unroll
    for (int i = 1; i < kVector; ++i) most = max_or_nan(most, groups[i]);
    return logit_of_code(team_min(order_code(most, 0), shared.first_code));
  }

  // Lists the tokens of the bins up to `bin`. With kTotal, returns what this thread's tokens weigh.
  template <bool kTotal>
  __device__ uint64_t list_top(int bin) {
    clear_list();
    const float below = -static_cast<float>(bin + 1) / kBinsPerUnit;
    uint64_t total = 0;
    row.scan_stretch(turn(), [&](int vector, const float (&x)[kVector]) {
      uint32_t listed = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float z = scaled(x[i]);
        if (kTotal) total += weight_of(exponential(z));
        if (z > below) listed |= 1u << i;
      }
      for_columns(listed, vector,
                  [&](int column, float logit) { shared.list.add(order_code(logit, column)); });
    });
    return total;
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

  // The weight of the row at temperature 1, for the log-probability.
  __device__ uint64_t find_raw_total() {
    uint64_t total = 0;
    row.scan_stretch(turn(), [&](int, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        total += weight_of(exponential(scaled_logit(x[i], largest, 1.0f)));
      }
    });
    return team_sum(total, shared.raw_total);
  }

  // ---- the list ----

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
      if (code > boundary) continue;
      const float e = exponential(scaled(logit_of_code(code)));
      const int warp = row.warp_of(static_cast<int>(id_of_code(code)));
      if (warp / kWarps == Team::rank() && e >= parameters.min_p) {
        shared.kept_weight[warp % kWarps].add(weight_of(e));
      }
    }
  }

  // ---- the boundary ----
  // These leave in kept_weight what each stretch's kept tokens weigh.

  // The last token that top-k and top-p keep; kLastCode if they keep all (of any weight).
  __device__ uint64_t find_boundary(const float (&groups)[kVector]) {
    const bool has_top_k = parameters.top_k < row.vocab_size;
    if (!has_top_k && !parameters.has_top_p) {
      collect(empty_window(), kLastCode);
      return kLastCode;
    }
    uint64_t boundary = kLastCode;
    if (find_among_top(groups, has_top_k, &boundary)) return boundary;
#pragma unroll 1  // one copy of the search's code
    for (int filter = has_top_k ? 0 : 1; filter < (parameters.has_top_p ? 2 : 1); ++filter) {
      const Need top_k{Need::Of::count, static_cast<uint64_t>(parameters.top_k)};
      const Need top_p{Need::Of::share, parameters.top_p};
      boundary = search(filter == 0 ? top_k : top_p, boundary);
    }
    return boundary;
  }

  // Looks for it among the tokens at the top. False if they are too many or not enough.
  __device__ bool find_among_top(const float (&groups)[kVector], bool has_top_k,
                                 uint64_t* boundary) {
    if (has_top_k && parameters.top_k > kLongestListedTopK) return false;
    const uint64_t wanted = has_top_k ? parameters.top_k : kListedForTopP;
    shared.bins.clear();
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float z = scaled(groups[i]);
      const int bin = bin_of(z);
      if (bin == kLastBin) continue;
      shared.bins.add_count(bin);
      if (!has_top_k) shared.bins.add_weight(bin, weight_of(exponential(z)));
    }
    // The bins up to the cut hold the wanted number of tokens at least: so many groups have their
    // largest there. (If all groups together do not, the tokens that have any weight are enough.)
    const BinCut cut = cut_bins(shared.bins, {Need::Of::count, wanted}, shared.cut);
    // As the largest of the groups go, so do all tokens: a guess that only costs time if wrong.
    if (!has_top_k && cut.bin < kNumBins &&
        cut.weight_through < top_p_target(cut.total_weight, parameters.top_p)) {
      return false;
    }
    const int bin = min(cut.bin, kLastBin - 1);

    uint64_t total = 0;
    if (has_top_k) {
      list_top<false>(bin);
      Team::sync();
    } else {
      total = team_sum(list_top<true>(bin), shared.listed_total);
    }
    int size = merge_lists(shared.list, shared.merged);
    if (size > kListCapacity) return false;
    sort_codes(shared.merged, size);

    if (has_top_k) {
      if (parameters.top_k <= size) {
        size = static_cast<int>(parameters.top_k);
        *boundary = shared.merged[size - 1];
      }
      if (parameters.has_top_p) total = listed_weight(size);
    }
    if (parameters.has_top_p) {
      *boundary = cut_list(size, top_p_target(total, parameters.top_p));
      if (*boundary == kLastCode) return false;
    }
    weigh_listed(size, *boundary);
    return true;
  }

  // Looks for it in the whole row: the last token of the shortest part of the order in which the
  // need is met, of those up to the limit; the limit if they all do not meet it.
  __device__ uint64_t search(Need need, uint64_t limit) {
    const bool by_count = need.of == Need::Of::count;
    Team::sync();
    if (limit == kLastCode) {
      fill_bins<false>(by_count, limit);
    } else {
      fill_bins<true>(by_count, limit);
    }
    BinCut cut = cut_bins(shared.bins, need, shared.cut);
    if (cut.bin == kNumBins) {
      collect(empty_window(), limit);
      return limit;
    }
    // One bin rarely holds more than the list takes; then it is narrowed and collected again.
    Window window = window_of_bin(cut.bin);
    int size = 0;
    for (;;) {
      need = {by_count ? Need::Of::count : Need::Of::weight, cut.need};
      collect(window, limit);
      Team::sync();
      size = merge_lists(shared.list, shared.merged);
      if (size <= kListCapacity) break;
      Team::sync();
      fill_digits(window, by_count, limit);
      cut = cut_bins(shared.bins, need, shared.cut);
      window = narrowed(window, cut.bin);
    }
    sort_codes(shared.merged, size);
    const uint64_t boundary =
        by_count ? shared.merged[need.amount - 1] : cut_list(size, need.amount);
    weigh_listed(size, boundary);
    return boundary;
  }

  // ---- the draw ----

  // What a token weighs in the draw.
  __device__ uint64_t drawn_weight(float logit, int column, uint64_t boundary) const {
    const float e = exponential(scaled(logit));
    const bool kept =
        order_code(logit, static_cast<uint32_t>(column)) <= boundary && e >= parameters.min_p;
    return kept ? weight_of(e) : 0;
  }

  // Draws from the kept tokens and calls write(code) in one thread of the team.
  template <typename Write>
  __device__ void draw(uint64_t boundary, const Write& write) {
    Team::sync();
    if (warp_index() == 0) choose_stretch();
    __syncthreads();
    const int stretch = shared.drawn_warp;
    if (stretch / kWarps != Team::rank()) return;

    // Each warp sums a part of the stretch; the first then looks through the part that was hit.
    const int begin = row.stretch_begin(stretch), end = row.stretch_end(stretch);
    const int each = (row.vectors_a_warp / kWarpSize + kWarps - 1) / kWarps * kWarpSize;
    const int part_begin = begin + warp_index() * each;
    uint64_t sum = 0;
    auto add = [&](int vector, const float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sum += drawn_weight(x[i], row.first_column(vector) + i, boundary);
      }
    };
    row.template scan<2>(part_begin, min(part_begin + each, end), false, add);
    sum = warp_sum(sum);
    if (lane_index() == 0) shared.scratch[warp_index()] = sum;
    __syncthreads();
    if (warp_index() > 0) return;
    uint64_t random = shared.random;
    int part = 0;
    while (random >= shared.scratch[part]) random -= shared.scratch[part++];
    draw_within(begin + part * each, end, boundary, random, write);
  }

  // The stretch in which the random number falls, and how far into it. The first warp.
  __device__ void choose_stretch() {
    const int stretches = Team::size() * kWarps;
    constexpr int kEach = kMaxTeam * kWarps / kWarpSize;  // a lane's
    uint64_t weights[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int stretch = lane_index() * kEach + i;
      weights[i] = stretch < stretches
                       ? Team::of(shared.kept_weight[stretch % kWarps], stretch / kWarps).value()
                       : 0;
      sum += weights[i];
    }
    const uint64_t through = warp_prefix_sum(sum);
    const uint64_t total = __shfl_sync(kAllLanes, through, kWarpSize - 1);
    uint64_t random = random_below(total, parameters.seed, parameters.position);
    if (random < through && random >= through - sum) {
      random -= through - sum;
      bool found = false;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (!found && random < weights[i]) {
          shared.drawn_warp = lane_index() * kEach + i;
          shared.random = random;
          found = true;
        }
        if (!found) random -= weights[i];
      }
    }
  }

  // Walks vectors from `begin` on, 32 at a time, until the running weight exceeds `random`. One
  // warp.
  template <typename Write>
  __device__ void draw_within(int begin, int end, uint64_t boundary, uint64_t random,
                              const Write& write) const {
    for (int step = begin; step < end; step += kWarpSize) {
      const int vector = step + lane_index();
      float x[kVector];
      uint64_t weights[kVector], sum = 0;
      row.read(vector, end, x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        weights[i] = drawn_weight(x[i], row.first_column(vector) + i, boundary);
        sum += weights[i];
      }
      const uint64_t through = warp_prefix_sum(sum);
      const uint64_t total = __shfl_sync(kAllLanes, through, kWarpSize - 1);
      if (random >= total) {
        random -= total;
        continue;
      }
      if (random < through && random >= through - sum) {
        random -= through - sum;
        bool found = false;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (!found && random < weights[i]) {
            write(order_code(x[i], row.first_column(vector) + i));
            found = true;
          }
          if (!found) random -= weights[i];
        }
      }
      return;
    }
  }
};

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    sample_tokens_kernel(const __grid_constant__ SampleTokensParams p) {
  __shared__ Shared shared;
  const int64_t r = blockIdx.x / Team::size();
  const bool is_first_thread = Team::rank() == 0 && threadIdx.x == 0;
  auto write = [&](int64_t id, float logprob) {
    p.token_ids[r] = id;
    if (p.logprobs != nullptr) p.logprobs[r] = logprob;
  };
  const int32_t slot = p.slots[r];
  if (slot < 0 || slot >= p.num_slots) {
    if (is_first_thread) write(-1, 0.0f);
    return;
  }

  if (threadIdx.x == 0) {
    shared.parameters =
        row_parameters(p.temperature[slot], p.top_k[slot], p.top_p[slot], p.min_p[slot],
                       p.seeds[slot], p.positions[slot], p.vocab_size);
  }
  __syncthreads();
  const T* logits = static_cast<const T*>(p.logits) + r * p.row_stride;
  RowSampler<T, kAligned> sampler{
      {logits, static_cast<int>(p.vocab_size)}, shared, shared.parameters,
      shared.parameters.inverse_temperature,    0.0f,   false};
  const bool greedy = shared.parameters.greedy;
  uint64_t first = 0;
  float groups[sampler.kVector];
  if (greedy) {
    first = sampler.find_first();
    sampler.largest = logit_of_code(first);
  } else {
    sampler.largest = sampler.find_largest(groups);
  }
  if (!isfinite(sampler.largest)) {
    if (is_first_thread) write(-1, NAN);
  } else {
    const uint64_t raw_total = p.logprobs == nullptr ? 0 : sampler.find_raw_total();
    auto write_drawn = [&](uint64_t code) {
      const float logprob = p.logprobs == nullptr
                                ? 0.0f
                                : log_probability(logit_of_code(code), sampler.largest, raw_total);
      write(id_of_code(code), logprob);
    };
    if (!greedy) {
      sampler.draw(sampler.find_boundary(groups), write_drawn);
    } else if (is_first_thread) {
      write_drawn(first);
    }
  }
  Team::sync();  // no block leaves while another may look at its shared memory
}

// How many blocks share a row: the most that still lets all rows run at once, two blocks to a
// multiprocessor, and that leaves each warp something to read.
int team_size(const SampleTokensParams& params, int multiprocessors) {
  const int64_t warp_columns = kWarpSize * 16 / size_of(params.dtype);
  int team = kMaxTeam;
  while (team > 1 && (params.num_rows * team > 2 * multiprocessors ||
                      params.vocab_size < (team - 1) * kWarps * warp_columns)) {
    team /= 2;
  }
  return team;
}

cudaError_t launch(void (*kernel)(SampleTokensParams), const SampleTokensParams& params,
                   cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaFuncAttributes attributes;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  // There are clusters if the code that this device runs was compiled for them.
  const int team = attributes.ptxVersion >= 90 ? team_size(params, multiprocessors) : 1;

  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(team);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.num_rows * team));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = team > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename T>
cudaError_t launch(const SampleTokensParams& params, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(params.logits) % 16 == 0 &&
                       params.row_stride * sizeof(T) % 16 == 0 &&
                       params.vocab_size * sizeof(T) % 16 == 0;
  return aligned ? launch(sample_tokens_kernel<T, true>, params, stream)
                 : launch(sample_tokens_kernel<T, false>, params, stream);
}

}  // namespace

cudaError_t launch_sample_tokens(const SampleTokensParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::float32:
      return launch<float>(params, stream);
    case DType::float16:
      return launch<Float16>(params, stream);
    case DType::bfloat16:
      return launch<BFloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace pagedinfer
