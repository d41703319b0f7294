// NVFP4 numbers, one at a time: E2M1 codes, E4M3 block scales, and the exact quantizer.
//
//   value = e2m1(code) * e4m3(block_scale) * global_scale      one block_scale for 16 values
//   block_scale = e4m3(min(amax16 / (6 * g), 448)),  code = e2m1(x / (f32(block_scale) * g))
//
// These functions run on the host and on devices. They round to nearest, ties to even, and divide
// as IEEE division does. They need no subnormal float32 results, except to quantize subnormal
// activations.
//
// A product e2m1 * e4m3 is exact in bfloat16 and float16: it has at most 6 significant bits and
// lies in {0} U [2^-10, 2688].
//
// Reference: jax_nvfp4_moe/numerics/nvfp4.py.
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

// Correctly rounded a / b. On a device, the flags of the compiler could make `a / b` an
// approximation.
NVFP4_HOST_DEVICE float Divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// Returns the value of the low 4 bits of `code`: sign, 2 exponent bits, 1 mantissa bit.
NVFP4_HOST_DEVICE float DecodeE2M1(uint32_t code) {
  const uint32_t magnitude = code & 7;
  // 0.5 is the only subnormal. The other values are the float32 with the same exponent and
  // mantissa.
  const float absolute = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                                       : BitsFloat((magnitude + (126u << 1)) << 22);
  return (code & 8) ? -absolute : absolute;
}

// Returns the value of an E4M3 byte. 0x7f and 0xff are NaN; E4M3 has no infinity.
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

