// Sums over k that two or more blocks of threads share.
//
// A block works on a contiguous part of the line of steps (expert_rows.cuh), so at most its first
// sum begins before it and at most its last one goes on after it. The block with the first steps of
// a sum owns it: it waits until each later block with steps of it has stored its share, and adds
// the shares in the order of the blocks. That order is fixed, so results are the same on each run.
// Shares are stored early in a block's work and collected at the end of one, so waits are short.
//
// `group` threads act together: the 128 of a warpgroup (one of kReadyFlags flags each), or all of
// a block. Needs: all blocks of the launch run at the same time, or start in their order.
#pragma once

#include <cstdint>

#include "cuda/instructions/ampere.cuh"
#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

// One thread's part of a share: kCount floats, those of one index side by side for all threads.
template <int kCount>
__device__ __forceinline__ void StoreShare(float* share, int thread, int threads,
                                           const float (&sums)[kCount]) {
  static_assert(kCount % 4 == 0, "stored as float4");
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    reinterpret_cast<float4*>(share)[i * threads + thread] =
        make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
}

template <int kCount>
__device__ __forceinline__ void AddShare(const float* share, int thread, int threads,
                                         float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 values = __ldcg(reinterpret_cast<const float4*>(share) + i * threads + thread);
    sums[4 * i] += values.x;
    sums[4 * i + 1] += values.y;
    sums[4 * i + 2] += values.z;
    sums[4 * i + 3] += values.w;
  }
}

// After all threads of the group have stored: raises the flag.
__device__ __forceinline__ void RaiseFlag(int32_t* flag, int barrier, int thread, int threads) {
  SyncGroup(barrier, threads);
  if (thread == 0) StoreRelease(flag, 1);  // and with it what the others stored before the barrier
}

// Returns when the flag is up, for all threads of the group.
__device__ __forceinline__ void AwaitFlag(const int32_t* flag, int barrier, int thread,
                                          int threads) {
  if (thread == 0) {
    while (LoadAcquire(flag) == 0) __nanosleep(32);
  }
  SyncGroup(barrier, threads);
}

// What one group of threads hands over and collects: kParts times kCount sums of each thread.
template <int kParts, int kCount>
struct SharedSums {
  const Walk& walk;
  float* const shares;      // of all blocks
  const int group, groups;  // of a block
  const int thread, threads;
  const int barrier;

  __device__ __forceinline__ float* Share(int block, int part) const {
    const int64_t index = (block * groups + group) * kParts + part;
    return shares + index * (threads * kCount);
  }
  __device__ __forceinline__ int32_t* Flag(int block) const {
    return walk.ready + block * kReadyFlags + group;
  }

  __device__ __forceinline__ void HandOver(const float (&sums)[kParts][kCount]) const {
    const int block = static_cast<int>(blockIdx.x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      StoreShare(Share(block, part), thread, threads, sums[part]);
    }
    RaiseFlag(Flag(block), barrier, thread, threads);
  }

  // Adds the later shares of sum `sum`, whose first steps this block has done.
  __device__ __forceinline__ void Collect(int32_t sum, float (&sums)[kParts][kCount]) const {
    for (int other = static_cast<int>(blockIdx.x) + 1; other < walk.blocks; ++other) {
      const Start start = walk.starts[other], stop = walk.starts[other + 1];
      if (start.sum != sum) break;
      if (start.sum == stop.sum && start.step == stop.step) continue;
      AwaitFlag(Flag(other), barrier, thread, threads);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        AddShare(Share(other, part), thread, threads, sums[part]);
      }
    }
  }
};

template <int kParts, int kCount>
__device__ __forceinline__ void ClearSums(float (&sums)[kParts][kCount]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[part][i] = 0.0f;
  }
}

}  // namespace nvfp4
