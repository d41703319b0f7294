// Quantizes one block of 16 values to NVFP4 in registers, with the same bits as EncodeValue gives
// for each value.
//
//   codes   SplitBlock, FindBlockScale, EncodeBlock: 8 bytes of codes, and the byte of the scale
//   values  SplitBlock, FindBlockScale, RoundBlock: code * block scale in T, exact in 16 bits
//
// A value takes three instructions to divide and four to round (nvfp4.h). GPUs with FP4 tensor
// cores have one instruction that converts two values, in place of those four. Blocks whose scale
// is very large or small, or whose values saturate, take a few more instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "cuda/quantizers/elements.cuh"
#include "nvfp4.h"

// Devices that have the conversion to E2M1.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000
#define NVFP4_NATIVE_E2M1
#endif
#endif

namespace nvfp4 {

// Finds the largest magnitude of words of T, which hold one or two values each. It is NaN if a
// value is NaN.
template <typename T>
class LargestMagnitude {
 public:
  // Adds a word. Returns it without its signs.
  __device__ __forceinline__ uint32_t Add(uint32_t word) {
    const uint32_t bits = word & (sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu);
    if constexpr (sizeof(T) == 4) {
      largest_ = max(largest_, bits);  // as numbers, with infinity and NaN on top
    } else {
      Pair all, pair;
      std::memcpy(&all, &largest_, sizeof(all));
      std::memcpy(&pair, &bits, sizeof(pair));
      all = __hmax2_nan(all, pair);
      std::memcpy(&largest_, &all, sizeof(all));
    }
    return bits;
  }

  __device__ __forceinline__ float Value() const {
    if constexpr (sizeof(T) == 4) {
      return BitsFloat(largest_);
    } else {
      Pair all;
      std::memcpy(&all, &largest_, sizeof(all));
      return ToFloat(__hmax_nan(all.x, all.y));
    }
  }

 private:
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t largest_ = 0;
};

// The 16 values of a block, split into signs and magnitudes.
template <typename T>
struct SplitBlock {
  static constexpr int kWords = 4 * sizeof(T);
  uint32_t words[kWords];  // the values as in memory; only their signs are used
  float magnitudes[kBlock];
  float largest;  // NaN if one of them is NaN

  __device__ __forceinline__ explicit SplitBlock(const T (&values)[kBlock]) {
    std::memcpy(words, values, sizeof(words));
    LargestMagnitude<T> all;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = all.Add(words[w]);
      if constexpr (sizeof(T) == 4) {
        magnitudes[w] = BitsFloat(bits);
      } else if constexpr (std::is_same_v<T, __half>) {
        __half2 pair;
        std::memcpy(&pair, &bits, sizeof(pair));
        const float2 both = __half22float2(pair);
        magnitudes[2 * w] = both.x;
        magnitudes[2 * w + 1] = both.y;
      } else {
        // With a shift in place of this instruction, the compiler would clear the sign once more.
        magnitudes[2 * w] = BitsFloat(__byte_perm(bits, 0, 0x1044));
        magnitudes[2 * w + 1] = BitsFloat(bits & 0xffff0000u);
      }
    }
    largest = all.Value();
  }

  // Returns the bit of the sign of value j in its word.
  static __device__ __forceinline__ uint32_t SignOf(int j) {
    return sizeof(T) == 4 || j % 2 == 1 ? 0x80000000u : 0x8000u;
  }

  // Divides the magnitudes by `s`, so that RoundE2M1 can take them. `s` is block scale * g. It is
  // not negative, because the block scale has the sign of the global scale g.
  __device__ __forceinline__ void Divide(float s) {
    if (!DividesBlock(largest, s)) {
      const BlockRescue rescue = RescueBlock(&s);
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        words[j * kWords / kBlock] &= Rescue(rescue, &magnitudes[j]) | ~SignOf(j);
      }
    }
    const float reciprocal = Reciprocal(s);
#pragma unroll
    for (int j = 0; j < kBlock; ++j) magnitudes[j] = DivideBy(magnitudes[j], s, reciprocal);
  }
};

