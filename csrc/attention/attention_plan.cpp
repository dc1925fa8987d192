#include "ops.h"

#include <stdexcept>

namespace pagedinfer {

std::tuple<int64_t, int64_t> attention_plan_sizes(const Tensor&, int64_t,
                                                  int64_t, int64_t,
                                                  int64_t, int64_t,
                                                  int64_t) { throw std::runtime_error("attention_plan_sizes is not implemented yet"); }
void attention_plan(const Tensor&, const Tensor&, Tensor,
                    int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t,
                    int64_t, bool) { throw std::runtime_error("attention_plan is not implemented yet"); }

}  // namespace pagedinfer
