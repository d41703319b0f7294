// A block of 16 outputs, spread over lanes, rounded to NVFP4: code * block scale in 16 bits, bit
// for bit what QuantizeRows makes of them (quantize.cu), without another pass over memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "elements.cuh"
#include "nvfp4.h"

namespace nvfp4 {

template <typename T>
__device__ __forceinline__ float HalfFloat(uint32_t bits) {
  const auto half = static_cast<uint16_t>(bits);
  return ToFloat(*reinterpret_cast<const T*>(&half));
}

template <typename T>
__device__ __forceinline__ uint32_t HalfBits(float value) {
  const T half = FromFloat<T>(value);
  return *reinterpret_cast<const uint16_t*>(&half);
}

// kLanes neighbouring lanes hold kPairs pairs of T each; all lanes of the warp take part. A block
// with NaN or infinity becomes NaN.
template <typename T, int kLanes, int kPairs>
__device__ __forceinline__ void RoundSpreadBlock(float input_scale, uint32_t (&pairs)[kPairs]) {
  static_assert(2 * kLanes * kPairs == kBlock, "the values of one block scale");
  uint32_t largest = 0;  // as bits: NaN is above infinity and that above all numbers
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    largest = max(largest, max(pairs[i] & 0x7fffu, pairs[i] >> 16 & 0x7fffu));
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  const float amax = HalfFloat<T>(largest);
  const float numbered = amax <= FLT_MAX ? amax : BitsFloat(0x7fc00000u);
  const BlockScale scale = FindBlockScale(numbered, MakeBlockDivisor(input_scale));
  float divisor = scale.value * input_scale;
  const bool divides = DividesBlock(amax, divisor);
  BlockRescue rescue = {};
  if (!divides) rescue = RescueBlock(&divisor);
  const float reciprocal = Reciprocal(divisor);
  const auto round = [&](uint32_t bits) {
    float magnitude = HalfFloat<T>(bits & 0x7fffu);
    if (!divides) Rescue(rescue, &magnitude);
    const float q = DivideBy(magnitude, divisor, reciprocal);
    return HalfBits<T>(ValueOf(RoundE2M1(q)) * scale.value) ^ (bits & 0x8000u);
  };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    pairs[i] = round(pairs[i] & 0xffffu) | round(pairs[i] >> 16) << 16;
  }
}

}  // namespace nvfp4