// Returns the nearest E4M3 byte. Magnitudes above 448 saturate, and NaN gives 0x7f.
NVFP4_HOST_DEVICE uint8_t EncodeE4M3(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return kE4M3Nan;
  if (magnitude >= FloatBits(kE4M3Max)) return static_cast<uint8_t>(sign | 0x7e);
  if (magnitude < FloatBits(0x1p-6f)) {
    // Subnormal: one unit is 2^-9, which is the unit in the last place of a float32 near 2^14.
    const float shifted = BitsFloat(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (FloatBits(shifted) - FloatBits(0x1p14f)));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

// Returns the nearest E2M1 code. Magnitudes above 6 saturate, -0 gives 8, and NaN gives 0.
NVFP4_HOST_DEVICE uint32_t EncodeE2M1(float value) {
  const uint32_t bits = FloatBits(value);
  const float absolute = BitsFloat(bits & 0x7fffffffu);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  const uint32_t magnitude = (absolute > 0.25f) + (absolute >= 0.75f) + (absolute > 1.25f) +
                             (absolute >= 1.75f) + (absolute > 2.5f) + (absolute >= 3.5f) +
                             (absolute > 5.0f);
  return ((bits >> 28) & 8) | magnitude;
}

// Returns the block scale of 16 values whose largest magnitude is `amax`, under the global scale
// `g`. For a block that holds NaN, `amax` must be NaN; the result is then the NaN byte.
NVFP4_HOST_DEVICE uint8_t EncodeBlockScale(float amax, float g) {
  // A row of zeros has 0 as its own global scale. Its block scales are 0; 0 / 0 would make them
  // NaN.
  const float ratio = amax == 0.0f ? 0.0f : Divide(amax, kE2M1Max * g);
  return EncodeE4M3(ratio > kE4M3Max ? kE4M3Max : ratio);
}

// Returns the code of x, where `s` = DecodeE4M3(byte) * g is the scale of its block. If s is 0 or
// NaN, the code is 0.
NVFP4_HOST_DEVICE uint32_t EncodeValue(float x, float s) {
  return s == 0.0f ? 0u : EncodeE2M1(Divide(x, s));
}

// DivideBy divides many values by one divisor, without a division instruction for each.
//
// It multiplies v by the reciprocal of d, which gives an approximation q. A fused multiply-add
// finds the remainder v - q * d exactly, and a second one corrects q by it (P. Markstein, IBM J.
// Res. Dev. 34, 1990). Next to each threshold of E2M1 and E4M3, the result is the correctly rounded
// v / d. Elsewhere, it lies on the same side of all thresholds as v / d. The codes are therefore
// those of IEEE division. tests/backends/test_quantizer.py checks this for every significand of d.
//
// It holds for d in [kDivisorMin, 1 / kDivisorMin] and for quotients up to 2^20. Nothing overflows
// there, and a quotient of 2^-12 or more has no subnormal remainder. Smaller quotients are below
// all thresholds.
constexpr float kDivisorMin = 0x1p-90f;

NVFP4_HOST_DEVICE bool IsDivisor(float d) { return d >= kDivisorMin && d <= 1 / kDivisorMin; }

// Returns the correctly rounded 1 / d of a d for which IsDivisor is true. A device uses an
// approximation and one correction, which are the steps of its own division.
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

// A number that is rounded to a small format by an addition in float32. `sum` is the number plus
// `offset`. The offset is so large that the unit in the last place of `sum` is a step of the small
// format. ValueOf subtracts `offset` again. CodeE2M1 and CodeE4M3 read the code from the bits of
// `sum`.
struct Rounded {
  float sum, offset;
};

// Returns the bits of the larger of two magnitudes. On a CPU it compares integers, because
// compilers vectorize that.
NVFP4_HOST_DEVICE uint32_t LargerBits(float a, float b) {
#if defined(__CUDA_ARCH__)
  return FloatBits(fmaxf(a, b));
#else
  return FloatBits(a) > FloatBits(b) ? FloatBits(a) : FloatBits(b);
#endif
}

// Rounds q in [0, 7) to E2M1. Let e be the exponent of max(q, 1). Adding 2^22 * 2^e rounds q to a
// multiple of 2^(e - 1). The code is the index of that multiple plus 2 e, which CodeE2M1 takes from
// the exponent of the sum. The offset of 107 makes the lowest byte hold the code and nothing else.
// It is an even number of steps, so that ties still go to even.
NVFP4_HOST_DEVICE Rounded RoundE2M1(float q) {
  const float power = BitsFloat(LargerBits(q, 1.0f) & 0x7f800000u);
  constexpr float kOffset = 0x1p22f + 107;
  return {power * kOffset + q, power * kOffset};  // the product is exact, fused or not
}

// Returns the code of a number from RoundE2M1 in the lowest byte. The other bytes hold garbage.
NVFP4_HOST_DEVICE uint32_t CodeE2M1(Rounded q) {
  const uint32_t bits = FloatBits(q.sum);
  return bits + (bits >> 22);
}

// Rounds q in [0, 448] to E4M3 in the same way. The exponent e is at least -6, and a step is 2^e /
// 8.
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

// How numbers are rounded to E4M3 under a scale, as round_fp8 of numerics/fp8.py does: x is
// multiplied by 448 / (448 * scale), or divided by the scale. `factor` is that quotient, or scale *
// rescue, which DivideBy can take. Scales are positive.
struct E4M3Rounding {
  float factor, reciprocal, rescue;
  bool multiplies;
};

// Returns what MakeE4M3Rounding needs: this is the only division.
NVFP4_HOST_DEVICE float E4M3Factor(float scale, bool multiplies) {
  return multiplies ? Divide(kE4M3Max, scale * kE4M3Max) : scale;
}

NVFP4_HOST_DEVICE E4M3Rounding MakeE4M3Rounding(float factor, bool multiplies) {
  if (multiplies) return {factor, 0.0f, 1.0f, true};
  const float rescue = factor < kDivisorMin ? 0x1p96f : factor > 1 / kDivisorMin ? 0x1p-96f : 1.0f;
  const float divisor = factor * rescue;
  return {divisor, Reciprocal(divisor), rescue, false};
}

// Infinities give NaN: the largest finite byte would hide an error.
NVFP4_HOST_DEVICE uint8_t EncodeE4M3(float x, const E4M3Rounding& rounding) {
  const uint32_t bits = FloatBits(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return kE4M3Nan;
  const float magnitude = BitsFloat(bits & 0x7fffffffu);
  float q = magnitude * rounding.factor;
  if (!rounding.multiplies) {
    const float v = magnitude * rounding.rescue, most = 512.0f * rounding.factor;
    q = DivideBy(v < most ? v : most, rounding.factor, rounding.reciprocal);
  }
  const uint32_t code = CodeE4M3(RoundE4M3(q < kE4M3Max ? q : kE4M3Max));
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (code & 0x7fu));
}

// The divisor of EncodeBlockScale, d = 6 g, with its reciprocal. `fast` says whether DivideBy may
// divide by it.
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

// Returns EncodeBlockScale(amax, g) and the value of that byte.
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

// How to prepare a block that DivideBy and RoundE2M1 cannot take as it is. The scale and the values
// of the block are multiplied by `factor`, which is exact wherever a code depends on it. The values
// are then cut to `most`, which is 6 times the new scale.
struct BlockRescue {
  float factor;  // NaN makes all codes of the block zero
  float most;
};

// Whether DivideBy and RoundE2M1 can take magnitudes up to `amax` under the scale `s` as they are.
// The quotients are then below 7, as RoundE2M1 needs.
NVFP4_HOST_DEVICE bool DividesBlock(float amax, float s) {
  return IsDivisor(s) && amax <= 6.75f * s;
}

// For a block for which DividesBlock is false: replaces *s by the new scale, and returns what to do
// to the values.
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

// Replaces a magnitude by its prepared value. Returns a mask for its sign: all ones, or 0 where the
// magnitude is NaN or the factor makes it NaN. Such a magnitude becomes 0, without a sign.
NVFP4_HOST_DEVICE uint32_t Rescue(const BlockRescue& rescue, float* magnitude) {
  const float value = *magnitude * rescue.factor;
  const float cut = value < rescue.most ? value : rescue.most;
  const uint32_t number = -static_cast<uint32_t>(value == value);
  *magnitude = BitsFloat(FloatBits(cut) & number);
  return number;
}

// Returns the global scale for which `amax` is the largest value that NVFP4 can represent.
NVFP4_HOST_DEVICE float GlobalScale(float amax) { return Divide(amax, kValueMax); }

// Returns the byte offset of the scale of (row, block) in the 128x4 order. A tile covers 128 rows
// by 4 blocks and takes 512 bytes. Inside a tile, 32 groups follow each other. A group has the 4
// rows r, r + 32, r + 64 and r + 96, with 4 blocks each. `blocks_padded` is a multiple of 4.
NVFP4_HOST_DEVICE int64_t Swizzle128x4(int64_t row, int64_t block, int64_t blocks_padded) {
  const int64_t tile = (row / 128) * (blocks_padded / 4) + block / 4;
  return tile * 512 + (row % 32) * 16 + ((row % 128) / 32) * 4 + block % 4;
}

}  // namespace nvfp4
