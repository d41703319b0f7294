// The memory through which the GPUs of one host add up small arrays (all_reduce.cuh).
//
// Each GPU of a group allocates one piece of memory, which the other GPUs write. It has these
// parts:
//
//   epochs    [blocks]              how many sums each block has finished; only this GPU uses it
//   arrivals  [2, blocks, senders]  stamps of the sums whose values have arrived
//   values    [2, senders, bytes]   the values
//
// The memory is zeros before the first sum. Its size and the sums that fit do not depend on a
// program, so that it is allocated once, and CUDA graphs may hold its addresses.
//
// This file uses neither XLA nor CUDA.
#pragma once

#include <cstdint>

#include "nvfp4.h"

namespace nvfp4 {

constexpr int kMaxPeers = 8;
constexpr int kPeerBlocks = 128, kPeerThreads = 512;  // the most blocks of a sum, and their threads
constexpr int64_t kPieceBytes = 16;                   // that a thread adds up
constexpr int64_t kMaxPeerBytes = kPeerBlocks * kPeerThreads * kPieceBytes;

// Why a kernel has ended with an error. The kernel writes it to memory of the host.
struct PeerFailure {
  enum Reason : uint32_t { kNone = 0, kTimeout = 1, kMismatch = 2 };
  uint32_t reason;
  uint32_t peer;  // the rank of the GPU for which the kernel waited
};

// What a GPU knows of the group of GPUs to which it belongs.
struct PeerGroup {
  int32_t rank, count;      // its number in the group, and the number of GPUs
  uint64_t timeout_ns;      // after which a kernel that waits for another GPU ends with an error
  char* memory[kMaxPeers];  // that of each GPU, at its address on this GPU
  PeerFailure* failure;     // in memory of the host
  bool overlaps;            // what PrepareAllReduce has found on this GPU
};

constexpr int64_t kArrivalsOffset = 512;
constexpr int64_t kValuesOffset =
    kArrivalsOffset + 2 * kPeerBlocks * kMaxPeers * int64_t{sizeof(uint64_t)};
static_assert(kPeerBlocks * sizeof(uint32_t) <= kArrivalsOffset && kValuesOffset % 256 == 0);

constexpr int64_t PeerMemoryBytes(int count) { return kValuesOffset + 2 * count * kMaxPeerBytes; }

NVFP4_HOST_DEVICE uint32_t* EpochIn(char* memory, int block) {
  return reinterpret_cast<uint32_t*>(memory) + block;
}

NVFP4_HOST_DEVICE uint64_t* ArrivalIn(char* memory, int slot, int block, int sender) {
  return reinterpret_cast<uint64_t*>(memory + kArrivalsOffset) +
         (slot * kPeerBlocks + block) * kMaxPeers + sender;
}

NVFP4_HOST_DEVICE char* ValuesIn(char* memory, int count, int slot, int sender) {
  return memory + kValuesOffset + (int64_t{slot} * count + sender) * kMaxPeerBytes;
}

}  // namespace nvfp4
