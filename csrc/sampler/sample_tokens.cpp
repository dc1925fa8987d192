#include "ops.h"

#include <stdexcept>

namespace pagedinfer {

int64_t sample_tokens_workspace_size(const Tensor&) { throw std::runtime_error("sample_tokens_workspace_size is not implemented yet"); }
void sample_tokens(const Tensor&, const Tensor&, const Tensor&,
                   const Tensor&, const Tensor&, const Tensor&,
                   const Tensor&, const Tensor&, int64_t,
                   Tensor, Tensor, std::optional<Tensor>) { throw std::runtime_error("sample_tokens is not implemented yet"); }

}  // namespace pagedinfer
