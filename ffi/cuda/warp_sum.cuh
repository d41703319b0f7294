// Sums over the 32 lanes of a warp, and over the threads of a block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Returns the sum of the values of all lanes. Each lane gets the same bits, because the order of
// the additions does not depend on the lane.
__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Returns the sum of the values of all threads of a block of kWarps warps, with the same bits in
// each thread. Nothing protects the shared memory of a second call in the same block.
template <int kWarps>
__device__ __forceinline__ float BlockSum(float value) {
  __shared__ float sums[kWarps];
  const float own = WarpSum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
  return sum;
}

}  // namespace nvfp4
