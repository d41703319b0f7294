// Loads blocks of 16 activations or weights from global memory to registers.
//
// 16 is the size of an NVFP4 block and divides every k. All loads are therefore aligned and whole:
// 32 or 64 bytes of activations, 8 bytes of codes, and 1 byte of scale.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "nvfp4.h"

namespace nvfp4 {

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(__half value) { return __half2float(value); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T FromFloat(float value);
template <>
__device__ __forceinline__ float FromFloat<float>(float value) {
  return value;
}
// The conversion of two numbers (F2FP) runs on the arithmetic units. That of a single number (F2F)
// runs on a unit with fewer lanes.
template <>
__device__ __forceinline__ __half FromFloat<__half>(float value) {
  return __floats2half2_rn(value, 0.0f).x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float value) {
  return __floats2bfloat162_rn(value, 0.0f).x;
}

// Two neighboring numbers of type T in one register, or in two for float.
template <typename T>
struct WordOf;
template <>
struct WordOf<__half> {
  using Type = __half2;
};
template <>
struct WordOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};
template <>
struct WordOf<float> {
  using Type = float2;
};
template <typename T>
using Word = typename WordOf<T>::Type;

__device__ __forceinline__ float2 ToFloats(__half2 word) { return __half22float2(word); }
__device__ __forceinline__ float2 ToFloats(__nv_bfloat162 word) { return __bfloat1622float2(word); }
__device__ __forceinline__ float2 ToFloats(float2 word) { return word; }

template <typename T>
__device__ __forceinline__ Word<T> FromFloats(float x, float y) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return make_float2(x, y);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __floats2half2_rn(x, y);
  } else {
    return __floats2bfloat162_rn(x, y);
  }
}

// Returns two numbers in the 16-bit type T, the first in the low half. Two calls of FromFloat take
// more instructions and registers.
template <typename T>
__device__ __forceinline__ uint32_t MakePair(float first, float second) {
  static_assert(sizeof(Word<T>) == sizeof(uint32_t));
  const Word<T> pair = FromFloats<T>(first, second);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Computes scale * value of the eight codes of `word`, the lowest nibble first. The result is
// exact. The three bits of a magnitude, placed at the top of the mantissa of a float32, read as
// value * 2^-126.
NVFP4_HOST_DEVICE void DecodeWord(uint32_t word, float scale, float* values) {
  for (int j = 0; j < 8; ++j) {
    const uint32_t top = word << (28 - 4 * j);
    const float tiny = BitsFloat((top & 0x80000000u) | ((top >> 6) & 0x01c00000u));
    values[j] = tiny * 0x1p126f * scale;
  }
}

// Whether a kernel may write the memory that it reads. __ldg may read memory that the kernel never
// writes. If the kernel has written it, the value that __ldg returns is undefined.
enum class Access { kReadOnly, kReadWrite };

template <Access kAccess, typename Vector>
__device__ __forceinline__ Vector LoadAs(const Vector* source) {
  if constexpr (kAccess == Access::kReadOnly) {
    return __ldg(source);
  } else {
    return *source;
  }
}

// A row of T in global memory, which is read 16 values at a time. If `weighted` is set, each value
// is multiplied by `weight` and rounded to T. A null row reads as zeros.
template <typename T, Access kAccess = Access::kReadOnly>
struct PlainRow {
  const T* row = nullptr;
  int num_blocks = 0;
  bool weighted = false;
  float weight = 1.0f;
  uint4 words[sizeof(T)];

  __device__ __forceinline__ void Load(int block) {
    const bool inside = row != nullptr && block < num_blocks;
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(T)); ++w) {
      const uint4* source = reinterpret_cast<const uint4*>(row + static_cast<int64_t>(block) * 16);
      words[w] = inside ? LoadAs<kAccess>(source + w) : make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void Values(T (&values)[16]) const {
    std::memcpy(values, words, sizeof(words));
    if (!weighted) return;
#pragma unroll
    for (int j = 0; j < 16; ++j) values[j] = FromFloat<T>(ToFloat(values[j]) * weight);
  }
};

// Stores 16 values to aligned memory, 16 bytes at a time.
template <typename T>
__device__ __forceinline__ void StoreBlock(T* target, const T (&values)[16]) {
  uint4 words[sizeof(T)];
  std::memcpy(words, values, sizeof(words));
#pragma unroll
  for (int w = 0; w < static_cast<int>(sizeof(T)); ++w) {
    reinterpret_cast<uint4*>(target)[w] = words[w];
  }
}

// A row of codes and block scales, which is read 16 values at a time. A value is code * scale
// without the global scale, and is exact in each T. A null row reads as zeros.
struct QuantizedRow {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  int num_blocks = 0;
  uint2 words;
  uint32_t scale;

  __device__ __forceinline__ void Load(int block) {
    const bool inside = codes != nullptr && block < num_blocks;
    words = inside ? __ldg(reinterpret_cast<const uint2*>(codes) + block) : make_uint2(0, 0);
    scale = inside ? __ldg(scales + block) : 0;
  }

  template <typename T>
  __device__ __forceinline__ void Values(T (&values)[16]) const {
    float decoded[16];
    const float s = DecodeE4M3(scale);
    DecodeWord(words.x, s, decoded);
    DecodeWord(words.y, s, decoded + 8);
#pragma unroll
    for (int j = 0; j < 16; ++j) values[j] = FromFloat<T>(decoded[j]);
  }
};

}  // namespace nvfp4
