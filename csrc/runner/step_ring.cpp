#include "runner/step_ring.h"

#include <algorithm>

#include "common/check.h"
#include "common/cuda_context.h"
#include "common/pinned_memory.h"
#include "ops.h"
#include "runner/step_ring_cuda.h"

namespace pagedinfer {

namespace {

// `piece` is what moves: out or values.
ArgumentChecker checked(const char* op, const Tensor& ring, const Tensor& turn, const char* name,
                        const Tensor& piece) {
  ArgumentChecker check(op);
  check.shape("ring", ring, {"num_places", "width"});
  check.dtype("ring", ring, ScalarType::Int);
  check.contiguous("ring", ring);
  check.on_cpu("ring", ring);
  check.shape("turn", turn, {"1"});
  check.dtype("turn", turn, ScalarType::Long);
  check.same_device("turn", turn);
  check.shape(name, piece, {"size"});
  check.dtype(name, piece, ScalarType::Int);
  check.contiguous(name, piece);
  check.same_device(name, piece);
  PAGEDINFER_CHECK(check.size("num_places") > 0, op, ": ring has no places");
  PAGEDINFER_CHECK(check.size("size") <= check.size("width"), op, ": ", name, " has ",
                   check.size("size"), " elements; expected at most ", check.size("width"),
                   ", the ring's width");
#ifdef PAGEDINFER_WITH_CUDA
  if (!is_cpu(turn)) check_pinned(op, "ring", ring);
#endif
  return check;
}

// On the CPU; on a GPU only a kernel knows the turn.
int64_t checked_place(const char* op, int64_t turn, int64_t num_places) {
  PAGEDINFER_CHECK(turn >= 0, op, ": turn is ", turn, "; expected >= 0");
  return turn % num_places;
}

}  // namespace

void read_ring(const Tensor& ring, const Tensor& turn, Tensor out) {
  const ArgumentChecker check = checked("read_ring", ring, turn, "out", out);
  const ReadRingParams params{
      .ring = static_cast<const int32_t*>(ring.const_data_ptr()),
      .turn = static_cast<const int64_t*>(turn.const_data_ptr()),
      .out = static_cast<int32_t*>(out.mutable_data_ptr()),
      .num_places = check.size("num_places"),
      .width = check.size("width"),
      .size = check.size("size"),
  };
  if (is_cpu(turn)) {
    const int64_t place = checked_place("read_ring", *params.turn, params.num_places);
    std::copy_n(params.ring + place * params.width, params.size, params.out);
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(turn);
  check_cuda("read_ring", launch_read_ring(params, context.stream()));
#endif
}

void write_ring(const Tensor& values, Tensor turn, Tensor ring) {
  const ArgumentChecker check = checked("write_ring", ring, turn, "values", values);
  const WriteRingParams params{
      .values = static_cast<const int32_t*>(values.const_data_ptr()),
      .turn = static_cast<int64_t*>(turn.mutable_data_ptr()),
      .ring = static_cast<int32_t*>(ring.mutable_data_ptr()),
      .num_places = check.size("num_places"),
      .width = check.size("width"),
      .size = check.size("size"),
  };
  if (is_cpu(turn)) {
    const int64_t place = checked_place("write_ring", *params.turn, params.num_places);
    std::copy_n(params.values, params.size, params.ring + place * params.width);
    ++*params.turn;
    return;
  }
#ifdef PAGEDINFER_WITH_CUDA
  CudaContext context(turn);
  check_cuda("write_ring", launch_write_ring(params, context.stream()));
#endif
}

}  // namespace pagedinfer
