// The order of a row's tokens - falling logit, ties by rising id - as one integer per token, and
// the bins and windows by which a boundary in that order is searched for. Shared by CPU and CUDA.
#pragma once

#include "sampler/sampling_math.h"

namespace pagedinfer {
namespace sampling {

// Rises with the float; -0.0 and 0.0 give the same.
PAGEDINFER_SHARED uint32_t ordered_key(float x) {
  const uint32_t bits = x == 0.0f ? 0u : bits_of(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

PAGEDINFER_SHARED float float_of_key(uint32_t key) {
  return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A token's place in the order: the smaller code comes first. No two tokens of a row share one.
PAGEDINFER_SHARED uint64_t order_code(float logit, uint32_t id) {
  return uint64_t{~ordered_key(logit)} << 32 | id;
}

PAGEDINFER_SHARED float logit_of_code(uint64_t code) {
  return float_of_key(~static_cast<uint32_t>(code >> 32));
}

PAGEDINFER_SHARED uint32_t id_of_code(uint64_t code) { return static_cast<uint32_t>(code); }

// -inf with the highest of ids: comes after every token. As a boundary it keeps all.
constexpr uint64_t kLastCode = 0xff800000ffffffffu;

// ---- bins ----

// A row's tokens fall into bins by z, the first bin at the top, 1/64 wide. The last one takes all
// that lies below; those tokens weigh nothing (exp(-31.98) < 2^-44), so no search ever enters it.
constexpr int kNumBins = 2048;
constexpr int kBinsPerUnit = 64;
constexpr int kLastBin = kNumBins - 1;

PAGEDINFER_SHARED int bin_of(float z) {
  const float scaled = multiply(z, -static_cast<float>(kBinsPerUnit));
  return scaled < static_cast<float>(kLastBin) ? static_cast<int>(scaled) : kLastBin;
}

// ---- windows ----

// A stretch of the order in which a boundary is known to lie: the tokens of one bin whose codes are
// in [first, last]. A crowded window is narrowed digit by digit of the codes: 11, 11 and 10 bits of
// the key, then 11 bits of the id, which leaves 256 tokens at most, whatever the ties.
struct Window {
  int bin;
  int digits;  // how many digits are fixed, 0 to 4
  uint64_t first, last;
};

constexpr int kMaxDigits = 4;

PAGEDINFER_SHARED Window window_of_bin(int bin) { return {bin, 0, 0, kLastCode}; }

// Holds nothing; all tokens of any weight are above it.
PAGEDINFER_SHARED Window empty_window() { return {kLastBin, kMaxDigits, 1, 0}; }

PAGEDINFER_SHARED int digit_shift(int digits) {
  return digits == 0 ? 53 : digits == 1 ? 42 : digits == 2 ? 32 : 8;
}

// The digit by which the window's tokens are told apart next: below kNumBins, rising along the
// order.
PAGEDINFER_SHARED int next_digit(const Window& window, uint64_t code) {
  return static_cast<int>((code - window.first) >> digit_shift(window.digits)) & (kNumBins - 1);
}

PAGEDINFER_SHARED Window narrowed(const Window& window, int digit) {
  const int shift = digit_shift(window.digits);
  const uint64_t first = window.first + (static_cast<uint64_t>(digit) << shift);
  return {window.bin, window.digits + 1, first, first + ((uint64_t{1} << shift) - 1)};
}

PAGEDINFER_SHARED bool is_above(const Window& window, int bin, uint64_t code) {
  return bin < window.bin || (bin == window.bin && code < window.first);
}

PAGEDINFER_SHARED bool is_inside(const Window& window, int bin, uint64_t code) {
  return bin == window.bin && code >= window.first && code <= window.last;
}

}  // namespace sampling
}  // namespace pagedinfer
