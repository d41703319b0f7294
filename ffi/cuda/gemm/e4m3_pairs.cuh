// E4M3 numbers as operands of MMAs in bf16 and f16, exactly, from sm_80 on: weights, and the keys
// and values of a cache.
//
// Shifted to its place in a bf16 or an f16, an E4M3 number has the right sign and mantissa, and an
// exponent with the bias of E4M3. It is therefore too small by a power of two, by which one exact
// multiplication corrects it. Subnormal E4M3 numbers become subnormal numbers of the wider type,
// whose product is exact too. Only NaN reads as 480. NanRows or NoteNan finds it, and makes sums
// NaN.
//
// This takes two logic instructions and two others for two numbers. From 8.9 on, devices can
// convert E4M3 to f16, but f16 to bf16 would take three more instructions.
#pragma once

#include <type_traits>

#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/mma.cuh"
#include "nvfp4.h"

namespace nvfp4 {

// Returns two E4M3 numbers as a pair of T. `bytes` has one in the low byte of each half, and its
// sign in all bits above.
template <typename T>
__device__ __forceinline__ uint32_t DecodeBytes(uint32_t bytes) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  using Pair = std::conditional_t<kIsHalf, __half2, __nv_bfloat162>;
  const uint32_t shifted = kIsHalf ? bytes << 7 & 0xbf80bf80u : bytes << 4 & 0x87f087f0u;
  const uint32_t factor = kIsHalf ? 0x5c005c00u : 0x7b807b80u;  // 2^(15 - 7) or 2^(127 - 7)
  const Pair product =
      __hmul2(*reinterpret_cast<const Pair*>(&shifted), *reinterpret_cast<const Pair*>(&factor));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Returns a NaN for each of the two E4M3 numbers that is NaN, and zero for the other ones.
__device__ __forceinline__ uint32_t FindNan(uint32_t bytes) {
  return (((bytes & 0x007f007fu) + 0x00010001u) >> 7 & 0x00010001u) * 0x7fffu;
}

// Decodes the four E4M3 numbers of a word to two pairs of T, or to what FindNan returns.
template <typename T, bool kOnlyNan = false>
__device__ __forceinline__ void DecodeFour(uint32_t word, uint32_t& first, uint32_t& second) {
  const uint32_t low = WidenBytes<0>(word), high = WidenBytes<1>(word);
  first = kOnlyNan ? FindNan(low) : DecodeBytes<T>(low);
  second = kOnlyNan ? FindNan(high) : DecodeBytes<T>(high);
}

// Decodes numbers kFirst (0 or 1) and kFirst + 2 of the four of a word, as DecodeFour does.
template <typename T, bool kOnlyNan, int kFirst>
__device__ __forceinline__ uint32_t DecodeAlternate(uint32_t word) {
  const uint32_t bytes = WidenAlternate<kFirst>(word);
  return kOnlyNan ? FindNan(bytes) : DecodeBytes<T>(bytes);
}

// Notes in `changed` whether a word has a NaN: some of kNanBits are then set. Adding 1 to a byte
// changes its highest bit if the other bits are ones, as only those of NaN are. The carry out of a
// byte can change other bits of kNanBits, but that byte is NaN too.
constexpr uint32_t kNanBits = 0x80808080u;
__device__ __forceinline__ void NoteNan(uint32_t word, uint32_t& changed) {
  changed |= (word + 0x01010101u) ^ word;
}

// Whether rows g and g + 8 of a slab have a NaN.
struct NanPair {
  bool upper, lower;

  // Returns a fragment of sums, with NaN in the rows that have one.
  __device__ __forceinline__ float4 Spread(float4 sums) const {
    const float nan = BitsFloat(0x7fc00000u);
    if (upper) sums.x = sums.y = nan;
    if (lower) sums.z = sums.w = nan;
    return sums;
  }
};

// Finds NaNs among the weights that a warp reads: rows g and g + 8 of up to four slabs. Each has a
// bit in each byte of one register.
template <bool kUsed>
struct NanRows {
  uint32_t bits = 0;

  // Only the bytes of NaN, 0x7f and 0xff, carry into the highest bit here.
  __device__ __forceinline__ void Note(int slab, int lower, const uint2& words) {
    const uint32_t first = (words.x & 0x7f7f7f7fu) + 0x01010101u;
    const uint32_t second = (words.y & 0x7f7f7f7fu) + 0x01010101u;
    bits |= ((first | second) & 0x80808080u) >> (2 * slab + lower);
    Settle(bits);  // otherwise the words would stay in registers
  }

  // Whole warps call it.
  __device__ __forceinline__ NanPair Find(int slab) const {
    uint32_t quad = bits;
    quad |= __shfl_xor_sync(0xffffffffu, quad, 1);
    quad |= __shfl_xor_sync(0xffffffffu, quad, 2);
    return {(quad & 0x80808080u >> 2 * slab) != 0, (quad & 0x40404040u >> 2 * slab) != 0};
  }
};

// For weights of another type.
template <>
struct NanRows<false> {
  __device__ __forceinline__ void Note(int, int, const uint2&) {}
  __device__ __forceinline__ NanPair Find(int) const { return {false, false}; }
};

}  // namespace nvfp4
