// The arithmetic of sampling, shared word for word by the CPU and the CUDA kernels, so that equal
// logits give equal tokens on either. docs/sampling.md explains it; this file is the definition.
//
// Every floating-point operation is rounded on its own, and an fma is one only where it is written.
// Sums of weights are integers, so their order cannot matter.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define PAGEDINFER_SHARED __host__ __device__ static inline
#else
#define PAGEDINFER_SHARED static inline  // internal linkage: see common/cpu_isa.h
#endif

namespace pagedinfer {
namespace sampling {

// ---- single operations, never contracted ----

PAGEDINFER_SHARED float subtract(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

PAGEDINFER_SHARED float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

PAGEDINFER_SHARED float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

PAGEDINFER_SHARED float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

PAGEDINFER_SHARED float fused_multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

PAGEDINFER_SHARED uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

PAGEDINFER_SHARED float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// The upper 64 bits of a product of 128.
PAGEDINFER_SHARED uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// ---- weights ----

// A weight is exp(z) * 2^44, cut to an integer. The weights of 2^19 tokens sum to at most 2^63.
constexpr int kWeightBits = 44;
constexpr int64_t kMaxVocabSize = int64_t{1} << 19;

// z <= 0: how far a logit lies below the row's largest, over the temperature.
PAGEDINFER_SHARED float scaled_logit(float logit, float largest, float inverse_temperature) {
  return multiply(subtract(logit, largest), inverse_temperature);
}

// exp(z) for z <= 0; 0 below -44, and for NaN (-inf at an infinite temperature). With n = round(z /
// ln 2) and r = z - n ln 2, it is 2^n (1 + (r + r^2 s(r))), s a minimax polynomial of degree 3.
// Checked over every float in [-44, 0]: exp(0) = 1, a larger z never gives less, and the relative
// error is below 3e-7. (The plain Horner form is not monotone: it rounds r (1 + ...) too early.)
PAGEDINFER_SHARED float exponential(float z) {
  const float kLog2E = 0x1.715476p+0f;
  const float kLn2 = 0x1.62e43p-1f;
  const float kRoundToInteger = 0x1.8p+23f;  // adding it leaves n in the low bits of the mantissa

  const float shifted = fused_multiply_add(z, kLog2E, kRoundToInteger);
  const float n = subtract(shifted, kRoundToInteger);
  const float r = fused_multiply_add(n, -kLn2, z);
  float s = 0x1.10627cp-7f;
  s = fused_multiply_add(s, r, 0x1.572a02p-5f);
  s = fused_multiply_add(s, r, 0x1.5557aep-3f);
  s = fused_multiply_add(s, r, 0x1.fffdfcp-2f);
  const float power = add(1.0f, fused_multiply_add(multiply(r, r), s, r));
  const float result = float_of(bits_of(power) + (bits_of(shifted) << 23));
  return z >= -44.0f ? result : 0.0f;
}

// The integer weight of e = exponential(z), e in [0, 1].
PAGEDINFER_SHARED uint64_t weight_of(float e) {
  const uint32_t bits = bits_of(e);
  const uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  const uint32_t below_one = 127u - (bits >> 23);  // e = mantissa * 2^-(23 + below_one)
  return (mantissa << (kWeightBits - 23)) >> (below_one < 63u ? below_one : 63u);
}

// ---- one row's parameters ----

// Below this a temperature means greedy.
constexpr float kGreedyTemperature = 1e-5f;

// A slot's parameters in the form in which rows use them. Out-of-range values have a meaning, so
// that nothing a device holds can lead astray: a NaN temperature is greedy, a NaN top_p or min_p is
// off, a top_p of 0 or less keeps one token, a min_p above 1 counts as 1.
struct RowParameters {
  bool greedy;
  float inverse_temperature;
  int64_t top_k;  // vocab_size: off
  bool has_top_p;
  uint64_t top_p;  // in units of 2^-32
  float min_p;     // 0: off
  uint64_t seed;
  uint64_t position;
};

PAGEDINFER_SHARED RowParameters row_parameters(float temperature, int32_t top_k, float top_p,
                                               float min_p, int64_t seed, int64_t position,
                                               int64_t vocab_size) {
  RowParameters row;
  row.greedy = !(temperature >= kGreedyTemperature);
  row.inverse_temperature = divide(1.0f, temperature);
  row.top_k = top_k > 0 && top_k < vocab_size ? top_k : vocab_size;
  row.has_top_p = top_p < 1.0f;
  // Exact: a float in (0, 1) times 2^32 fits a double, and rounding adds a half to a value below
  // 2^32.
  row.top_p = row.has_top_p && top_p > 0.0f
                  ? static_cast<uint64_t>(static_cast<double>(top_p) * 4294967296.0 + 0.5)
                  : 0;
  row.min_p = min_p > 0.0f ? (min_p < 1.0f ? min_p : 1.0f) : 0.0f;
  row.seed = static_cast<uint64_t>(seed);
  row.position = static_cast<uint64_t>(position);
  return row;
}

// top-p keeps the shortest prefix whose weights reach this: floor(total * p), at least 1, so that
// one token always stays.
PAGEDINFER_SHARED uint64_t top_p_target(uint64_t total, uint64_t top_p) {
  const uint64_t target = (multiply_high(total, top_p) << 32) | (total * top_p >> 32);
  return target > 0 ? target : 1;
}

// ---- the random number of a choice ----

struct Philox4x32 {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// 2011).
PAGEDINFER_SHARED Philox4x32 philox4x32_10(Philox4x32 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t right = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {
        {static_cast<uint32_t>(right >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(right),
         static_cast<uint32_t>(left >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(left)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The seed's 64 random bits at this position.
PAGEDINFER_SHARED uint64_t random_bits(uint64_t seed, uint64_t position) {
  const Philox4x32 counter = {
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0}};
  const Philox4x32 random =
      philox4x32_10(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return random.word[0] | uint64_t{random.word[1]} << 32;
}

// A whole number in [0, total), total > 0, from random bits.
PAGEDINFER_SHARED uint64_t random_below(uint64_t total, uint64_t bits) {
  return multiply_high(bits, total);
}

// ---- log-probability ----

// log softmax of a logit, given the row's largest logit and the sum of the row's weights at
// temperature 1.
PAGEDINFER_SHARED float log_probability(float logit, float largest, uint64_t total) {
  const double kLn2 = 0.69314718055994530942;
  const double log_sum = log(static_cast<double>(total)) - kWeightBits * kLn2;
  return static_cast<float>(static_cast<double>(logit) - static_cast<double>(largest) - log_sum);
}

}  // namespace sampling
}  // namespace pagedinfer
