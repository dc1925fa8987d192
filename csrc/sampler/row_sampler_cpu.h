// One row on the CPU: its largest logit, where top-k and top-p cut its order of tokens, the draw.
//
// A row is read in groups of 64 columns, as fp32. The first pass keeps the largest logit of every
// group, which gives the row's largest and lets later passes skip groups that cannot matter. What
// is left to find is one boundary in the order of tokens:
//
//   1. Nearly always it lies among a few hundred tokens at the top: those are put in a list (how
//      far down to go follows from the groups' largest), sorted, and cut.
//   2. Otherwise (a flat distribution, a long top-k, many ties) the row's histogram says in which
//      bin the boundary lies, crowded bins are narrowed digit by digit, and the list is made of
//      what remains.
//
// The draw then walks the row once more, up to the boundary. For *_cpu.cpp files: see
// common/cpu_isa.h.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "sampler/token_order.h"
#include "sampler/upcast.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

using namespace sampling;  // NOLINT: the arithmetic, all of it

constexpr int kGroup = 64;  // columns
constexpr int64_t kMaxGroups = kMaxVocabSize / kGroup;
constexpr int64_t kListCapacity = 2048;
// A top-k up to this is looked for among the list's tokens at once; a top-p without one, among this
// many.
constexpr int64_t kLongestListedTopK = 1024;
constexpr int64_t kListedForTopP = 256;
constexpr int kPart = 16;  // columns that are looked at one by one if one of them is wanted

// How many tokens fell into a bin, and their weight.
struct Bin {
  uint64_t weight, count;
};

// What a thread needs for one row.
struct Scratch {
  float largest_of_group[kMaxGroups];
  uint64_t weight_of_group[kMaxGroups];
  Bin bins[kNumBins];
  uint64_t list[kListCapacity];
};

// Sorts codes ascending: a bitonic network, whose inner loops vectorise. `size` is a power of two.
void sort_codes(uint64_t* codes, int64_t size) {
  for (int64_t run = 2; run <= size; run *= 2) {
    for (int64_t distance = run / 2; distance > 0; distance /= 2) {
      for (int64_t begin = 0; begin < size; begin += 2 * distance) {
        uint64_t* low = codes + begin;
        uint64_t* high = low + distance;
        const bool rising = (begin & run) == 0;
        for (int64_t i = 0; i < distance; ++i) {
          const uint64_t smaller = low[i] < high[i] ? low[i] : high[i];
          const uint64_t larger = low[i] < high[i] ? high[i] : low[i];
          low[i] = rising ? smaller : larger;
          high[i] = rising ? larger : smaller;
        }
      }
    }
  }
}

uint64_t sum_of_weights(const float* e) {
  uint64_t sum = 0;
  for (int i = 0; i < kGroup; ++i) sum += weight_of(e[i]);
  return sum;
}

// A cut through the order: by a number of tokens or by a sum of weights.
struct Need {
  bool by_weight;
  uint64_t amount;  // >= 1
};

template <typename T>
class RowSampler {
 public:
  RowSampler(const T* logits, int64_t vocab_size, const RowParameters& parameters, Scratch* scratch)
      : logits_(logits),
        vocab_size_(vocab_size),
        num_groups_((vocab_size + kGroup - 1) / kGroup),
        row_(parameters),
        scratch_(*scratch) {}

  // The drawn id, or -1.
  int64_t sample() {
    if (!find_largest()) return -1;
    if (row_.greedy) return first_of_order();
    return draw(find_boundary());
  }

  float logit(int64_t id) const { return upcast(logits_[id]); }

  float logprob(int64_t id) const { return logprob_of(logit(id), total_weight(1.0f)); }

  // ---- for top_logprobs, after find_largest() ----

  float logprob_of(float logit, uint64_t raw_total) const {
    return log_probability(logit, largest_, raw_total);
  }

