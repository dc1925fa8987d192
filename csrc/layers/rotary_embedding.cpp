#include "ops.h"

#include <stdexcept>

namespace pagedinfer {

void rotary_embedding(const Tensor&, Tensor, std::optional<Tensor>,
                      const Tensor&, bool) { throw std::runtime_error("rotary_embedding is not implemented yet"); }

}  // namespace pagedinfer
