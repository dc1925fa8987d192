#include "experts/route_experts.h"

#include <algorithm>

#include "common/check.h"
#include "common/cuda_context.h"
#include "experts/route_experts_cuda.h"
#include "ops.h"

namespace pagedinfer {

void route_experts(const Tensor& scores, int64_t block_rows, bool renormalize, Tensor weights,
                   Tensor experts, Tensor pairs, Tensor tiles) {
  ArgumentChecker check("route_experts");
  check.shape("scores", scores, {"num_tokens", "num_experts"});
  check.shape("weights", weights, {"num_tokens", "k"});
  check.shape("experts", experts, {"num_tokens", "k"});
  const DType dtype = check.float_dtype("scores", scores);
  check.dtype("weights", weights, ScalarType::Float);
  check.dtype("experts", experts, ScalarType::Int);
  check.dtype("pairs", pairs, ScalarType::Int);
  check.dtype("tiles", tiles, ScalarType::Int);
  check.same_device("scores", scores);
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"weights", weights},
                                     {"experts", experts},
                                     {"pairs", pairs},
                                     {"tiles", tiles}}) {
    check.same_device(name, tensor);
    check.contiguous(name, tensor);
  }
  check.dense_inner("scores", scores, 1);
  const int64_t num_tokens = check.size("num_tokens"), num_experts = check.size("num_experts");
  const int64_t k = check.size("k"), num_pairs = num_tokens * k;
  PAGEDINFER_CHECK(num_experts >= 1 && num_experts <= kMostExperts, "route_experts: scores are of ",
                   num_experts, " experts; expected 1 to ", kMostExperts);
  PAGEDINFER_CHECK(k >= 1 && k <= std::min(num_experts, kMostExpertsOfAToken),
                   "route_experts: weights have ", k, " experts a token; expected 1 to ",
                   std::min(num_experts, kMostExpertsOfAToken));
  PAGEDINFER_CHECK(block_rows >= 1, "route_experts: block_rows is ", block_rows, "; expected >= 1");
  PAGEDINFER_CHECK(num_pairs <= INT32_MAX, "route_experts: ", num_pairs,
                   " pairs of token and expert; expected at most 2^31 - 1");
  PAGEDINFER_CHECK(pairs.dim() == 1 && pairs.size(0) == num_pairs,
                   "route_experts: pairs has shape ", shape_of(pairs), "; expected [", num_pairs,
                   "]");
  const int64_t least_tiles = std::min(num_pairs, num_experts + num_pairs / block_rows);
  PAGEDINFER_CHECK(tiles.dim() == 2 && tiles.size(0) >= least_tiles && tiles.size(1) == 3,
                   "route_experts: tiles has shape ", shape_of(tiles),
                   "; expected [>= ", least_tiles, ", 3]");

  const RouteExpertsParams params{
      .scores = scores.const_data_ptr(),
      .weights = static_cast<float*>(weights.mutable_data_ptr()),
      .experts = static_cast<int32_t*>(experts.mutable_data_ptr()),
      .pairs = static_cast<int32_t*>(pairs.mutable_data_ptr()),
      .tiles = static_cast<ExpertTile*>(tiles.mutable_data_ptr()),
      .score_stride = scores.stride(0),
      .num_tokens = num_tokens,
      .num_experts = num_experts,
      .k = k,
      .max_tiles = tiles.size(0),
      .block_rows = block_rows,
      .renormalize = renormalize,
      .dtype = dtype,
  };
  if (is_cpu(scores)) {
    PAGEDINFER_CPU_KERNEL(route_experts_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(scores);
  check_cuda("route_experts", launch_route_experts(params, context.stream()));
#endif
}

}  // namespace pagedinfer
