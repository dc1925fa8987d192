#include "runner/hold_while.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "ops.h"
#include "runner/hold_while_cuda.h"

namespace pagedinfer {

void hold_while(const Tensor& flag, int64_t microseconds) {
  ArgumentChecker check("hold_while");
  check.shape("flag", flag, {"1"});
  check.dtype("flag", flag, ScalarType::Int);
  check.same_device("flag", flag);
  PAGEDINFER_CHECK(microseconds >= 0, "hold_while: microseconds is ", microseconds,
                   "; expected >= 0");
  if (is_cpu(flag)) return;  // ops run one after another: nobody could clear the flag meanwhile
#ifdef PAGEDINFER_WITH_CUDA
  const HoldWhileParams params{
      .flag = static_cast<const int32_t*>(flag.const_data_ptr()),
      .nanoseconds = 1000 * microseconds,
  };
  CudaContext context(flag);
  check_cuda("hold_while", launch_hold_while(params, context.stream()));
#endif
}

}  // namespace pagedinfer