  // A token's place in the order, from 1.
  int64_t rank_of(int64_t id) const {
    const float mine = logit(id);
    float buffer[kGroup];
    int64_t before = 0;
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (scratch_.largest_of_group[group] < mine) continue;
      const float* x = read(group, buffer);
      const int64_t ids_before = id - group * kGroup;
      int count = 0;
      for (int i = 0; i < kGroup; ++i) {
        count += (x[i] > mine) | ((x[i] == mine) & (i < ids_before));
      }
      before += count;
    }
    return before + 1;
  }

  // The codes of the first top_k tokens of the order, sorted; fewer if fewer have a finite logit.
  // top_k is at most kListCapacity.
  const uint64_t* list_first(int64_t* size) {
    uint64_t boundary = kLastCode;
    if (row_.top_k < vocab_size_) {
      boundary = find_boundary();
      if (boundary == kLastCode) {
        // Too few tokens weigh anything. With all in one bin they are told apart by their logits'
        // digits.
        row_.inverse_temperature = 0.0f;
        fill_bins(kLastCode);
        boundary = search({false, static_cast<uint64_t>(row_.top_k)}, kLastCode);
      }
    }
    const float last = logit_of_code(boundary);
    float buffer[kGroup];
    list_size_ = 0;
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (scratch_.largest_of_group[group] < last) continue;
      const float* x = read(group, buffer);
      for (int i = 0; i < kGroup; ++i) {
        const uint64_t code = order_code(x[i], group * kGroup + i);
        if (code <= boundary && x[i] > -INFINITY) scratch_.list[list_size_++] = code;
      }
    }
    sort_list();
    *size = list_size_;
    return scratch_.list;
  }

  // ---- passes over the row ----

  // False if the row cannot be sampled: NaN or +inf in it, or nothing but -inf.
  bool find_largest() {
    float buffer[kGroup];
    bool valid = true;
    largest_ = -INFINITY;
    for (int64_t group = 0; group < num_groups_; ++group) {
      const float* x = read(group, buffer);
      float largest = -INFINITY;
      int finite_or_less = 1;
#pragma omp simd reduction(max : largest) reduction(& : finite_or_less)
      for (int i = 0; i < kGroup; ++i) {
        largest = x[i] > largest ? x[i] : largest;
        finite_or_less &= x[i] <= FLT_MAX;
      }
      scratch_.largest_of_group[group] = largest;
      largest_ = largest > largest_ ? largest : largest_;
      valid &= finite_or_less != 0;
    }
    return valid && largest_ > -INFINITY;
  }

  uint64_t total_weight(float inverse_temperature) const {
    float buffer[kGroup], e[kGroup];
    uint64_t total = 0;
    for (int64_t group = 0; group < num_groups_; ++group) {
      const float z = scaled_logit(scratch_.largest_of_group[group], largest_, inverse_temperature);
      if (bin_of(z) == kLastBin) continue;
      exponentials(read(group, buffer), inverse_temperature, e);
      total += sum_of_weights(e);
    }
    return total;
  }

 private:
  // ---- reading ----

  // 64 columns from group * 64 on; past the vocabulary there is -inf. `buffer` is used if need be.
  const float* read(int64_t group, float* buffer) const {
    const int64_t begin = group * kGroup;
    const int64_t count = vocab_size_ - begin < kGroup ? vocab_size_ - begin : kGroup;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (count == kGroup) return reinterpret_cast<const float*>(logits_ + begin);
    }
    if (count == kGroup) {
      for (int i = 0; i < kGroup; ++i) buffer[i] = upcast(logits_[begin + i]);
    } else {
      for (int i = 0; i < kGroup; ++i)
        buffer[i] = i < count ? upcast(logits_[begin + i]) : -INFINITY;
    }
    return buffer;
  }

  float scaled(float logit) const {
    return scaled_logit(logit, largest_, row_.inverse_temperature);
  }

  // Whether a group holds a token of this bin or an earlier one.
  bool reaches(int64_t group, int bin) const {
    return bin_of(scaled(scratch_.largest_of_group[group])) <= bin;
  }

  // exp(z) of a group's tokens; 0 for those after the boundary and those below min_p.
  void kept_exponentials(const float* x, int64_t group, uint64_t boundary, float min_p,
                         float* __restrict e) const {
    exponentials(x, row_.inverse_temperature, e);
    // Ids that tie with the boundary's logit stay up to the boundary's.
    const float last = logit_of_code(boundary);
    const int64_t tied = static_cast<int64_t>(id_of_code(boundary)) - group * kGroup;
    const int last_tied = tied < -1 ? -1 : tied < kGroup ? static_cast<int>(tied) : kGroup;
    for (int i = 0; i < kGroup; ++i) {
      const float if_tied = i <= last_tied ? e[i] : 0.0f;
      const float before = x[i] == last ? if_tied : e[i];
      const float kept = x[i] >= last ? before : 0.0f;
      e[i] = kept >= min_p ? kept : 0.0f;
    }
  }

  // Members are read once, before the loop: the compiler cannot know that e does not overlap them.
  void exponentials(const float* x, float inverse_temperature, float* __restrict e) const {
    const float largest = largest_;
    for (int i = 0; i < kGroup; ++i) {
      e[i] = exponential(scaled_logit(x[i], largest, inverse_temperature));
    }
  }

  void bins_of(const float* x, int* __restrict bins) const {
    const float largest = largest_, inverse_temperature = row_.inverse_temperature;
    for (int i = 0; i < kGroup; ++i) {
      bins[i] = bin_of(scaled_logit(x[i], largest, inverse_temperature));
    }
  }

  int64_t first_of_order() const {
    int64_t group = 0;
    while (scratch_.largest_of_group[group] != largest_) ++group;
    float buffer[kGroup];
    const float* x = read(group, buffer);
    int i = 0;
    while (x[i] != largest_) ++i;
    return group * kGroup + i;
  }

  // Calls visit(column in the group) for the tokens whose bin is in [first, last].
  template <typename Visit>
  void for_tokens_in_bins(const float* x, int first, int last, const Visit& visit) const {
    int bins[kGroup];
    bins_of(x, bins);
    for (int part = 0; part < kGroup; part += kPart) {
      int any = 0;
      for (int i = part; i < part + kPart; ++i) any |= (bins[i] >= first) & (bins[i] <= last);
      if (!any) continue;
      for (int i = part; i < part + kPart; ++i) {
        if (bins[i] >= first && bins[i] <= last) visit(i);
      }
    }
  }

  // Lists, sorted, all tokens of the bins up to `bin`. False if there is no room.
  bool list_top(int bin) {
    float buffer[kGroup];
    list_size_ = 0;
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (!reaches(group, bin)) continue;
      if (list_size_ > kListCapacity - kGroup) return false;
      const float* x = read(group, buffer);
      for_tokens_in_bins(x, 0, bin, [&](int i) {
        scratch_.list[list_size_++] = order_code(x[i], group * kGroup + i);
      });
    }
    sort_list();
    return true;
  }

  // Lists, sorted, the window's tokens up to the limit; there is room.
  void list_window(const Window& window, uint64_t limit) {
    float buffer[kGroup];
    list_size_ = 0;
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (!reaches(group, window.bin)) continue;
      const float* x = read(group, buffer);
      for_tokens_in_bins(x, window.bin, window.bin, [&](int i) {
        const uint64_t code = order_code(x[i], group * kGroup + i);
        if (is_inside(window, window.bin, code) && code <= limit)
          scratch_.list[list_size_++] = code;
      });
    }
    sort_list();
  }

  // Counts and weighs the tokens up to the limit by their bins.
  void fill_bins(uint64_t limit) {
    clear_bins();
    float buffer[kGroup], e[kGroup];
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (!reaches(group, kLastBin - 1)) continue;
      const float* x = read(group, buffer);
      int bins[kGroup];
      uint64_t weights[kGroup];
      kept_exponentials(x, group, limit, 0.0f, e);
      // Those past the limit have an exponential of 0 and join those in the last bin.
      bins_of(x, bins);
      for (int i = 0; i < kGroup; ++i) bins[i] = e[i] > 0.0f ? bins[i] : kLastBin;
      for (int i = 0; i < kGroup; ++i) weights[i] = weight_of(e[i]);
      for (int i = 0; i < kGroup; ++i) {
        scratch_.bins[bins[i]].weight += weights[i];
        scratch_.bins[bins[i]].count += 1;
      }
    }
    scratch_.bins[kLastBin] = {0, 0};
  }

  // Counts and weighs the window's tokens up to the limit by their next digit.
  void fill_digits(const Window& window, uint64_t limit) {
    clear_bins();
    float buffer[kGroup];
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (!reaches(group, window.bin)) continue;
      const float* x = read(group, buffer);
      for_tokens_in_bins(x, window.bin, window.bin, [&](int i) {
        const uint64_t code = order_code(x[i], group * kGroup + i);
        if (!is_inside(window, window.bin, code) || code > limit) return;
        Bin& bin = scratch_.bins[next_digit(window, code)];
        bin.weight += weight_of(exponential(scaled(x[i])));
        bin.count += 1;
      });
    }
  }

  // ---- the list and the bins ----

  void sort_list() {
    int64_t padded = 1;
    while (padded < list_size_) padded *= 2;
    for (int64_t i = list_size_; i < padded; ++i) scratch_.list[i] = kLastCode;
    sort_codes(scratch_.list, padded);
  }

  uint64_t weight_of_code(uint64_t code) const {
    return weight_of(exponential(scaled(logit_of_code(code))));
  }

  // The last token of the shortest part of the sorted list that meets the need; kLastCode if the
  // whole list does not.
  uint64_t cut_list(Need need) const {
    if (!need.by_weight) {
      return need.amount <= static_cast<uint64_t>(list_size_) ? scratch_.list[need.amount - 1]
                                                              : kLastCode;
    }
    uint64_t sum = 0;
    for (int64_t i = 0; i < list_size_; ++i) {
      sum += weight_of_code(scratch_.list[i]);
      if (sum >= need.amount) return scratch_.list[i];
    }
    return kLastCode;
  }

  void clear_bins() {
    for (Bin& bin : scratch_.bins) bin = {0, 0};
  }

  // The bin in which the need is met; what the bins before it hold is taken off the need. kLastBin
  // if all of them together do not meet it.
  int cut_bins(Need* need) const {
    for (int bin = 0; bin < kNumBins; ++bin) {
      const Bin& held = scratch_.bins[bin];
      const uint64_t amount = need->by_weight ? held.weight : held.count;
      if (amount >= need->amount) return bin;
      need->amount -= amount;
    }
    return kNumBins;
  }

  // The first bin such that the bins up to it hold at least `count` tokens, as far as the groups'
  // largest can tell. (If that is past the tokens that have weight, those are enough.)
  int bin_holding(int64_t count) {
    clear_bins();
    for (int64_t group = 0; group < num_groups_; ++group) {
      scratch_.bins[bin_of(scaled(scratch_.largest_of_group[group]))].count += 1;
    }
    Need need{false, static_cast<uint64_t>(count)};
    const int bin = cut_bins(&need);
    return bin < kLastBin ? bin : kLastBin - 1;
  }

  // ---- the boundary ----

  // The last token that top-k and top-p keep; kLastCode if they keep all (of any weight).
  uint64_t find_boundary() {
    const bool has_top_k = row_.top_k < vocab_size_;
    if (!has_top_k && !row_.has_top_p) return kLastCode;

    // Among the tokens at the top: all that weigh anything if they are few to begin with; else as
    // far down as the groups' largest tell, where there are enough groups to tell it.
    uint64_t total = has_top_k ? 0 : total_weight(row_.inverse_temperature);
    const int64_t wanted = has_top_k ? row_.top_k : kListedForTopP;
    const bool few = vocab_size_ <= kListCapacity;
    if (few || (wanted <= kLongestListedTopK && wanted <= num_groups_ / 2)) {
      if (list_top(few ? kLastBin - 1 : bin_holding(wanted))) {
        uint64_t boundary = kLastCode;
        if (has_top_k) {
          boundary = cut_list({false, static_cast<uint64_t>(row_.top_k)});
          if (!row_.has_top_p) return boundary;
          if (list_size_ > row_.top_k) list_size_ = row_.top_k;
          for (int64_t i = 0; i < list_size_; ++i) total += weight_of_code(scratch_.list[i]);
        }
        boundary = cut_list({true, top_p_target(total, row_.top_p)});
        if (has_top_k || boundary != kLastCode) return boundary;
      }
    }

    // In the whole row.
    uint64_t boundary = kLastCode;
    if (has_top_k) {
      fill_bins(boundary);
      boundary = search({false, static_cast<uint64_t>(row_.top_k)}, boundary);
    }
    if (row_.has_top_p) {
      fill_bins(boundary);
      total = 0;
      for (const Bin& bin : scratch_.bins) total += bin.weight;
      boundary = search({true, top_p_target(total, row_.top_p)}, boundary);
    }
    return boundary;
  }

  // The last token of the shortest part of the order that meets the need, of those up to the limit;
  // the limit if they all do not. The bins hold the tokens up to the limit.
  uint64_t search(Need need, uint64_t limit) {
    const int bin = cut_bins(&need);
    if (bin == kNumBins) return limit;
    Window window = window_of_bin(bin);
    uint64_t size = scratch_.bins[bin].count;
    while (size > kListCapacity) {
      fill_digits(window, limit);
      const int digit = cut_bins(&need);
      size = scratch_.bins[digit].count;
      window = narrowed(window, digit);
    }
    list_window(window, limit);
    return cut_list(need);
  }

  // ---- the draw ----

  int64_t draw(uint64_t boundary) {
    const float last = logit_of_code(boundary);
    float buffer[kGroup], e[kGroup];
    uint64_t total = 0;
    for (int64_t group = 0; group < num_groups_; ++group) {
      scratch_.weight_of_group[group] = 0;
      if (scratch_.largest_of_group[group] < last || !reaches(group, kLastBin - 1)) continue;
      kept_exponentials(read(group, buffer), group, boundary, row_.min_p, e);
      scratch_.weight_of_group[group] = sum_of_weights(e);
      total += scratch_.weight_of_group[group];
    }

    uint64_t random = random_below(total, random_bits(row_.seed, row_.position));
    int64_t group = 0;
    while (random >= scratch_.weight_of_group[group]) random -= scratch_.weight_of_group[group++];
    kept_exponentials(read(group, buffer), group, boundary, row_.min_p, e);
    int i = 0;
    while (random >= weight_of(e[i])) random -= weight_of(e[i++]);
    return group * kGroup + i;
  }

  const T* logits_;
  int64_t vocab_size_, num_groups_;
  RowParameters row_;
  Scratch& scratch_;
  float largest_ = 0.0f;
  int64_t list_size_ = 0;
};

}  // namespace
}  // namespace CPU_ISA
}  // namespace pagedinfer
