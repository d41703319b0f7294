// NVFP4 numbers, one at a time: E2M1 codes, E4M3 block scales, and the exact quantizer.
//
//   value = e2m1(code) * e4m3(block_scale) * global_scale      one block_scale per 16 values
//   block_scale = e4m3(min(amax16 / (6 * g), 448)),  code = e2m1(x / (f32(block_scale) * g))
//
// Host and device. All rounding is to nearest, ties to even; division is IEEE division. Nothing
// here needs subnormal float32 results, except quantizing subnormal activations.
// Reference: formats.py. A product e2m1 * e4m3 has at most 6 significant bits and lies in
// {0} U [2^-10, 2688], so it is exact in bfloat16 and float16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define NVFP4_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define NVFP4_HOST_DEVICE inline
#endif

namespace nvfp4 {

constexpr int kBlock = 16;            // values that share one block scale
constexpr float kE2M1Max = 6.0f;      // largest code
constexpr float kE4M3Max = 448.0f;    // largest block scale
constexpr float kValueMax = 2688.0f;  // kE2M1Max * kE4M3Max: global_scale = amax / kValueMax
constexpr uint8_t kE4M3Nan = 0x7f;

NVFP4_HOST_DEVICE uint32_t FloatBits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

NVFP4_HOST_DEVICE float BitsFloat(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// Correctly rounded a / b, whatever the compiler's flags say about division on a device.
NVFP4_HOST_DEVICE float Divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// Value of the low 4 bits of `code`: sign, 2 exponent bits, 1 mantissa bit.
NVFP4_HOST_DEVICE float DecodeE2M1(uint32_t code) {
  const uint32_t magnitude = code & 7;
  // 0.5 is the one subnormal; the others are the float with the same exponent and mantissa.
  const float absolute = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                                       : BitsFloat((magnitude + (126u << 1)) << 22);
  return (code & 8) ? -absolute : absolute;
}

// Value of an E4M3 byte; 0x7f and 0xff are NaN, there is no infinity.
NVFP4_HOST_DEVICE float DecodeE4M3(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7f;
  float absolute;
  if (magnitude < 8) {
    absolute = static_cast<float>(magnitude) * 0x1p-9f;
  } else if (magnitude == kE4M3Nan) {
    absolute = BitsFloat(0x7fc00000u);
  } else {
    absolute = BitsFloat((magnitude + (120u << 3)) << 20);
  }
  return (byte & 0x80) ? -absolute : absolute;
}

// Nearest E4M3 byte; magnitudes above 448 saturate, NaN gives 0x7f.
NVFP4_HOST_DEVICE uint8_t EncodeE4M3(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return kE4M3Nan;
  if (magnitude >= FloatBits(kE4M3Max)) return static_cast<uint8_t>(sign | 0x7e);
  if (magnitude < FloatBits(0x1p-6f)) {
    // Subnormal: one unit is 2^-9, which is the unit in the last place of floats at 2^14.
    const float shifted = BitsFloat(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (FloatBits(shifted) - FloatBits(0x1p14f)));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

// Nearest E2M1 code; magnitudes above 6 saturate, -0 gives 8, NaN gives 0.
NVFP4_HOST_DEVICE uint32_t EncodeE2M1(float value) {
  const uint32_t bits = FloatBits(value);
  const float absolute = BitsFloat(bits & 0x7fffffffu);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  const uint32_t magnitude = (absolute > 0.25f) + (absolute >= 0.75f) + (absolute > 1.25f) +
                             (absolute >= 1.75f) + (absolute > 2.5f) + (absolute >= 3.5f) +
                             (absolute > 5.0f);
  return ((bits >> 28) & 8) | magnitude;
}

// Block scale byte of 16 values with largest magnitude `amax` under global scale `g`. A NaN in
// the block must reach `amax`; it gives the NaN byte.
NVFP4_HOST_DEVICE uint8_t EncodeBlockScale(float amax, float g) {
  // 0 / 0, of a zero row under its own zero scale, is a zero block.
  const float ratio = amax == 0.0f ? 0.0f : Divide(amax, kE2M1Max * g);
  return EncodeE4M3(ratio > kE4M3Max ? kE4M3Max : ratio);
}

// Code of x where the block's scale is `s` = DecodeE4M3(byte) * g; s of 0 or NaN gives 0.
NVFP4_HOST_DEVICE uint32_t EncodeValue(float x, float s) {
  return s == 0.0f ? 0u : EncodeE2M1(Divide(x, s));
}

// Many values under one scale. A quotient q by the reciprocal of d, whose remainder a fused
// multiply-add finds exactly, and q corrected by it (P. Markstein, IBM J. Res. Dev. 34, 1990): next
// to every threshold of E2M1 and E4M3 that is RN(v / d), and elsewhere it is as far on the same
// side, so codes are those of IEEE division. Test: test_quantizer_exact.py, every significand of d.
//
// For d in [kDivisorMin, 1 / kDivisorMin] and quotients up to 2^20: nothing overflows, and the
// remainder of a quotient of 2^-12 or more is no subnormal. What is less is below all thresholds.
constexpr float kDivisorMin = 0x1p-90f;

NVFP4_HOST_DEVICE bool IsDivisor(float d) { return d >= kDivisorMin && d <= 1 / kDivisorMin; }

// RN(1 / d) of such a d: on a device the steps of its own division, an approximation improved once.
NVFP4_HOST_DEVICE float Reciprocal(float d) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  return fmaf(fmaf(-d, y, 1.0f), y, y);
#else
  return 1.0f / d;
#endif
}

NVFP4_HOST_DEVICE float DivideBy(float v, float d, float reciprocal) {
  const float q = v * reciprocal;
  return fmaf(fmaf(-q, d, v), reciprocal, q);
}

// A sum of float32 whose unit in the last place is that of a small format: `bits` holds the number
// in its lowest byte once the exponent is added, and bits as a float, less `offset`, is its value.
struct Rounded {
  float sum, offset;
};

// Bits of the larger of two magnitudes; on a CPU as integers, which compilers vectorize.
NVFP4_HOST_DEVICE uint32_t LargerBits(float a, float b) {
#if defined(__CUDA_ARCH__)
  return FloatBits(fmaxf(a, b));
#else
  return FloatBits(a) > FloatBits(b) ? FloatBits(a) : FloatBits(b);
#endif
}

// E2M1 of q in [0, 7): adding 2^22 * 2^e, with e the exponent of max(q, 1), rounds to multiples of
// 2^(e - 1), whose number, and 2 e, is the code. The 107 clears the rest of the lowest byte; it is
// an even number of units, so ties go where they should.
NVFP4_HOST_DEVICE Rounded RoundE2M1(float q) {
  const float power = BitsFloat(LargerBits(q, 1.0f) & 0x7f800000u);
  constexpr float kOffset = 0x1p22f + 107;
  return {power * kOffset + q, power * kOffset};  // the product is exact, fused or not
}

// Its code, in the lowest byte; the others hold garbage.
NVFP4_HOST_DEVICE uint32_t CodeE2M1(Rounded q) {
  const uint32_t bits = FloatBits(q.sum);
  return bits + (bits >> 22);
}

// The same for E4M3 of q in [0, 448]; exponents from -6, steps of 2^(e - 3).
NVFP4_HOST_DEVICE Rounded RoundE4M3(float q) {
  const float power = BitsFloat(LargerBits(q, 0x1p-6f) & 0x7f800000u);
  constexpr float kOffset = 0x1p20f + 19;
  return {power * kOffset + q, power * kOffset};  // the product is exact, fused or not
}

NVFP4_HOST_DEVICE uint32_t CodeE4M3(Rounded q) {
  const uint32_t bits = FloatBits(q.sum);
  return bits + (bits >> 20);
}

NVFP4_HOST_DEVICE float ValueOf(Rounded q) { return q.sum - q.offset; }

// 6 g, by which the largest magnitudes of blocks are divided.
struct BlockDivisor {
  float d, reciprocal, g;
  bool fast;
};

NVFP4_HOST_DEVICE BlockDivisor MakeBlockDivisor(float g) {
  const float d = kE2M1Max * g;
  return {d, Reciprocal(d), g, IsDivisor(d)};
}

struct BlockScale {
  uint8_t byte;
  float value;  // DecodeE4M3(byte)
};

// EncodeBlockScale(amax, g) and its value.
NVFP4_HOST_DEVICE BlockScale FindBlockScale(float amax, const BlockDivisor& divisor) {
  if (divisor.fast && amax <= BitsFloat(0x7f800000u)) {  // no NaN
    const float most = 512.0f * divisor.d;
    const float q = DivideBy(amax < most ? amax : most, divisor.d, divisor.reciprocal);
    const Rounded rounded = RoundE4M3(q < kE4M3Max ? q : kE4M3Max);
    return {static_cast<uint8_t>(CodeE4M3(rounded)), ValueOf(rounded)};
  }
  const uint8_t byte = EncodeBlockScale(amax, divisor.g);
  return {byte, DecodeE4M3(byte)};
}

// What a block that cannot be divided as it is takes before: its scale and values times a factor,
// exact where that matters, and values cut to 6 times the new scale.
struct BlockRescue {
  float factor;  // NaN where the block is to become zeros
  float most;
};

// Whether magnitudes up to `amax` can be divided by *s and rounded as they are: the quotients are
// below 7, so none saturates.
NVFP4_HOST_DEVICE bool DividesBlock(float amax, float s) {
  return IsDivisor(s) && amax <= 6.75f * s;
}

// For a block that DividesBlock turns down: replaces *s.
NVFP4_HOST_DEVICE BlockRescue RescueBlock(float* s) {
  float factor = 1.0f;
  if (!(*s > 0.0f)) {
    factor = BitsFloat(0x7fc00000u);
  } else if (*s < kDivisorMin) {
    factor = 0x1p96f;
  } else if (*s > 1 / kDivisorMin) {
    factor = *s == BitsFloat(0x7f800000u) ? 0.0f : 0x1p-96f;
  }
  *s = factor > 0.0f ? *s * factor : 1.0f;
  return {factor, kE2M1Max * *s};
}

// Replaces a magnitude; returns all ones, or 0 where it becomes 0 without a sign, as NaN does.
NVFP4_HOST_DEVICE uint32_t Rescue(const BlockRescue& rescue, float* magnitude) {
  const float value = *magnitude * rescue.factor;
  const float cut = value < rescue.most ? value : rescue.most;
  const uint32_t number = -static_cast<uint32_t>(value == value);
  *magnitude = BitsFloat(FloatBits(cut) & number);
  return number;
}

// Global scale that makes `amax` the largest representable value.
NVFP4_HOST_DEVICE float GlobalScale(float amax) { return Divide(amax, kValueMax); }

// Byte offset of scale (row, block) in the 128x4 swizzle: tiles of 128 rows by 4 blocks, and in a
// tile 32 groups of 4 rows (row, row + 32, ...) by 4 blocks. `blocks_padded` is a multiple of 4.
NVFP4_HOST_DEVICE int64_t Swizzle128x4(int64_t row, int64_t block, int64_t blocks_padded) {
  const int64_t tile = (row / 128) * (blocks_padded / 4) + block / 4;
  return tile * 512 + (row % 32) * 16 + ((row % 128) / 32) * 4 + block % 4;
}

}  // namespace nvfp4
