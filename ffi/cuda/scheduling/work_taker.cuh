// Blocks of a GEMM take its output tiles one by one (tile_scheduler.cuh), so that a fast
// multiprocessor computes more of them than a slow one. No block waits for another one, and the
// bits of an output do not depend on the block that computes it.
//
// On an H200, the blocks of a GEMM of GLM-4.5-Air with 64 tokens had the same work but for 2 %.
// They ended between 156 and 207 us after its start. One reason is that the blocks of a
// multiprocessor are not served alike. Of three blocks with eight warps each, the first took 11 us
// for a tile of Qwen3-30B-A3B, the second 15, and the third 30.
//
// To take a tile is to add to a counter in memory, which takes as long as a third of a step. One
// thread therefore asks for the next number when the last steps of a tile are copied, and leaves it
// in shared memory for the others a step later. The first tile of a block needs no counter.
#pragma once

#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

// Takes work for a block. All threads of the block call all functions. `counter` is in global
// memory, and `place` has the number that is taken next, in shared memory.
struct WorkTaker {
  enum State { kNone, kAsked, kStored, kVisible };

  State state = kNone;
  int32_t asked = 0;  // the next number; of thread 0

  // Asks for the next number, unless there is one already.
  __device__ __forceinline__ void Ask(int32_t* counter) {
    if (state != kNone) return;
    if (threadIdx.x == 0) asked = atomicAdd(counter, 1);
    state = kAsked;
  }

  // Brings the next number to all threads. A barrier must separate this call from the previous one.
  __device__ __forceinline__ void Advance(int32_t* place) {
    if (state == kStored) state = kVisible;
    if (state == kAsked) {
      if (threadIdx.x == 0) *place = asked;
      state = kStored;
    }
  }

  // Returns the next number: 0, 1, and so on, over all blocks.
  __device__ __forceinline__ int32_t Take(int32_t* counter, int32_t* place) {
    if (state != kVisible) {
      __syncthreads();  // all threads have read the number before
      Ask(counter);
      if (state == kAsked && threadIdx.x == 0) *place = asked;
      __syncthreads();
    }
    state = kNone;
    return *place;
  }
};

// Finds the work unit of output tile `tile`. Returns false if there is no such tile.
__device__ __forceinline__ bool FindTaken(const ExpertRows& rows, const TileRule& rule,
                                          const TileSchedule& schedule, int32_t tile,
                                          WorkUnit* work) {
  const auto index = static_cast<int32_t>(static_cast<uint32_t>(tile) / schedule.m_blocks);
  if (rows.only_rows == 0) {
    if (index >= rows.max_tiles || rows.tiles[index].end == 0) return false;
  } else if (index >= CutRows(rows.only_rows, rule.tile_rows).count) {
    return false;
  }
  work->begin = 0;
  work->end = schedule.k_steps;
  FindOutputTile(rows, rule, schedule.m_blocks, tile, work);
  return true;
}

}  // namespace nvfp4
