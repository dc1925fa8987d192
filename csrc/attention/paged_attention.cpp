#include "ops.h"

#include <stdexcept>

namespace pagedinfer {

void paged_attention(const Tensor&, const Tensor&, const Tensor&,
                     const Tensor&, const Tensor&, const Tensor&,
                     Tensor, Tensor, int64_t, double,
                     int64_t, double) { throw std::runtime_error("paged_attention is not implemented yet"); }

}  // namespace pagedinfer
