// Counts how often the quantizer's short arithmetic (nvfp4.h) differs from IEEE division and
// comparisons.
//
//   exact_quantizer COUNT    prints one line per check: name, how many were tried, how many differ
//
// The first check divides by every significand, at every threshold of E2M1 and E4M3 and the four
// floats on either side. Exponents only shift the result. The other checks try all finite bfloat16
// values, and COUNT random numbers over all of float32. `control` leaves the correction out.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "nvfp4.h"

namespace {

using namespace nvfp4;

struct Count {
  long tried = 0, differ = 0;
  void Add(bool same) {
    ++tried;
    differ += !same;
  }
  void Print(const char* name) const { std::printf("%s %ld %ld\n", name, tried, differ); }
};

class Random {
 public:
  uint32_t Bits() {  // Marsaglia's xorshift
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float Positive(int lowest, int highest) {
    const int exponent = lowest + static_cast<int>(Bits() % (highest - lowest + 1));
    return std::ldexp(BitsFloat(0x3f800000u | Bits() >> 9), exponent);
  }

 private:
  uint64_t state_ = 88172645463325252u;
};

// Returns the code of v in a block with the largest magnitude `amax`, as EncodeBlock finds it.
uint32_t ShortCode(float v, float amax, float s) {
  float magnitude = std::fabs(v);
  uint32_t number = 0xffffffffu;
  if (!DividesBlock(amax, s)) {
    const BlockRescue rescue = RescueBlock(&s);
    number = Rescue(rescue, &magnitude);
  }
  const float q = DivideBy(magnitude, s, Reciprocal(s));
  const uint32_t code = CodeE2M1(RoundE2M1(q)) & 0xff;
  return code | (FloatBits(v) >> 28 & 8 & number);
}

bool SameCode(float v, float s, float amax) { return ShortCode(v, amax, s) == EncodeValue(v, s); }

bool SameScale(float amax, float g) {
  const BlockScale scale = FindBlockScale(amax, MakeBlockDivisor(g));
  const uint8_t byte = EncodeBlockScale(amax, g);
  const float value = DecodeE4M3(byte);
  return scale.byte == byte && (scale.value == value || std::isnan(value));
}

void CheckThresholds() {
  Count corrected, control;
  for (uint32_t significand = 0; significand < 1u << 23; ++significand) {
    const float d = BitsFloat(0x3f800000u | significand), reciprocal = Reciprocal(d);
    for (int step = 0; step < 16; ++step) {
      const uint32_t bits = FloatBits((1 + step / 16.0f) * d);
      for (int aside = -4; aside <= 4; ++aside) {
        const float v = BitsFloat(bits + aside), quotient = v / d;
        corrected.tried += 1;
        corrected.differ += DivideBy(v, d, reciprocal) != quotient;
        control.differ += v * reciprocal != quotient;
      }
    }
  }
  control.tried = corrected.tried;
  corrected.Print("thresholds");
  control.Print("control");
}

void CheckEveryBFloat16(Random& random) {
  Count codes, scales;
  for (int trial = 0; trial < 64; ++trial) {
    const float s = trial == 0 ? 1.0f : random.Positive(-149, 127);
    for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
      const float v = BitsFloat(bits << 16);
      if (!std::isfinite(v)) continue;
      codes.Add(SameCode(v, s, std::fabs(v)));
      scales.Add(SameScale(std::fabs(v), s));
    }
  }
  codes.Print("bfloat16_codes");
  scales.Print("bfloat16_scales");
}

void CheckRandom(Random& random, long count) {
  const float kThresholds[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 6.0f, 7.0f};
  const float kScales[] = {0.0f, INFINITY, NAN, 0x1p-149f, kDivisorMin, 1 / kDivisorMin};
  Count codes, scales;
  for (long i = 0; i < count; ++i) {
    float s = i % 4 == 0 ? random.Positive(-149, 127) : random.Positive(-40, 20);
    if (i % 64 == 0) s = kScales[random.Bits() % 6];
    float v = random.Positive(-20, 20) * s;
    if (i % 2 == 0) {  // next to a threshold
      const float at = kThresholds[random.Bits() % 9] * s;
      v = BitsFloat((FloatBits(at) & 0x7fffffffu) + random.Bits() % 9 -
                    (FloatBits(at) > 4 ? 4 : 0));
    } else if (i % 8 == 1) {
      v = BitsFloat(random.Bits() & 0x7fffffffu);
    }
    if (std::isnan(v)) v = INFINITY;
    const float amax = v * (random.Bits() % 4 == 0 ? random.Positive(0, 3) : 1.0f);  // at least v
    codes.Add(SameCode(random.Bits() % 2 ? v : -v, s, amax));
    // Every other scale is at a threshold of E4M3 times 6 g. Thresholds of E2M1 are among them.
    const float eighth = 1 + random.Bits() % 16 / 16.0f;
    const float largest = i % 2 ? v : std::ldexp(eighth, random.Bits() % 20 - 11) * (6 * s);
    scales.Add(SameScale(std::isnan(largest) ? INFINITY : largest, s));
  }
  codes.Print("random_codes");
  scales.Print("random_scales");
}

}  // namespace

int main(int, char** arguments) {
  Random random;
  CheckThresholds();
  CheckEveryBFloat16(random);
  CheckRandom(random, std::atol(arguments[1]));
}
