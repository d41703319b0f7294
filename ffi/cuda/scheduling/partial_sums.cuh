// Partial sums of output tiles that two or more blocks of threads compute, and the fix-up that adds
// them.
//
// The stream-K range of a block is contiguous (tile_scheduler.cuh). At most its first work unit
// begins inside an output tile, and at most its last one ends inside one. The block that has the
// first steps of a tile owns the tile. It waits until each later block with steps of the tile has
// stored its partial sum, and adds these in the order of the blocks. The order is fixed, so that
// results are the same on each run. A block stores its partial sum at the beginning of its work and
// adds those of others at the end, so that waits are short.
//
// A group of threads acts together: either the 128 threads of a warpgroup, or all threads of a
// block. Each group of a block has its own flag, so that a block has at most kReadyFlags groups.
//
// Needs: all blocks of the launch run at the same time, or start in their order while there is room
// for all blocks of an output tile. In parallel with the kernels of a fork, only the latter holds;
// backends/chains/forks.py (_may_block) keeps two kernels apart that could take each other's room.
#pragma once

#include <cstdint>

#include "cuda/instructions/ampere.cuh"
#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

// Stores the part of a partial sum that one thread has: kCount floats. All threads store the same
// index side by side.
template <int kCount>
__device__ __forceinline__ void StorePartialSum(float* partial, int thread, int threads,
                                                const float (&sums)[kCount]) {
  static_assert(kCount % 4 == 0, "stored as float4");
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    reinterpret_cast<float4*>(partial)[i * threads + thread] =
        make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
}

template <int kCount>
__device__ __forceinline__ void AddPartialSum(const float* partial, int thread, int threads,
                                              float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 values = __ldcg(reinterpret_cast<const float4*>(partial) + i * threads + thread);
    sums[4 * i] += values.x;
    sums[4 * i + 1] += values.y;
    sums[4 * i + 2] += values.z;
    sums[4 * i + 3] += values.w;
  }
}

// Raises the flag when all threads of the group have stored.
__device__ __forceinline__ void RaiseFlag(int32_t* flag, int barrier, int thread, int threads) {
  SyncGroup(barrier, threads);
  if (thread == 0) StoreRelease(flag, 1);  // also publishes the stores of the other threads
}

// Waits until the flag is raised, for all threads of the group.
__device__ __forceinline__ void AwaitFlag(const int32_t* flag, int barrier, int thread,
                                          int threads) {
  if (thread == 0) {
    while (LoadAcquire(flag) == 0) __nanosleep(32);
  }
  SyncGroup(barrier, threads);
}

// The partial sums of one group of threads: each thread has kParts times kCount floats.
template <int kParts, int kCount>
struct FixUp {
  const TileSchedule& schedule;
  float* const partials;    // of all blocks
  const int group, groups;  // this group, and the number of groups of a block
  const int thread, threads;
  const int barrier;

  __device__ __forceinline__ float* PartialSum(int block, int part) const {
    const int64_t index = (block * groups + group) * kParts + part;
    return partials + index * (threads * kCount);
  }
  __device__ __forceinline__ int32_t* Flag(int block) const {
    return schedule.ready + block * kReadyFlags + group;
  }

  __device__ __forceinline__ void StorePartialSums(const float (&sums)[kParts][kCount]) const {
    const int block = static_cast<int>(blockIdx.x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      StorePartialSum(PartialSum(block, part), thread, threads, sums[part]);
    }
    RaiseFlag(Flag(block), barrier, thread, threads);
  }

  // Adds the partial sums of an output tile that later blocks have stored. This block must have
  // computed the first steps of the tile.
  __device__ __forceinline__ void AddPartialSums(int32_t output_tile,
                                                 float (&sums)[kParts][kCount]) const {
    for (int other = static_cast<int>(blockIdx.x) + 1; other < schedule.blocks; ++other) {
      const WorkStart start = schedule.Start(other), stop = schedule.Start(other + 1);
      if (start.output_tile != output_tile) break;
      if (start.output_tile == stop.output_tile && start.step == stop.step) continue;
      AwaitFlag(Flag(other), barrier, thread, threads);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        AddPartialSum(PartialSum(other, part), thread, threads, sums[part]);
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
