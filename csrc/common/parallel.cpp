#include "common/parallel.h"

#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "common/cpu_isa.h"

namespace pagedinfer {

void parallel_ranges(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                     void* context) {
  if (count <= 0) return;
  torch::stable::parallel_for(0, count, grain,
                              [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

int64_t num_threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

static CpuIsa detect_cpu_isa() {
#if defined(__x86_64__)
  CpuIsa best = CpuIsa::baseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    best = CpuIsa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      best = CpuIsa::avx512;
    }
  }
  const char* wanted = std::getenv("PAGEDINFER_CPU_ISA");
  if (wanted == nullptr) return best;
  if (std::strcmp(wanted, "baseline") == 0) return CpuIsa::baseline;
  if (std::strcmp(wanted, "avx2") == 0 && best != CpuIsa::baseline) return CpuIsa::avx2;
  return best;
#else
  return CpuIsa::baseline;
#endif
}

CpuIsa cpu_isa() {
  static const CpuIsa isa = detect_cpu_isa();
  return isa;
}

bool cpu_has_arithmetic(DType dtype) {
#if defined(__x86_64__)
  if (dtype == DType::float32) return true;
  if (cpu_isa() != CpuIsa::avx512) return false;
  const bool is_half = dtype == DType::float16;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, is_half ? 0 : 1, &eax, &ebx, &ecx, &edx) == 0) return false;
  return is_half ? edx >> 23 & 1 : eax >> 5 & 1;
#else
  return true;
#endif
}

}  // namespace pagedinfer
