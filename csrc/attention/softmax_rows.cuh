// The online softmax of the prefill kernels: of two rows of scores, of which a thread holds a part.
//
//   weight = 2^(factor * score - reference),  sum = sum of the weights
//
// The reference of a row is a maximum of its scores that may be out of date: it is raised only for
// a score that is above it by more than kSlack, so that weights stay below 2^kSlack. Then lanes
// need not exchange their maxima before the exponentials begin, and what has been summed is rarely
// rescaled. What is divided by in the end has the same factor. A row's reference depends on the
// row alone, and so do its bits, whichever rows are computed with it.
//
// A thread's COUNT scores are as products lay them out: scores[4 i + 2 half + j], of row `half`;
// four lanes in turn share the two rows.
#pragma once

#include <climits>

#include "attention/kernel_params.cuh"
#include "attention/mma_primitives.cuh"

namespace pagedinfer::attention {

struct SoftmaxRows {
  static constexpr float kSlack = 8.0f;

  float reference[2], sum[2];  // `sum`: of the weights that this thread has seen

  __device__ __forceinline__ void clear() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // Raises the references where that is due. Returns whether, for a row of this warp; what was
  // summed of row `half` before these scores is then to be multiplied by rescale[half].
  template <int COUNT>
  __device__ __forceinline__ bool raise(const float (&scores)[COUNT], const ScoreScale& scale,
                                        float (&rescale)[2]) {
    // Where the limit is positive, floats can be compared as integers, of which one instruction
    // finds the largest of three.
    float limit[2];  // the largest score for which the reference will do
    int highest[2] = {INT_MIN, INT_MIN};
    bool raises = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit[half] = (reference[half] + kSlack) * scale.inverse;
#pragma unroll
      for (int i = half * 2; i < COUNT; i += 4) {
        highest[half] =
            __vimax3_s32(highest[half], __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
      }
      raises |= !(limit[half] > 0.0f) || highest[half] > __float_as_int(limit[half]);
    }
    if (!__any_sync(kWarpMask, raises)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = -INFINITY;
#pragma unroll
      for (int i = half * 2; i < COUNT; i += 4) m = fmaxf(m, fmaxf(scores[i], scores[i + 1]));
      m = fmaxf(m, __shfl_xor_sync(kWarpMask, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kWarpMask, m, 2));
      rescale[half] = 1.0f;
      if (m > limit[half]) {
        m *= scale.factor;
        rescale[half] = exp2_fast(reference[half] - m);
        reference[half] = m;
        sum[half] *= rescale[half];
      }
    }
    return true;
  }

  // Turns the scores into weights.
  template <int COUNT>
  __device__ __forceinline__ void weigh(float (&scores)[COUNT], const ScoreScale& scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float subtract = reference[half] == -INFINITY ? 0.0f : reference[half];
      float tile_sum[2] = {};
#pragma unroll
      for (int i = half * 2; i < COUNT; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          scores[i + j] = exp2_fast(fmaf(scores[i + j], scale.factor, -subtract));
          tile_sum[j] += scores[i + j];
        }
      }
      sum[half] += tile_sum[0] + tile_sum[1];
    }
  }
};

}  // namespace pagedinfer::attention
