// Unpacks weights in the layout "mma_64x64" (numerics/layouts.py) to registers.
//
// A tile is 64 rows by 64 of k: 2048 bytes of codes and 256 bytes of scales. 128 threads share a
// tile. Thread t, in lane 4 g + q of warp w, owns 16 bytes of codes. They are its fragments for the
// four MMAs over 16 of k (see mma.cuh). The fragments have two rows: the "low" row 16 w + g, and
// the "high" row, which is 8 rows below. Each pair of rows has 8 bytes of scales, which four
// threads share.
//
// Codes: bits 15, 8, 7 and 6 of a 16-bit half hold one code. The half, read as bf16, is then code *
// 2^-126: a sign, two exponent bits, and one mantissa bit. Four rotations put sixteen codes in
// place from two words (see UnpackPair), which takes one logic instruction per weight.
//
// Scales: a scale is E5M3 without a sign, with an exponent bias of 10. Its eight bits, placed below
// the exponent bits 0x7000 and read as bf16, are scale * 2^107. The product is code * scale *
// 2^-19, and is exact.
//
// In f16, the same bits move up by three: code * 2^-14, scale * 2^7, and the product code * scale *
// 2^-7, which is exact too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/gemm/tile_sizes.h"
#include "cuda/instructions/ampere.cuh"

namespace nvfp4 {

constexpr uint32_t kCodeBits = 0x81c081c0u;
constexpr uint32_t kFirstWordBits = 0x60306030u;  // bits of the remaining codes that word a holds

// The factor that a float32 sum of products must be multiplied by.
template <typename T>
constexpr float kProductUnit = 0x1p19f;
template <>
constexpr float kProductUnit<__half> = 0x1p7f;

// Constants that kernels take as an argument, so that the compiler keeps them in a register. As an
// immediate, the constant would leave a logic instruction no room for its third input.
struct TileConstants {
  uint32_t scale_exponent;
};

template <typename T>
__host__ __device__ constexpr TileConstants MakeTileConstants() {
  return {std::is_same_v<T, __half> ? 0x30003000u : 0x70007000u};
}

__device__ __forceinline__ uint32_t RotateRight(uint32_t word, int bits) {
  return __funnelshift_r(word, word, bits);
}

// Returns the code bits of `word`, as a pair of T.
template <typename T>
__device__ __forceinline__ uint32_t CodePair(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return ((word & 0x01c001c0u) << 3) | (word & 0x80008000u);
  } else {
    return word & kCodeBits;
  }
}

// Returns pair * s for both halves of `pair`, where s is the low or the high half of `scales`.
template <typename T, bool kHigh>
__device__ __forceinline__ uint32_t ScalePair(uint32_t pair, uint32_t scales) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 s = *reinterpret_cast<const __half2*>(&scales);
    const __half2 p =
        __hmul2(*reinterpret_cast<const __half2*>(&pair), kHigh ? __high2half2(s) : __low2half2(s));
    return *reinterpret_cast<const uint32_t*>(&p);
  } else {
    const __nv_bfloat162 s = *reinterpret_cast<const __nv_bfloat162*>(&scales);
    const __nv_bfloat162 p = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                     kHigh ? __high2bfloat162(s) : __low2bfloat162(s));
    return *reinterpret_cast<const uint32_t*>(&p);
  }
}

// Returns the scales of the low and the high row for one step of 16 of k, as a pair of T. `word`
// holds two steps: the even one at bits 4 and 20, and the odd one 8 bits further.
template <typename T>
__device__ __forceinline__ uint32_t StepScales(uint32_t word, bool odd, uint32_t exponent) {
  const uint32_t bits = (odd ? RotateRight(word, 8) : word) & 0x0ff00ff0u;
  if constexpr (std::is_same_v<T, __half>) {
    return (bits << 3) + exponent;
  } else {
    return bits | exponent;
  }
}

// Unpacks two words of codes and one word of scales to the fragments of two steps of 16 of k.
template <typename T>
__device__ __forceinline__ void UnpackPair(uint32_t a, uint32_t b, uint32_t scales,
                                           const TileConstants& constants, uint32_t (&even)[4],
                                           uint32_t (&odd)[4]) {
  const uint32_t se = StepScales<T>(scales, false, constants.scale_exponent);
  const uint32_t so = StepScales<T>(scales, true, constants.scale_exponent);
  const uint32_t rest = Select(a, RotateRight(b, 30), kFirstWordBits);
  even[0] = ScalePair<T, false>(CodePair<T>(a), se);
  even[1] = ScalePair<T, true>(CodePair<T>(RotateRight(a, 4)), se);
  even[2] = ScalePair<T, false>(CodePair<T>(a << 6), se);
  even[3] = ScalePair<T, true>(CodePair<T>(RotateRight(rest, 8)), se);
  odd[0] = ScalePair<T, false>(CodePair<T>(b), so);
  odd[1] = ScalePair<T, true>(CodePair<T>(RotateRight(b, 4)), so);
  odd[2] = ScalePair<T, false>(CodePair<T>(b << 6), so);
  odd[3] = ScalePair<T, true>(CodePair<T>(rest << 2), so);
}

// Unpacks all four steps of a tile.
template <typename T>
__device__ __forceinline__ void UnpackTile(const uint4& codes, const uint2& scales,
                                           const TileConstants& constants,
                                           uint32_t (&fragments)[4][4]) {
  UnpackPair<T>(codes.x, codes.y, scales.x, constants, fragments[0], fragments[1]);
  UnpackPair<T>(codes.z, codes.w, scales.y, constants, fragments[2], fragments[3]);
}

// Unpacks one step of a pair, and transposes it: fragments of 16 columns of a tile as rows, over 16
// rows of the tile as k. The words are those of UnpackPair. All lanes of a warp take the same step.
template <typename T>
__device__ __forceinline__ void UnpackTransposed(uint32_t a, uint32_t b, uint32_t scales, bool odd,
                                                 const TileConstants& constants,
                                                 uint32_t (&fragments)[4]) {
  const uint32_t step_scales = StepScales<T>(scales, odd, constants.scale_exponent);
  const uint32_t rest = Select(a, RotateRight(b, 30), kFirstWordBits);
  const uint32_t own = odd ? b : a;
  // The last rotation is that of `rest << 2` for the odd step: the bits which differ are no codes.
  const uint32_t low = ScalePair<T, false>(CodePair<T>(own), step_scales);
  const uint32_t high = ScalePair<T, true>(CodePair<T>(RotateRight(own, 4)), step_scales);
  const uint32_t low_8 = ScalePair<T, false>(CodePair<T>(own << 6), step_scales);
  const uint32_t high_8 =
      ScalePair<T, true>(CodePair<T>(RotateRight(rest, odd ? 30 : 8)), step_scales);
  fragments[0] = Transpose(low);
  fragments[1] = Transpose(low_8);
  fragments[2] = Transpose(high);
  fragments[3] = Transpose(high_8);
}

}  // namespace nvfp4
