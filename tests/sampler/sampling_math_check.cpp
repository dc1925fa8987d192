// Prints facts about csrc/sampler/sampling_math.h and token_order.h for test_sampling_math.py.
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "sampler/token_order.h"
#include "sampler/upcast.h"

using namespace pagedinfer::sampling;

// Walks every `stride`-th float from -0.0 down to -44 and counts what should not be.
static void check_exponential(uint32_t stride) {
  constexpr int kChunk = 4096;
  static float z[kChunk], e[kChunk];
  float previous = 1.0f;
  uint64_t rising = 0, above_one = 0, floats = 0;
  double worst = 0.0;
  const uint32_t last = bits_of(-44.0f);
  uint64_t bits = bits_of(-0.0f);
  while (bits <= last) {
    int count = 0;
    for (; count < kChunk && bits <= last; ++count, bits += stride) z[count] = float_of(bits);
    for (int i = 0; i < kChunk; ++i) e[i] = exponential(z[i]);
    for (int i = 0; i < count; ++i) {
      rising += e[i] > previous;
      above_one += e[i] > 1.0f;
      previous = e[i];
    }
    for (int i = 0; i < count; i += 64) {
      const double error = std::fabs(e[i] / std::exp(static_cast<double>(z[i])) - 1.0);
      worst = error > worst ? error : worst;
    }
    floats += count;
  }
  std::printf("exponential rising %llu above_one %llu enough %d error_below_3e-7 %d\n",
              static_cast<unsigned long long>(rising), static_cast<unsigned long long>(above_one),
              floats * stride > 1100000000u, worst < 3e-7);
}

static void print_philox(Philox4x32 counter, uint32_t key0, uint32_t key1) {
  const Philox4x32 random = philox4x32_10(counter, key0, key1);
  std::printf("philox %08x %08x %08x %08x\n", random.word[0], random.word[1], random.word[2],
              random.word[3]);
}

int main() {
#ifdef __FMA__
  check_exponential(1);
#else
  check_exponential(1021);  // fma in software is slow
#endif
  std::printf("ends %g %g %g %g %g\n", exponential(0.0f), exponential(-0.0f), exponential(-44.1f),
              exponential(-INFINITY), exponential(NAN));

  print_philox({{0, 0, 0, 0}}, 0, 0);
  print_philox({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u);
  print_philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0);

  // The last bin weighs nothing, and the bins follow the order.
  std::printf("bins %d %d %d %d %llu\n", bin_of(0.0f), bin_of(-1.0f / 64), bin_of(-31.984375f),
              bin_of(-INFINITY),
              static_cast<unsigned long long>(weight_of(exponential(-31.984375f))));

  // Every 16-bit float, by the definition of its format.
  unsigned wrong = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t half_bits = static_cast<uint16_t>(bits);
    const float mine = upcast(Float16{half_bits});
    const int exponent = static_cast<int>(bits >> 10 & 31),
              mantissa = static_cast<int>(bits & 1023);
    float expected = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent == 0
                         ? std::ldexp(static_cast<float>(mantissa), -24)
                         : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    if (bits & 0x8000) expected = -expected;
    wrong += !(mine == expected || (mine != mine && expected != expected)) ||
             std::signbit(mine) != (bits >> 15 != 0);
    wrong += bits_of(upcast(BFloat16{half_bits})) != bits << 16;
  }
  std::printf("upcast wrong %u\n", wrong);
}
