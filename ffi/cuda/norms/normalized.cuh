// The numbers of an RMS norm, as `normalize` of numerics/norms.py computes them.
#pragma once

#include <type_traits>

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

// Arithmetic with two 16-bit numbers at once (Word) takes a third of the instructions of arithmetic
// with one after the other.

// The products, rounded once to the type of the words.
__device__ __forceinline__ __half2 Multiply(__half2 a, __half2 b) { return __hmul2_rn(a, b); }
__device__ __forceinline__ __nv_bfloat162 Multiply(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hmul2_rn(a, b);
}
__device__ __forceinline__ float2 Multiply(float2 a, float2 b) {
  return make_float2(a.x * b.x, a.y * b.y);
}

// `Normalized` of two values.
template <typename T, typename W>
__device__ __forceinline__ Word<T> NormalizedWord(float2 values, float inverse_root,
                                                  Word<W> weight) {
  const Word<W> normal = FromFloats<W>(values.x * inverse_root, values.y * inverse_root);
  const Word<W> product = Multiply(normal, weight);
  if constexpr (std::is_same_v<T, W>) {
    return product;
  } else {
    const float2 wide = ToFloats(product);
    return FromFloats<T>(wide.x, wide.y);
  }
}

}  // namespace nvfp4
