// sample_tokens on the CPU: see sample_tokens.h for the maths and the tensors, row_sampler_cpu.h
// for the work on a row. Threads over rows.
#include <cmath>

#include "common/parallel.h"
#include "sampler/change_logits_cpu.h"
#include "sampler/row_sampler_cpu.h"
#include "sampler/sample_tokens.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

template <typename T>
void sample_row(const SampleTokensParams& p, int64_t r, Scratch* scratch) {
  const int32_t slot = p.slots[r];
  if (slot < 0) {
    p.token_ids[r] = -1;
    if (p.logprobs != nullptr) p.logprobs[r] = 0.0f;
    return;
  }
  const bool rated = is_rated(p, slot);
  const RowParameters parameters =
      row_parameters(p.temperature[slot], p.top_k[slot], p.top_p[slot], p.min_p[slot],
                     p.seeds[slot], p.positions[slot], p.vocab_size);
  RowSampler<T> raw(static_cast<const T*>(p.logits) + r * p.row_stride, p.vocab_size, parameters,
                    scratch);
  if (!is_changed(p.changes.kinds, slot, p.num_slots)) {
    const int64_t id = raw.sample();
    p.token_ids[r] = id;
    if (p.logprobs != nullptr) p.logprobs[r] = id < 0 ? NAN : rated ? raw.logprob(id) : 0.0f;
    return;
  }
  RowSampler<float> changed(change_row<T>(p.changes, r), p.vocab_size, parameters, scratch);
  const int64_t id = changed.sample();
  p.token_ids[r] = id;
  if (id >= 0) count_token(p.changes, slot, id);
  if (p.logprobs != nullptr) {
    p.logprobs[r] = id < 0 ? NAN : !rated ? 0.0f : raw.find_largest() ? raw.logprob(id) : NAN;
  }
}

template <typename T>
void sample_rows(const SampleTokensParams& p, int64_t begin, int64_t end) {
  Scratch scratch;  // 136 KB of stack
  for (int64_t r = begin; r < end; ++r) sample_row<T>(p, r, &scratch);
}

}  // namespace

void sample_tokens_cpu(const SampleTokensParams& p) {
  // A row of a small vocabulary is not worth a thread of its own.
  const int64_t grain = p.vocab_size < 8192 ? 8192 / p.vocab_size : 1;
  parallel_for(p.num_rows, grain, [&](int64_t begin, int64_t end) {
    switch (p.dtype) {
      case DType::float32:
        return sample_rows<float>(p, begin, end);
      case DType::float16:
        return sample_rows<Float16>(p, begin, end);
      case DType::bfloat16:
        return sample_rows<BFloat16>(p, begin, end);
    }
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
