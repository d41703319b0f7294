// The numbers of an RMS norm, as `normalize` of numerics/norms.py computes them.
#pragma once

#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {

// Returns 1 / sqrt(mean + eps), where `squares` is the sum of the squares of n numbers.
__device__ __forceinline__ float InverseRoot(float squares, int32_t n, float eps) {
  return rsqrtf(Divide(squares, static_cast<float>(n)) + eps);
}

// Rounds the normalized value to the type of the weight, multiplies by it, and rounds to T.
template <typename T, typename W>
__device__ __forceinline__ T Normalized(float value, float inverse_root, W weight) {
  const float normal = ToFloat(FromFloat<W>(value * inverse_root));
  return FromFloat<T>(ToFloat(FromFloat<W>(normal * ToFloat(weight))));
}

}  // namespace nvfp4
