// Where top-k and top-p cut a row's order of tokens.
#pragma once

#include <cstdint>

#include "sampler/row_passes.cuh"

namespace pagedinfer {
namespace sampling {

// A top-k up to this is looked for among the list's tokens at once. A thread's columns are split
// over the lanes of a vector, so a block alone knows the largest of 2,048 groups of columns, enough
// to find a bound for 1,024 tokens.
constexpr int kLongestListedTopK = 1024;

template <typename T, bool kAligned>
struct RowBoundary : RowPasses<T, kAligned> {
  using Passes = RowPasses<T, kAligned>;
  using Passes::collect, Passes::cut_bins, Passes::cut_list, Passes::fill_digits;
  using Passes::kVector, Passes::parameters, Passes::row, Passes::scaled, Passes::shared;
  using Passes::listed_weight, Passes::merge_lists, Passes::sort_codes, Passes::weigh_listed;

  // All of these leave in kept_weight what each stretch's kept tokens weigh.

  // The last token that top-k and top-p keep, in `boundary`; kLastCode if they keep all (of any
  // weight). False if the row has to be searched for it.
  __device__ bool find_boundary(const float (&groups)[kVector], uint64_t* boundary) {
    *boundary = kLastCode;
    if (parameters.top_k >= row.vocab_size && !parameters.has_top_p) {
      collect(empty_window(), kLastCode);
      return true;
    }
    return parameters.top_k <= kLongestListedTopK && find_among_top(groups, boundary);
  }

  // The same, of a row with a filter, by searching the whole row.
  __device__ uint64_t search_filters() {
    uint64_t boundary = kLastCode;
    bool by_count = parameters.top_k < row.vocab_size;
#pragma unroll 1  // one copy of the search's code
    for (;;) {
      const Need top_k{Need::Of::count, static_cast<uint64_t>(parameters.top_k)};
      const Need top_p{Need::Of::share, parameters.top_p};
      boundary = search(by_count ? top_k : top_p, boundary);
      if (!by_count || !parameters.has_top_p) return boundary;
      by_count = false;
    }
  }

  // Looks for a top-k's among the tokens at the top. False if they are too many.
  __device__ bool find_among_top(const float (&groups)[kVector], uint64_t* boundary) {
    const auto wanted = static_cast<uint64_t>(parameters.top_k);
    shared.bins.clear();
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int bin = bin_of(scaled(groups[i]));
      if (bin != kLastBin) shared.bins.add_count(bin);
    }
    // The bins up to the cut hold the wanted number of tokens at least: so many groups have their
    // largest there. (If all groups together do not, the tokens that have any weight are enough.)
    cut_bins(shared.bins, {Need::Of::count, wanted}, shared.cut);
    Passes::list_top(min(shared.cut.bin, kLastBin - 1));
    Team::sync();
    int size = merge_lists(shared.list, shared.merged);
    if (size > kListCapacity) return false;
    sort_codes(shared.merged, size);

    if (parameters.top_k <= size) {
      size = static_cast<int>(parameters.top_k);
      *boundary = shared.merged[size - 1];
    }
    if (parameters.has_top_p) {
      *boundary = cut_list(size, top_p_target(listed_weight(size), parameters.top_p));
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
      Passes::template fill_bins<false>(by_count, limit);
    } else {
      Passes::template fill_bins<true>(by_count, limit);
    }
    cut_bins(shared.bins, need, shared.cut);
    if (shared.cut.bin == kNumBins) {
      collect(empty_window(), limit);
      return limit;
    }
    // One bin rarely holds more than the list takes; then it is narrowed and collected again.
    Window window = window_of_bin(shared.cut.bin);
    int size = 0;
    for (;;) {
      collect(window, limit);
      Team::sync();
      size = merge_lists(shared.list, shared.merged);
      if (size <= kListCapacity) break;
      Team::sync();
      fill_digits(window, by_count, limit);
      cut_bins(shared.bins, {by_count ? Need::Of::count : Need::Of::weight, shared.cut.need},
               shared.cut);
      window = narrowed(window, shared.cut.bin);
    }
    sort_codes(shared.merged, size);
    const uint64_t rest = shared.cut.need;
    const uint64_t boundary = by_count ? shared.merged[rest - 1] : cut_list(size, rest);
    weigh_listed(size, boundary);
    return boundary;
  }
};

}  // namespace sampling
}  // namespace pagedinfer
