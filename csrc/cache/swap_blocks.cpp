#include "ops.h"

#include <stdexcept>

namespace pagedinfer {

void swap_blocks(const Tensor&, Tensor, const Tensor&) { throw std::runtime_error("swap_blocks is not implemented yet"); }

}  // namespace pagedinfer
