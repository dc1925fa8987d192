#include "distributed/peer_all_reduce.h"

#include <sched.h>

#include "layers/cpu_elements.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

constexpr int kSpins = 200;  // before others may have the core that they perhaps wait for

PAGEDINFER_SIMD PeerHeader* header_of(char* memory) {
  return reinterpret_cast<PeerHeader*>(memory);
}

// The whole tensor is one piece, the first: threads would cost more than they gain.
void wait_for(const uint32_t* arrived, uint32_t call) {
  for (int spins = 0; static_cast<int32_t>(__atomic_load_n(arrived, __ATOMIC_ACQUIRE) - call) < 0;
       ++spins) {
    if (spins > kSpins) sched_yield();
  }
}

}  // namespace

void peer_all_reduce_cpu(const PeerAllReduceParams& p) {
  PeerHeader* own = header_of(p.memories[p.rank]);
  const uint32_t call = own->calls[0] = call_after(own->calls[0]);
  const int64_t buffer = kPeerHeaderBytes + (call % 2) * p.max_bytes;
  std::memcpy(p.memories[p.rank] + buffer, p.data, static_cast<size_t>(p.num_bytes));
  for (int r = 0; r < p.num_ranks; ++r) {
    __atomic_store_n(&header_of(p.memories[r])->arrived[0][p.rank], call, __ATOMIC_RELEASE);
  }
  for (int r = 0; r < p.num_ranks; ++r) wait_for(&own->arrived[0][r], call);
  with_element_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* data = static_cast<T*>(p.data);
    const int64_t count = p.num_bytes / static_cast<int64_t>(sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0.0f;
      for (int r = 0; r < p.num_ranks; ++r) {
        sum += to_float(reinterpret_cast<const T*>(p.memories[r] + buffer)[i]);
      }
      data[i] = rounded<T>(sum);
    }
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
