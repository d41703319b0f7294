// The memory through which the GPUs of one host add up small arrays (all_reduce.cuh).
//
// Each GPU of a group allocates one piece of memory, which the other GPUs write. It has these
// parts:
//
//   epochs    [blocks]
//   stamps    [2, blocks, senders]
//   lines     [2, senders, 2 bytes]
//
// An epoch says how many sums a block has finished. Only the GPU itself uses its epochs. Stamps say
// which sums the other GPUs have begun. Lines have the values.
//
// A line of 16 bytes has two numbers of 64 bits. Each of them has 4 bytes of values, and above them
// the epoch of the sum.
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

constexpr int64_t kStampsOffset = 512;
constexpr int64_t kLinesOffset =
    kStampsOffset + 2 * kPeerBlocks * kMaxPeers * int64_t{sizeof(uint64_t)};
static_assert(kPeerBlocks * sizeof(uint32_t) <= kStampsOffset && kLinesOffset % 256 == 0);

constexpr int64_t PeerMemoryBytes(int count) {
  return kLinesOffset + 2 * count * 2 * kMaxPeerBytes;
}

NVFP4_HOST_DEVICE uint32_t* EpochIn(char* memory, int block) {
  return reinterpret_cast<uint32_t*>(memory) + block;
}

NVFP4_HOST_DEVICE uint64_t* StampIn(char* memory, int slot, int block, int sender) {
  return reinterpret_cast<uint64_t*>(memory + kStampsOffset) +
         (slot * kPeerBlocks + block) * kMaxPeers + sender;
}

// The first line of a thread. Its second one is kSecondLine numbers behind it: neighboring threads
// write neighboring lines.
constexpr int kSecondLine = 2 * kPeerThreads;
NVFP4_HOST_DEVICE uint64_t* LinesIn(char* memory, int count, int slot, int sender, int block,
                                    int thread) {
  char* const lines = memory + kLinesOffset + (int64_t{slot} * count + sender) * 2 * kMaxPeerBytes;
  return reinterpret_cast<uint64_t*>(lines) + 2 * (2 * block * kPeerThreads + thread);
}

}  // namespace nvfp4
