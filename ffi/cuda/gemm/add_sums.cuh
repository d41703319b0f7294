// Adds the fragments of sums that kernels for few rows keep in shared memory.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4 {

// `more` is a copy, so that it is loaded 16 bytes at a time.
__device__ __forceinline__ void Add(float4& total, float4 more) {
  total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
}

}  // namespace nvfp4
