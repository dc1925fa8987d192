#include "distributed/peer_all_reduce.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "distributed/peer_all_reduce_cuda.h"
#include "ops.h"

namespace pagedinfer {

void peer_all_reduce(Tensor data, const Tensor& memories, int64_t rank, int64_t max_bytes) {
  ArgumentChecker check("peer_all_reduce");
  check.shape("memories", memories, {"num_ranks"});
  check.dtype("memories", memories, ScalarType::Long);
  check.on_cpu("memories", memories);
  check.contiguous("memories", memories);
  const DType dtype = check.float_dtype("data", data);
  check.same_device("data", data);
  check.contiguous("data", data);
  const int64_t num_ranks = check.size("num_ranks"), num_bytes = data.numel() * size_of(dtype);
  PAGEDINFER_CHECK(num_ranks >= 1 && num_ranks <= kMostPeers, "peer_all_reduce: memories has ",
                   num_ranks, " addresses; expected 1 to ", kMostPeers);
  PAGEDINFER_CHECK(rank >= 0 && rank < num_ranks, "peer_all_reduce: rank is ", rank,
                   "; expected 0 to ", num_ranks - 1);
  PAGEDINFER_CHECK(max_bytes % kPeerVectorBytes == 0, "peer_all_reduce: max_bytes is ", max_bytes,
                   "; expected a multiple of ", kPeerVectorBytes);
  PAGEDINFER_CHECK(num_bytes % kPeerVectorBytes == 0 && num_bytes <= max_bytes,
                   "peer_all_reduce: data has ", num_bytes, " bytes; expected a multiple of ",
                   kPeerVectorBytes, ", at most ", max_bytes);
  check.aligned("data", data, kPeerVectorBytes);
  if (num_bytes == 0) return;

  PeerAllReduceParams params{
      .data = data.mutable_data_ptr(),
      .memories = {},
      .num_bytes = num_bytes,
      .max_bytes = max_bytes,
      .rank = static_cast<int>(rank),
      .num_ranks = static_cast<int>(num_ranks),
      .dtype = dtype,
  };
  const auto* addresses = static_cast<const int64_t*>(memories.const_data_ptr());
  for (int64_t r = 0; r < num_ranks; ++r) {
    params.memories[r] = reinterpret_cast<char*>(addresses[r]);
  }

  if (is_cpu(data)) {
    PAGEDINFER_CPU_KERNEL(peer_all_reduce_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(data);
  check_cuda("peer_all_reduce", launch_peer_all_reduce(params, context.stream()));
#endif
}

}  // namespace pagedinfer