// Returns the codes of eight quotients in [0, 7), the first in the lowest nibble.
__device__ __forceinline__ uint32_t EncodeQuotients(const float* q) {
#if defined(NVFP4_NATIVE_E2M1)
  uint32_t codes;
  asm("{\n"
      ".reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};\n"
      "}"
      : "=r"(codes)
      : "f"(q[0]), "f"(q[1]), "f"(q[2]), "f"(q[3]), "f"(q[4]), "f"(q[5]), "f"(q[6]), "f"(q[7]));
  return codes;
#else
  uint32_t bytes[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    bytes[w] = CodeE2M1(RoundE2M1(q[2 * w])) + 16 * CodeE2M1(RoundE2M1(q[2 * w + 1]));
  }
  return __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040),
                     __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
#endif
}

// Returns the signs of eight values of T in memory order, at bits 3, 7, ..., 31.
template <typename T>
__device__ __forceinline__ uint32_t GatherSigns(const uint32_t* words) {
  uint32_t even, odd;  // the highest bytes of values 0, 2, 4, 6 and of 1, 3, 5, 7
  if constexpr (sizeof(T) == 4) {
    even = __byte_perm(__byte_perm(words[0], words[2], 0x0073),
                       __byte_perm(words[4], words[6], 0x0073), 0x5410);
    odd = __byte_perm(__byte_perm(words[1], words[3], 0x0073),
                      __byte_perm(words[5], words[7], 0x0073), 0x5410);
  } else {
    const uint32_t low = __byte_perm(words[0], words[1], 0x7351);
    const uint32_t high = __byte_perm(words[2], words[3], 0x7351);
    even = __byte_perm(low, high, 0x5410);
    odd = __byte_perm(low, high, 0x7632);
  }
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// Returns the codes of a block under the scale `s` = block scale * g. If s is 0 or NaN, the codes
// are 0.
template <typename T>
__device__ __forceinline__ uint2 EncodeBlock(SplitBlock<T> block, float s) {
  block.Divide(s);
  const uint32_t* words = block.words;
  return make_uint2(
      EncodeQuotients(block.magnitudes) | GatherSigns<T>(words),
      EncodeQuotients(block.magnitudes + 8) | GatherSigns<T>(words + SplitBlock<T>::kWords / 2));
}

// Returns the scale of a block of activations. A block that holds NaN or infinity gets NaN. The
// whole row of the GEMM is then NaN; otherwise, an infinity would become 6 * 448.
template <typename T>
__device__ __forceinline__ BlockScale FindActivationScale(const SplitBlock<T>& block,
                                                          const BlockDivisor& divisor) {
  const bool finite = block.largest < BitsFloat(0x7f800000u);
  return FindBlockScale(finite ? block.largest : BitsFloat(0x7fc00000u), divisor);
}

// Replaces the values by code * block_scale.
template <typename T>
__device__ __forceinline__ void RoundBlock(SplitBlock<T> block, float block_scale, float s,
                                           T (&values)[kBlock]) {
  block.Divide(s);
  uint32_t words[SplitBlock<T>::kWords];
#pragma unroll
  for (int j = 0; j < kBlock; ++j) {
    values[j] = FromFloat<T>(ValueOf(RoundE2M1(block.magnitudes[j])) * block_scale);
  }
  std::memcpy(words, values, sizeof(words));
  constexpr uint32_t kSigns = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
#pragma unroll
  for (int w = 0; w < SplitBlock<T>::kWords; ++w) {
    words[w] ^= block.words[w] & kSigns;
  }
  std::memcpy(values, words, sizeof(words));
}

// Rounds a block of activations under the global scale g: each value becomes code * block scale.
template <typename T>
__device__ __forceinline__ void RoundActivations(float g, T (&values)[kBlock]) {
  const SplitBlock<T> block(values);
  const BlockScale scale = FindActivationScale(block, MakeBlockDivisor(g));
  RoundBlock(block, scale.value, scale.value * g, values);
}

}  // namespace nvfp4
