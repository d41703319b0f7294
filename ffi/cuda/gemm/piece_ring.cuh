// A loop over pieces of k that a block brings to shared memory by cp.async, a few pieces ahead. The
// memory of a piece is reused in turn: piece i lies in stage i % kStages of a ring.
#pragma once

#include "cuda/instructions/async_copy.cuh"

namespace nvfp4 {

// Whether RunThroughRing brings a piece before it uses one.
template <int kStages>
__device__ __forceinline__ bool IsFirst(int piece) {
  return piece < kStages - 1;
}

// Calls bring(piece, stage) for these pieces. A kernel does so with weights before it waits for the
// kernel that writes its rows. The first group of RunThroughRing then has the copies.
template <int kStages, typename Bring>
__device__ __forceinline__ void BringFirst(int pieces, const Bring& bring) {
#pragma unroll 1
  for (int piece = 0; piece < pieces && IsFirst<kStages>(piece); ++piece) bring(piece, piece);
}

// Calls bring(piece, stage), which starts the copies of a piece, and use(piece, stage) for each of
// `pieces` pieces. All threads of the block call it. A thread may return while others still use the
// last piece.
template <int kStages, typename Bring, typename Use>
__device__ __forceinline__ void RunThroughRing(int pieces, const Bring& bring, const Use& use) {
  // The first rounds only bring pieces.
#pragma unroll 1
  for (int piece = 1 - kStages; piece < pieces; ++piece) {
    if (piece >= 0) {
      WaitCopies<kStages - 2>();
      __syncthreads();  // all threads have brought this piece, and have used the one before it
    }
    const int next = piece + kStages - 1;
    if (next < pieces) bring(next, next % kStages);
    CommitCopies();
    if (piece >= 0) use(piece, piece % kStages);
  }
}

}  // namespace nvfp4
