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

struct BlockRounder {
  float scale, divisor;
  __device__ __forceinline__ BlockRounder(float block_scale, float global_scale)
      : scale(block_scale), divisor(block_scale * global_scale) {}
  __device__ __forceinline__ float Round(float x) const {
    return DecodeE2M1(EncodeValue(x, divisor)) * scale;
  }
};

// kLanes neighbouring lanes hold kPairs pairs of T each; all lanes of the warp take part. A block
// with NaN or infinity becomes NaN.
template <typename T, int kLanes, int kPairs>
__device__ __forceinline__ void RoundBlock(float input_scale, uint32_t (&pairs)[kPairs]) {
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
  const uint8_t byte = amax <= FLT_MAX ? EncodeBlockScale(amax, input_scale) : kE4M3Nan;
  const BlockRounder rounder(DecodeE4M3(byte), input_scale);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float low = rounder.Round(HalfFloat<T>(pairs[i]));
    const float high = rounder.Round(HalfFloat<T>(pairs[i] >> 16));
    pairs[i] = HalfBits<T>(low) | HalfBits<T>(high) << 16;
  }
}

}  // namespace nvfp4
