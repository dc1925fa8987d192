// peer_all_reduce: the sum of a tensor over ranks that can read each other's memory.
//
//   data = round(memory[0] + memory[1] + ... + memory[num_ranks - 1])
//
// in float32 and in the order of the ranks, so that all get the same bits. Each rank has a piece of
// memory that all can read: a header and two buffers. Call number e of a rank puts its data into
// its own buffer e % 2, says so to all, waits until all have said so, and sums what is in theirs.
//
// Two buffers are enough, and nobody has to say that he has read: a rank that is in call e has seen
// that all have begun call e - 1, and so have ended e - 2, the last to read buffer e % 2.
//
// The data is cut into kPeerPieces pieces with a call number and flags of their own, so that each
// goes its way without waiting for the others. Call numbers wrap around.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

constexpr int kMostPeers = 8;
constexpr int kPeerPieces = 64;
constexpr int64_t kPeerVectorBytes = 16;

// At the beginning of each rank's memory; zeros before the first call of any rank.
struct PeerHeader {
  // [piece][rank]: the call for which that rank's piece is in its memory; written by that rank
  uint32_t arrived[kPeerPieces][kMostPeers];
  // [piece]: the calls so far, which only this rank looks at
  uint32_t calls[kPeerPieces];
};
constexpr int64_t kPeerHeaderBytes = 4096;
static_assert(sizeof(PeerHeader) <= kPeerHeaderBytes);

struct PeerAllReduceParams {
  void* data;                  // [num_bytes], read and written
  char* memories[kMostPeers];  // of each rank: PeerHeader, then 2 x [max_bytes]
  int64_t num_bytes;           // a multiple of kPeerVectorBytes, at most max_bytes
  int64_t max_bytes;
  int rank, num_ranks;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void peer_all_reduce_cpu(const PeerAllReduceParams& params);)

}  // namespace pagedinfer
