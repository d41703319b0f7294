// Sums over k that two or more blocks of threads share.
//
// A block works on a contiguous part of the line of steps (routing.cuh), so at most its first sum
// begins before it and at most its last one goes on after it. The block with the first steps of a
// sum owns it: it waits until each later block with steps of it has stored its share, and adds
// the shares in the order of the blocks. That order is fixed, so results are the same on each run.
// Shares are stored early in a block's work and collected at the end of one, so waits are short.
//
// `group` threads act together: the 128 of a warpgroup (one of kReadyFlags flags each), or all of
// a block. Needs: all blocks of the launch run at the same time, or start in their order.
#pragma once

#include <cstdint>

#include "instructions.cuh"
#include "routing.cuh"

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

}  // namespace nvfp4
