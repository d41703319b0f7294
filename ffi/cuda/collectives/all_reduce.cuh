// The kernel of all_reduce.cu.
#pragma once

#include <cstdint>

#include "cuda/collectives/peer_sum.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"

namespace nvfp4 {

template <typename T>
__global__ void __launch_bounds__(kPeerThreads) AllReduce(const __grid_constant__ AllReduceCall p) {
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int32_t piece = block * kPeerThreads + thread;
  const bool inside = piece < p.pieces;
  WaitAndStartNextKernel(p.starts_next);
  const uint32_t what = WhatIsAddedUp(p.pieces, p.type, /*by_rows=*/false);
  const PeerSum sum(p.group, block, thread, inside, what);
  uint4 mine = make_uint4(0, 0, 0, 0);
  if (inside) mine = static_cast<const uint4*>(p.x)[piece];
  sum.Send(mine);
  const uint4 y = sum.AddUp<T>(mine);
  if (inside) static_cast<uint4*>(p.y)[piece] = y;
  __syncthreads();
  sum.Finish();
}

}  // namespace nvfp4
