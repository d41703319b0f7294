// Emulates the block-scaled FP4 MMA of fp4_mma.cuh with shuffles and float32, for devices that do
// not have it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "nvfp4.h"

namespace nvfp4 {

// Returns the sum of eight products of codes. It is a multiple of 1/4, and exact.
__device__ __forceinline__ float DotCodes(uint32_t a, uint32_t b) {
  float dot = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) dot += DecodeE2M1(a >> (4 * j)) * DecodeE2M1(b >> (4 * j));
  return dot;
}

// Returns the value of byte `block` of a word of scales, which have no sign.
__device__ __forceinline__ float ScaleOf(uint32_t word, int block) {
  return DecodeE4M3(word >> (8 * block) & 0x7f);
}

// For each 16 of k, adds the sum of 16 products times both scales, in float32. The sum of products
// and its product with the scales are exact. Operands are passed by value and the function is not
// inlined, because it is long and many places call it.
static __device__ __noinline__ float4 EmulateFp4(float4 before, uint4 a, uint2 b, uint32_t scale_a,
                                                 uint32_t scale_b) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, q = lane % 4;
  const uint32_t scales_a[2] = {__shfl_sync(kAll, scale_a, 4 * g),
                                __shfl_sync(kAll, scale_a, 4 * g + 1)};
  const uint32_t scales_b[2] = {__shfl_sync(kAll, scale_b, 8 * q),
                                __shfl_sync(kAll, scale_b, 8 * q + 4)};
  float sums[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    float dots[4] = {};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int from = 2 * (block % 2) + t;  // of the four lanes of a row or column
      const uint32_t low = block < 2 ? a.x : a.z, high = block < 2 ? a.y : a.w;
      const uint32_t column = block < 2 ? b.x : b.y;
      const uint32_t rows[2] = {__shfl_sync(kAll, low, 4 * g + from),
                                __shfl_sync(kAll, high, 4 * g + from)};
      const uint32_t columns[2] = {__shfl_sync(kAll, column, 8 * q + from),
                                   __shfl_sync(kAll, column, 8 * q + 4 + from)};
#pragma unroll
      for (int i = 0; i < 4; ++i) dots[i] += DotCodes(rows[i / 2], columns[i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] += dots[i] * (ScaleOf(scales_a[i / 2], block) * ScaleOf(scales_b[i % 2], block));
    }
  }
  return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

}  // namespace nvfp4
