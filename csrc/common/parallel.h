// Threads for CPU kernels: torch's own pool, so that an op never runs beside torch's threads with
// threads of its own. Declared without torch headers so that *_cpu.cpp files can use it.
#pragma once

#include <cstdint>

namespace pagedinfer {

// Calls body(context, begin, end) over disjoint ranges that cover [0, count), each at least `grain`
// long where count allows, on torch's threads; returns when all are done.
void parallel_ranges(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                     void* context);

// How many threads parallel_ranges may use: torch.get_num_threads().
int64_t num_threads();

namespace {  // one copy per file: see cpu_isa.h on inline functions
template <typename Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
  parallel_ranges(
      count, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}
}  // namespace

}  // namespace pagedinfer
