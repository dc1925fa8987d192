// top_logprobs on the CPU: see top_logprobs.h for the maths and the tensors. Threads over rows.
#include <cmath>

#include "common/parallel.h"
#include "sampler/row_sampler_cpu.h"
#include "sampler/top_logprobs.h"

namespace pagedinfer {
namespace CPU_ISA {
namespace {

template <typename T>
void top_logprobs_of_row(const TopLogprobsParams& p, int64_t r, Scratch* scratch) {
  const int64_t token = p.token_ids[r];
  int64_t* top_ids = p.top_ids + r * p.num_top;
  float* top_logprobs = p.top_logprobs + r * p.num_top;
  const RowParameters parameters =
      row_parameters(1.0f, static_cast<int32_t>(p.num_top), 1.0f, 0.0f, 0, 0, p.vocab_size);
  RowSampler<T> sampler(static_cast<const T*>(p.logits) + r * p.row_stride, p.vocab_size,
                        parameters, scratch);
  if (token < 0 || token >= p.vocab_size || !sampler.find_largest()) {
    p.logprobs[r] = NAN;
    p.ranks[r] = 0;
    for (int64_t i = 0; i < p.num_top; ++i) top_ids[i] = -1;
    for (int64_t i = 0; i < p.num_top; ++i) top_logprobs[i] = NAN;
    return;
  }
  const uint64_t total = sampler.total_weight(1.0f);
  p.logprobs[r] = sampler.logprob_of(sampler.logit(token), total);
  p.ranks[r] = sampler.rank_of(token);
  int64_t size = 0;
  const uint64_t* first = p.num_top > 0 ? sampler.list_first(&size) : nullptr;
  for (int64_t i = 0; i < p.num_top; ++i) {
    top_ids[i] = i < size ? static_cast<int64_t>(id_of_code(first[i])) : -1;
    top_logprobs[i] = i < size ? sampler.logprob_of(logit_of_code(first[i]), total) : -INFINITY;
  }
}

template <typename T>
void top_logprobs_of_rows(const TopLogprobsParams& p, int64_t begin, int64_t end) {
  Scratch scratch;
  for (int64_t r = begin; r < end; ++r) top_logprobs_of_row<T>(p, r, &scratch);
}

}  // namespace

void top_logprobs_cpu(const TopLogprobsParams& p) {
  const int64_t grain = p.vocab_size < 8192 ? 8192 / p.vocab_size : 1;
  parallel_for(p.num_rows, grain, [&](int64_t begin, int64_t end) {
    switch (p.dtype) {
      case DType::float32:
        return top_logprobs_of_rows<float>(p, begin, end);
      case DType::float16:
        return top_logprobs_of_rows<Float16>(p, begin, end);
      case DType::bfloat16:
        return top_logprobs_of_rows<BFloat16>(p, begin, end);
    }
  });
}

}  // namespace CPU_ISA
}  // namespace pagedinfer
