// Sums over the 32 lanes of a warp.
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

}  // namespace nvfp4
