// Quantizes a block of 16 outputs that is spread over lanes, with the same bits as QuantizeRows
// (quantize.cu). The outputs need no further pass over memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "cuda/quantizers/elements.cuh"
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

// Quantizes a block that kLanes neighboring lanes share; each lane holds kPairs pairs of T. All
// lanes of the warp must call it. It calls put(j, E2M1 of the magnitude of value j, sign bit, block
// scale) for each value of the lane. It returns the byte of the scale, which is NaN if the block
// holds NaN or infinity.
template <typename T, int kLanes, int kPairs, typename Put>
__device__ __forceinline__ uint8_t QuantizeSpreadBlock(float input_scale,
                                                       const uint32_t (&pairs)[kPairs],
                                                       const Put& put) {
  static_assert(2 * kLanes * kPairs == kBlock, "the values of one block scale");
  uint32_t largest = 0;  // as bits: NaN is above infinity, and infinity above all numbers
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
#pragma unroll
  for (int j = 0; j < 2 * kPairs; ++j) {
    const uint32_t bits = pairs[j / 2] >> (j % 2 * 16);
    float magnitude = HalfFloat<T>(bits & 0x7fffu);
    uint32_t sign = bits & 0x8000u;
    if (!divides) sign &= Rescue(rescue, &magnitude);
    put(j, RoundE2M1(DivideBy(magnitude, divisor, reciprocal)), sign, scale.value);
  }
  return scale.byte;
}

// Replaces each value by code * block scale. All values of a block with NaN or infinity become NaN.
template <typename T, int kLanes, int kPairs>
__device__ __forceinline__ void RoundSpreadBlock(float input_scale, uint32_t (&pairs)[kPairs]) {
  uint32_t rounded[kPairs] = {};
  QuantizeSpreadBlock<T, kLanes>(
      input_scale, pairs, [&](int j, Rounded value, uint32_t sign, float block_scale) {
        rounded[j / 2] |= (HalfBits<T>(ValueOf(value) * block_scale) ^ sign) << (j % 2 * 16);
      });
#pragma unroll
  for (int i = 0; i < kPairs; ++i) pairs[i] = rounded[i];
}

}  // namespace nvfp4
