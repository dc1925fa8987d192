// change_logits on the CPU, a row at a time: see change_logits.h. For *_cpu.cpp files: see
// common/cpu_isa.h.
#pragma once

#include <cstdint>

#include "sampler/change_logits.h"
#include "sampler/upcast.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

// Writes what row r's logits become, and returns them.
template <typename T>
const float* change_row(const ChangeLogitsParams& p, int64_t r) {
  const int32_t slot = p.slots[r];
  const sampling::SlotChanges changes = sampling::slot_changes(p, slot);
  const T* x = static_cast<const T*>(p.logits) + r * p.row_stride;
  float* y = p.changed + r * p.changed_stride;
  for (int64_t id = 0; id < p.vocab_size; ++id) {
    y[id] = sampling::changed_logit(changes, sampling::upcast(x[id]), -0.0f, id);
  }
  const int64_t num_biases = p.kinds[slot] & sampling::kBias ? p.max_biases : 0;
  for (int64_t i = slot * p.max_biases; i < slot * p.max_biases + num_biases; ++i) {
    const int32_t id = p.bias_ids[i];
    if (id < 0 || id >= p.vocab_size) continue;
    y[id] = sampling::changed_logit(changes, sampling::upcast(x[id]), p.bias[i], id);
  }
  return y;
}

}  // namespace
}  // namespace CPU_ISA
}  // namespace pagedinfer
