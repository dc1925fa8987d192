#include "attention/paged_attention.h"

namespace pagedinfer {
namespace CPU_ISA {

void paged_attention_cpu(const PagedAttentionParams&) {}

}  // namespace CPU_ISA
}  // namespace pagedinfer
