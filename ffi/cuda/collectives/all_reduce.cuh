// The kernel of all_reduce.cu.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/collectives/peer_memory.h"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/peer_memory.cuh"
#include "cuda/launch.h"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {

// How often a thread looks for an arrival before it looks at the clock.
constexpr uint32_t kLooksAtOnce = 64;

// Waits until the stamp of another GPU has arrived. A stamp of the same epoch that differs belongs
// to another sum: the GPUs do not run the same program, or in another order.
__device__ __forceinline__ void WaitForPeer(const PeerGroup& group, int peer,
                                            const uint64_t* arrival, uint64_t stamp) {
  const uint64_t begin = Nanoseconds();
  for (uint32_t looks = 1;; ++looks) {
    const uint64_t found = LoadAcquire(arrival);
    if (found == stamp) return;
    const bool differs = found >> 32 == stamp >> 32;
    const bool is_late = looks % kLooksAtOnce == 0 && Nanoseconds() - begin > group.timeout_ns;
    if (differs || is_late) {
      group.failure->peer = static_cast<uint32_t>(peer);
      group.failure->reason = differs ? PeerFailure::kMismatch : PeerFailure::kTimeout;
      EndWithError();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kPeerThreads) AllReduce(const __grid_constant__ AllReduceCall p) {
  constexpr int kWidth = static_cast<int>(kPieceBytes / sizeof(T));
  const PeerGroup& group = p.group;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int rank = group.rank, count = group.count;
  const int32_t piece = block * kPeerThreads + thread;
  const bool inside = piece < p.pieces;
  WaitAndStartNextKernel(p.starts_next);
  char* own = group.memory[rank];
  const uint32_t epoch = *EpochIn(own, block) + 1;
  const int slot = static_cast<int>(epoch % 2);
  uint4 mine = make_uint4(0, 0, 0, 0);
  if (inside) {
    mine = static_cast<const uint4*>(p.x)[piece];
    for (int i = 1; i < count; ++i) {  // each GPU begins with another one
      const int peer = rank + i < count ? rank + i : rank + i - count;
      reinterpret_cast<uint4*>(ValuesIn(group.memory[peer], count, slot, rank))[piece] = mine;
    }
  }
  __syncthreads();
  if (thread < count && thread != rank) {
    const uint64_t stamp = uint64_t{epoch} << 32 | static_cast<uint32_t>(p.pieces) << 8 |
                           static_cast<uint32_t>(p.type);
    StoreRelease(ArrivalIn(group.memory[thread], slot, block, rank), stamp);
    WaitForPeer(group, thread, ArrivalIn(own, slot, block, thread), stamp);
  }
  __syncthreads();
  if (inside) {
    float sums[kWidth] = {};
    for (int sender = 0; sender < count; ++sender) {
      // The L1 cache is not asked, because another GPU has written these values.
      const uint4 words =
          sender == rank
              ? mine
              : __ldcg(reinterpret_cast<const uint4*>(ValuesIn(own, count, slot, sender)) + piece);
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
    memcpy(&mine, y, sizeof(mine));
    static_cast<uint4*>(p.y)[piece] = mine;
  }
  if (thread == 0) *EpochIn(own, block) = epoch;
}

}  // namespace nvfp4
