// read_ring and write_ring: what a step is given by the host and gives it, through a ring of places
// in the host's memory. Device and host go round it side by side, one place a step, each with a
// count of its own of the steps so far. So a step in a CUDA graph, whose arguments are the same
// every time, finds its place by itself, and the host need not copy anything from or to the device.
//
//   read_ring:  place = turn mod num_places; out[:] = ring[place, :size]
//   write_ring: place = turn mod num_places; ring[place, :size] = values[:]; turn = turn + 1
//
// The host writes a place before it launches the step that reads it, and leaves it alone until that
// step has ended.
#pragma once

#include <cstdint>

namespace pagedinfer {

struct ReadRingParams {
  const int32_t* ring;  // [num_places, width], pinned
  const int64_t* turn;  // [1]
  int32_t* out;         // [size], size <= width
  int64_t num_places, width, size;
};

struct WriteRingParams {
  const int32_t* values;  // [size], size <= width
  int64_t* turn;          // [1]
  int32_t* ring;          // [num_places, width], pinned
  int64_t num_places, width, size;
};

}  // namespace pagedinfer
