#include "distributed/peer_all_reduce.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "distributed/peer_all_reduce_cuda.h"
#include "layers/rms_norm.h"
#include "ops.h"

namespace pagedinfer {

namespace {

PeerAllReduceParams peer_params(const char* op, ArgumentChecker& check, Tensor& data,
                                const Tensor& memories, int64_t rank, int64_t max_bytes) {
  check.shape("memories", memories, {"num_ranks"});
  check.dtype("memories", memories, ScalarType::Long);
  check.on_cpu("memories", memories);
  check.contiguous("memories", memories);
  const DType dtype = check.float_dtype("data", data);
  check.same_device("data", data);
  check.contiguous("data", data);
  const int64_t num_ranks = check.size("num_ranks"), num_bytes = data.numel() * size_of(dtype);
  PAGEDINFER_CHECK(num_ranks == 1 || num_ranks == 2 || num_ranks == 4 || num_ranks == kMostPeers,
                   op, ": memories has ", num_ranks, " addresses; expected 1, 2, 4 or ",
                   kMostPeers);
  PAGEDINFER_CHECK(rank >= 0 && rank < num_ranks, op, ": rank is ", rank, "; expected 0 to ",
                   num_ranks - 1);
  PAGEDINFER_CHECK(max_bytes % kPeerVectorBytes == 0, op, ": max_bytes is ", max_bytes,
                   "; expected a multiple of ", kPeerVectorBytes);
  PAGEDINFER_CHECK(num_bytes % kPeerVectorBytes == 0 && num_bytes <= max_bytes, op, ": data has ",
                   num_bytes, " bytes; expected a multiple of ", kPeerVectorBytes, ", at most ",
                   max_bytes);
  check.aligned("data", data, kPeerVectorBytes);

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
  return params;
}

}  // namespace

void peer_all_reduce(Tensor data, const Tensor& memories, int64_t rank, int64_t max_bytes) {
  const char* op = "peer_all_reduce";
  ArgumentChecker check(op);
  const PeerAllReduceParams params = peer_params(op, check, data, memories, rank, max_bytes);
  if (params.num_bytes == 0) return;
  if (is_cpu(data)) {
    PAGEDINFER_CPU_KERNEL(peer_all_reduce_cpu)(params);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(data);
  check_cuda(op, launch_peer_all_reduce(params, context.stream()));
#endif
}

void peer_all_reduce_norm(Tensor data, Tensor residual, const Tensor& weight, double epsilon,
                          const Tensor& memories, int64_t rank, int64_t max_bytes) {
  const char* op = "peer_all_reduce_norm";
  ArgumentChecker check(op);
  check.shape("data", data, {"num_rows", "hidden"});
  check.shape("residual", residual, {"num_rows", "hidden"});
  check.shape("weight", weight, {"hidden"});
  const PeerAllReduceParams params = peer_params(op, check, data, memories, rank, max_bytes);
  check.float_dtype("residual", residual);
  check.float_dtype("weight", weight);
  check.same_device("residual", residual);
  check.same_device("weight", weight);
  check.contiguous("residual", residual);
  check.contiguous("weight", weight);
  const int64_t hidden = check.size("hidden");
  const RmsNormParams norm{
      .input = params.data,
      .weight = weight.const_data_ptr(),
      .residual = residual.mutable_data_ptr(),
      .out = params.data,
      .input_strides = {.group = hidden, .row = 0},
      .residual_strides = {.group = hidden, .row = 0},
      .out_strides = {.group = hidden, .row = 0},
      .num_rows = check.size("num_rows"),
      .inner_rows = 1,
      .hidden = hidden,
      .epsilon = checked_epsilon(op, epsilon),
      .dtype = params.dtype,
  };
  if (params.num_bytes == 0) return;
  if (is_cpu(data)) {
    PAGEDINFER_CPU_KERNEL(peer_all_reduce_cpu)(params);
    PAGEDINFER_CPU_KERNEL(rms_norm_cpu)(norm);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(data);
  check_cuda(op, launch_peer_all_reduce_norm(params, norm, context.stream()));
#endif
}

}  // namespace pagedinfer
