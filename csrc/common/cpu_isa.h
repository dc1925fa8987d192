// One CPU kernel, several instruction sets, chosen at run time.
//
// A CPU kernel lives in a file *_cpu.cpp that CMake compiles once per instruction set, with CPU_ISA
// set to its name. The file defines its functions inside `namespace pagedinfer::CPU_ISA`; its
// header declares them with PAGEDINFER_FOR_EACH_ISA and callers choose with PAGEDINFER_CPU_KERNEL.
//
// Such a file uses raw pointers and plain loops and includes no header with non-inlined templates
// (no std containers, no torch): the linker keeps one copy of an inline function, and it might keep
// the copy that was compiled for instructions this machine lacks.
#pragma once

#include "common/dtype.h"

namespace pagedinfer {

enum class CpuIsa { baseline, avx2, avx512 };

// The best instruction set that both this machine and this build have.
// PAGEDINFER_CPU_ISA=baseline|avx2|avx512 in the environment lowers it, for tests.
CpuIsa cpu_isa();

// Whether this machine has instructions that multiply vectors of this dtype, beyond converting them
// (AVX512_BF16, AVX512_FP16; what has AMX has these too). Elsewhere than on x86-64, where nobody
// looks, it is said to.
bool cpu_has_arithmetic(DType dtype);

}  // namespace pagedinfer

#if defined(__x86_64__)
#define PAGEDINFER_FOR_EACH_ISA(...) \
  namespace baseline {               \
  __VA_ARGS__                        \
  }                                  \
  namespace avx2 {                   \
  __VA_ARGS__                        \
  }                                  \
  namespace avx512 {                 \
  __VA_ARGS__                        \
  }
#define PAGEDINFER_CPU_KERNEL(name)                                                     \
  (::pagedinfer::cpu_isa() == ::pagedinfer::CpuIsa::avx512 ? ::pagedinfer::avx512::name \
   : ::pagedinfer::cpu_isa() == ::pagedinfer::CpuIsa::avx2 ? ::pagedinfer::avx2::name   \
                                                           : ::pagedinfer::baseline::name)
#else
#define PAGEDINFER_FOR_EACH_ISA(...) \
  namespace baseline {               \
  __VA_ARGS__                        \
  }
#define PAGEDINFER_CPU_KERNEL(name) (::pagedinfer::baseline::name)
#endif
