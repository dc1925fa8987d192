// peer_all_reduce: the sum of a tensor over ranks that can read each other's memory.
//
//   data = round(memory[0] + memory[1] + ... + memory[num_ranks - 1])
//
// in float32 and in the order of the ranks, so that all get the same bits. Each rank has a piece of
// memory that all can read and write: a header and, twice, room for what one call exchanges. Call
// number e of a rank uses room e % 2, in one of two ways:
//
// - Read. It puts its data into its own buffer, says so to all, waits until all have said so, and
//   sums what is in theirs. The data is cut into pieces with flags of their own, so that each goes
//   its way without waiting for the others.
// - Pushed, up to kMostPushedBytes on a GPU. It writes its data to all others, each 4 bytes beside
//   the number of the call, and these 8 at once: whoever sees the number has the data. Twice the
//   bytes, but they go over the link once and one way, where to read takes a flag and a way back.
//
// Room for two calls is enough, and nobody has to say that he has read: a rank that is in call e
// has seen that all have begun call e - 1, and so have ended e - 2, the last to use room e % 2.
//
// Call numbers wrap around, and leave 0 out, which is what fresh memory holds.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

namespace pagedinfer {

constexpr int kMostPeers = 8;
constexpr int kMostPieces = 128;
constexpr int64_t kPeerVectorBytes = 16;
constexpr int64_t kMostPushedBytes = 256 << 10;

// At the beginning of each rank's memory; zeros before the first call of any rank.
struct PeerHeader {
  // [piece][rank]: the call for which that rank's piece is in its memory; written by that rank
  uint32_t arrived[kMostPieces][kMostPeers];
  // [piece]: the number of the last call, the same in all; only this rank looks at it
  uint32_t calls[kMostPieces];
};
constexpr int64_t kPeerHeaderBytes = 8192;
static_assert(sizeof(PeerHeader) <= kPeerHeaderBytes);

// What follows: 2 x [max_bytes] for data that others read, 2 x [rank] x [2 x kMostPushedBytes] for
// what others push. Python's peer_memory_bytes adds up the same.
constexpr int64_t pushed_offset(int64_t max_bytes) { return kPeerHeaderBytes + 2 * max_bytes; }

// The number of the call after this one.
constexpr uint32_t call_after(uint32_t call) { return call == UINT32_MAX ? 2 : call + 1; }

struct PeerAllReduceParams {
  void* data;                  // [num_bytes], read and written
  char* memories[kMostPeers];  // of each rank: PeerHeader, and what follows it
  int64_t num_bytes;           // a multiple of kPeerVectorBytes, at most max_bytes
  int64_t max_bytes;
  int rank, num_ranks;
  DType dtype;
};

PAGEDINFER_FOR_EACH_ISA(void peer_all_reduce_cpu(const PeerAllReduceParams& params);)

}  // namespace pagedinfer
