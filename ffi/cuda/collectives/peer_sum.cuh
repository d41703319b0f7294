// A sum of 16 bytes of each thread over the GPUs of a group:
//
//   y = x of rank 0 + x of rank 1 + ...       in float32, rounded to the type of x
//
// Each GPU writes its x to all others. Behind each 4 bytes of values, it writes the number of the
// sum, the epoch, with the same store: a thread that finds the epoch has the values, too. So
// nothing waits until values have arrived before it says so, and no thread waits for another one of
// its GPU. A thread adds up what it has received in the order of the ranks. All GPUs thus have the
// same bits, in every run.
//
// Lines have two slots, which take turns. An epoch counts the sums, so that nothing is cleared
// between them. It lies in device memory: a CUDA graph that runs again goes on counting. A GPU may
// write lines of epoch e as soon as it has finished epoch e - 1, although another GPU may still be
// in that epoch. What it has received from that GPU for e - 1 was sent by a kernel that started
// when the kernel of e - 2 there had ended. That GPU thus no longer reads the slot of e - 2, which
// is that of e.
//
// The wait for another GPU is bounded. A stamp for each block says which array a GPU adds up. If
// the time is over, or if the other GPU adds up another array, the kernel ends with an error.
// Before that, it writes the reason to memory of the host.
//
// Needs: the GPUs run the same sums in the same order, one at a time. Chains run no sum in parallel
// with other calls (backends/chains/forks.py).
//
// The form of the lines is that of NCCL's protocol LL (nccl/src/include/device.h: ncclLLFifoLine).
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/collectives/peer_memory.h"
#include "cuda/instructions/peer_memory.cuh"
#include "cuda/quantizers/elements.cuh"
#include "shapes.h"

namespace nvfp4 {

// How often a thread looks for lines before it looks at the stamp and the clock.
constexpr uint32_t kLooksAtOnce = 64;

// The sum of one thread. Threads come in blocks of kPeerThreads or fewer, which need not be those
// of the kernel. `what` says which array the sum is a part of; it is the same on all GPUs.
struct PeerSum {
  const PeerGroup& group;
  int block, thread;
  bool inside;  // whether the thread has values
  uint32_t epoch;
  uint64_t stamp;

  __device__ __forceinline__ PeerSum(const PeerGroup& of, int own_block, int own_thread,
                                     bool has_values, uint32_t what)
      : group(of), block(own_block), thread(own_thread), inside(has_values) {
    epoch = *EpochIn(group.memory[group.rank], block) + 1;
    if (epoch == 0) epoch = 2;  // memory that nobody has written has epoch 0
    stamp = uint64_t{epoch} << 32 | what;
  }

  __device__ __forceinline__ int slot() const { return static_cast<int>(epoch % 2); }

  // Sends the values of this thread to all other GPUs.
  __device__ __forceinline__ void Send(const uint4& values) const {
    const int rank = group.rank, count = group.count;
    if (thread < count && thread != rank) {
      StoreForPeer(StampIn(group.memory[thread], slot(), block, rank), stamp);
    }
    if (!inside) return;
    const uint64_t above = uint64_t{epoch} << 32;
    for (int i = 1; i < count; ++i) {  // each GPU begins with another one
      const int peer = rank + i < count ? rank + i : rank + i - count;
      uint64_t* lines = LinesIn(group.memory[peer], count, slot(), rank, block, thread);
      StorePairForPeer(lines, above | values.x, above | values.y);
      StorePairForPeer(lines + kSecondLine, above | values.z, above | values.w);
    }
  }

  // Waits for the values of another GPU and returns them.
  __device__ __forceinline__ uint4 Receive(int sender) const {
    char* const own = group.memory[group.rank];
    const uint64_t* lines = LinesIn(own, group.count, slot(), sender, block, thread);
    const uint64_t* arrival = StampIn(own, slot(), block, sender);
    const bool compares = thread == sender;  // one thread of each block reads the stamp of a GPU
    uint64_t begin = 0;
    for (uint32_t looks = 1;; ++looks) {
      uint64_t words[4] = {stamp, stamp, stamp, stamp};
      const uint64_t found = compares ? LoadOfPeer(arrival) : stamp;
      if (inside) {
        LoadPairOfPeer(lines, &words[0], &words[1]);
        LoadPairOfPeer(lines + kSecondLine, &words[2], &words[3]);
      }
      if (found == stamp && words[0] >> 32 == epoch && words[1] >> 32 == epoch &&
          words[2] >> 32 == epoch && words[3] >> 32 == epoch) {
        return make_uint4(static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[1]),
                          static_cast<uint32_t>(words[2]), static_cast<uint32_t>(words[3]));
      }
      if (looks % kLooksAtOnce == 0) EndIfInVain(sender, LoadOfPeer(arrival), &begin);
    }
  }

  // Ends the kernel with an error if another GPU adds up another array, or does not come.
  __device__ __forceinline__ void EndIfInVain(int peer, uint64_t found, uint64_t* begin) const {
    const uint64_t now = Nanoseconds();
    if (*begin == 0) *begin = now;
    const bool differs = found >> 32 == epoch && found != stamp;
    if (!differs && now - *begin <= group.timeout_ns) return;
    group.failure->peer = static_cast<uint32_t>(peer);
    group.failure->reason = differs ? PeerFailure::kMismatch : PeerFailure::kTimeout;
    EndWithError();
  }

  // Returns the sum of `mine`, which has been sent, and of what all other GPUs send.
  template <typename T>
  __device__ __forceinline__ uint4 AddUp(const uint4& mine) const {
    constexpr int kWidth = static_cast<int>(kPieceBytes / sizeof(T));
    float sums[kWidth] = {};
    for (int sender = 0; sender < group.count; ++sender) {
      const uint4 words = sender == group.rank ? mine : Receive(sender);
      T values[kWidth];
      memcpy(values, &words, sizeof(words));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sums[j] = sender == 0 ? ToFloat(values[j]) : sums[j] + ToFloat(values[j]);
      }
    }
    T y[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) y[j] = FromFloat<T>(sums[j]);
    uint4 words;
    memcpy(&words, y, sizeof(words));
    return words;
  }

  // Says that the sum is finished. All threads of the block have passed a barrier since they were
  // made.
  __device__ __forceinline__ void Finish() const {
    if (thread == 0) *EpochIn(group.memory[group.rank], block) = epoch;
  }
};

// What a stamp says about an array of pieces. `by_rows` tells sums whose blocks are rows.
__device__ __forceinline__ uint32_t WhatIsAddedUp(int32_t pieces, DataType type, bool by_rows) {
  return static_cast<uint32_t>(pieces) << 8 | uint32_t{by_rows} << 7 | static_cast<uint32_t>(type);
}

}  // namespace nvfp4
