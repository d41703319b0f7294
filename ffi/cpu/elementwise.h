// Everything except the matrix products: row formats, activations, the quantizer, and sums, as
// plain loops over 16 or more values.
//
// Each gemm_*.cc includes this file once, below its target pragma, so that the compiler vectorizes
// the same text for each instruction set. For that reason everything is in an unnamed namespace,
// and this file includes nothing. The loops have selects in place of branches; with branches,
// compilers would not vectorize them.
//
// Accuracy: Exp has an error of 1 ulp, and Erfc a relative error of 1.2e-7. Callers must clear FTZ
// and DAZ (phases.h).
namespace nvfp4::cpu {
namespace {

using Floats4 = float __attribute__((vector_size(4 * sizeof(float))));
using Floats8 = float __attribute__((vector_size(8 * sizeof(float))));

// Vectors of floats, of which a CPU has `registers`.
template <typename Vector, int registers>
struct Vectors {
  static constexpr int kWidth = sizeof(Vector) / sizeof(float), kRegisters = registers;
  using Floats = Vector;

  // Converts bfloat16 numbers.
  __attribute__((always_inline)) static inline Floats Widen(const uint16_t* numbers) {
    uint32_t bits[kWidth];
    for (int i = 0; i < kWidth; ++i) bits[i] = static_cast<uint32_t>(numbers[i]) << 16;
    Floats floats;
    std::memcpy(&floats, bits, sizeof(floats));
    return floats;
  }
};

constexpr int64_t kChunk = 256;  // values of a row that are processed at a time

inline float HalfToFloat(uint16_t half) {
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  // Multiplying by 2^112 moves the exponent bias from 15 to 127, and normalizes subnormals.
  const uint32_t finite = FloatBits(BitsFloat(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t bits = magnitude >= 0x0f800000u ? special : finite;
  return BitsFloat(bits | (half & 0x8000u) << 16);
}

inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  // Subnormal halves: one unit is 2^-24, which is the unit in the last place of a float32 near 0.5.
  const uint32_t subnormal = FloatBits(BitsFloat(magnitude) + 0.5f) - FloatBits(0.5f);
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

inline float BFloatToFloat(uint16_t value) { return BitsFloat(static_cast<uint32_t>(value) << 16); }

inline uint16_t FloatToBFloat(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16 | 0x40u) : rounded);
}

// e^x: Cody and Waite's reduction by ln 2, then a polynomial on [-ln 2 / 2, ln 2 / 2].
inline float Exp(float x) {
  const float clamped = x > 89.0f ? 89.0f : (x < -104.0f ? -104.0f : x);
  const float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r * r + r) + 1.0f;
  // 2^n is multiplied in as two factors, because n reaches from -150 to 128, which one float32
  // exponent cannot hold.
  const int32_t whole = static_cast<int32_t>(n != n ? 0.0f : n);
  const int32_t half = whole / 2;
  const float low = BitsFloat(static_cast<uint32_t>(half + 127) << 23);
  const float high = BitsFloat(static_cast<uint32_t>(whole - half + 127) << 23);
  return p * low * high;
}

inline float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

// erfc(x): the Chebyshev fit of W. H. Press et al., "Numerical Recipes", section 6.2.
inline float Erfc(float x) {
  const float z = x < 0.0f ? -x : x;
  const float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const float tail = t * Exp(p - z * z);
  return x < 0.0f ? 2.0f - tail : tail;
}

struct SiluFn {
  static float Apply(float g, float) { return g * Sigmoid(g); }
};
struct GeluFn {
  static float Apply(float g, float) { return 0.5f * g * Erfc(g * -0.707106781f); }
};
struct GeluTanhFn {
  // 0.5 (1 + tanh(y)) = sigmoid(2 y)
  static float Apply(float g, float) {
    return g * Sigmoid(1.595769122f * (g + 0.044715f * g * g * g));
  }
};
struct SwigluOaiFn {
  static float Apply(float g, float alpha) { return g * Sigmoid(alpha * g); }
};
struct Relu2Fn {
  static float Apply(float g, float) { return g <= 0.0f ? 0.0f : g * g; }
};

inline void RoundTo(DataType type, int64_t n, float* values) {
  if (type == DataType::kBF16) {
    for (int64_t c = 0; c < n; ++c) values[c] = BFloatToFloat(FloatToBFloat(values[c]));
  } else if (type == DataType::kF16) {
    for (int64_t c = 0; c < n; ++c) values[c] = HalfToFloat(FloatToHalf(values[c]));
  }
}

template <typename Function>
void ActivateRow(const ActivationParameters& p, const float* gate, const float* up, int64_t n,
                 float* out) {
  const float most = p.gate_limit, limit = p.up_limit, alpha = p.alpha, beta = p.beta;
  if (!p.gated) {
    for (int64_t c = 0; c < n; ++c) {
      const float g = gate[c] > most ? most : gate[c];
      out[c] = Function::Apply(g, alpha);
    }
    return;
  }
  const float offset = p.kind == Activation::kSwigluOai ? beta : 0.0f;
  for (int64_t c = 0; c < n; ++c) {
    const float g = gate[c] > most ? most : gate[c];
    const float clipped = up[c] > limit ? limit : up[c];
    const float u = clipped < -limit ? -limit : clipped;
    out[c] = Function::Apply(g, alpha) * (u + offset);
  }
}

template <typename Function>
void ActivateRows(const ActivationParameters& p, const Affine& affine, DataType type, int64_t rows,
                  float* acc) {
  const int64_t n = p.gated ? kGroup : kPair;
  for (int64_t r = 0; r < rows; ++r, acc += kPair) {
    float v[kPair], out[kPair];
    for (int64_t c = 0; c < kPair; ++c)
      v[c] = acc[c] * affine.row_scale[r] * affine.scale[c] + affine.bias[c];
    if (p.interleaved) {
      float split[kPair];
      for (int64_t c = 0; c < kGroup; ++c) {
        split[c] = v[2 * c];
        split[kGroup + c] = v[2 * c + 1];
      }
      for (int64_t c = 0; c < kPair; ++c) v[c] = split[c];
    }
    if (p.gated) {
      ActivateRow<Function>(p, v, v + kGroup, kGroup, out);
    } else {
      ActivateRow<Function>(p, v, v, kPair, out);
    }
    RoundTo(type, n, out);
    for (int64_t c = 0; c < n; ++c) acc[c] = out[c];
  }
}

void Activate(const ActivationParameters& p, const Affine& affine, DataType type, int64_t rows,
              float* acc) {
  using Fn = void (*)(const ActivationParameters&, const Affine&, DataType, int64_t, float*);
  // The entries are in the order of enum Activation.
  constexpr Fn kTable[] = {ActivateRows<SiluFn>, ActivateRows<GeluFn>, ActivateRows<GeluTanhFn>,
                           ActivateRows<SwigluOaiFn>, ActivateRows<Relu2Fn>};
  kTable[static_cast<int>(p.kind)](p, affine, type, rows, acc);
}

void ScaleAndBias(const Affine& affine, int64_t rows, float* acc) {
  for (int64_t r = 0; r < rows; ++r, acc += kPair) {
    for (int64_t c = 0; c < kPair; ++c)
      acc[c] = acc[c] * affine.row_scale[r] * affine.scale[c] + affine.bias[c];
  }
}

// Loads x[first : first + n] as float32.
inline void LoadValues(const void* x, DataType type, int64_t first, int64_t n, float* values) {
  if (type == DataType::kF32) {
    std::memcpy(values, static_cast<const float*>(x) + first, n * sizeof(float));
  } else {
    uint16_t bits[kChunk];
    std::memcpy(bits, static_cast<const uint16_t*>(x) + first, n * sizeof(uint16_t));
    if (type == DataType::kBF16) {
      for (int64_t c = 0; c < n; ++c) values[c] = BFloatToFloat(bits[c]);
    } else {
      for (int64_t c = 0; c < n; ++c) values[c] = HalfToFloat(bits[c]);
    }
  }
}

// Stores columns [first, first + n) of a row. Pieces are cut off and not rounded: rounding up could
// overflow, and each piece takes the next eight bits of x.
inline void StoreValues(const float* values, int64_t n, RowFormat format, int64_t k_pad,
                        int64_t first, uint8_t* row) {
  if (!format.bf16) {
    std::memcpy(row + first * 4, values, n * 4);
    return;
  }
  float rest[kChunk];
  uint16_t piece[kChunk];
  for (int64_t c = 0; c < n; ++c) rest[c] = values[c];
  for (int p = 0; p < format.pieces; ++p) {
    for (int64_t c = 0; c < n; ++c) {
      piece[c] = static_cast<uint16_t>(FloatBits(rest[c]) >> 16);
      rest[c] = rest[c] - BFloatToFloat(piece[c]);
    }
    std::memcpy(row + (p * k_pad + first) * 2, piece, n * 2);
  }
}

void StoreColumns(const float* values, int64_t rows, int64_t columns, RowFormat format,
                  int64_t k_pad, int64_t stride, int64_t column, uint8_t* prepared) {
  for (int64_t r = 0; r < rows; ++r, values += kPair, prepared += stride)
    StoreValues(values, columns, format, k_pad, column, prepared);
}

// Returns the largest magnitude. Integer comparison puts NaN above infinity, so that a NaN is not
// lost.
inline float MaxMagnitude(const float* values, int64_t n) {
  uint32_t largest = 0;
  for (int64_t c = 0; c < n; ++c) {
    const uint32_t magnitude = FloatBits(values[c]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return BitsFloat(largest);
}

// Returns the smaller of a magnitude and `most`. If the magnitude is NaN, returns `most`.
inline float AtMost(float magnitude, float most) {
  const uint32_t bits = FloatBits(magnitude), limit = FloatBits(most);
  return BitsFloat(bits < limit ? bits : limit);
}

// Returns all ones or all zeros. Loops that select by a mask vectorize for AVX2 too; those that
// select by ?: do not.
inline uint32_t Mask(bool set) { return -uint32_t{set}; }

// Finds the block scales of a chunk of `n` values: their bytes, as EncodeBlockScale gives them, and
// their values. Infinities, and magnitudes above 448, become 448. NaN becomes the byte 0x7f.
inline void FindBlockScales(const float* values, int64_t n, float g, uint8_t* bytes, float* s8) {
  constexpr int64_t kBlocks = kChunk / kBlock;
  float largest[kBlocks];
  uint32_t codes[kBlocks];
  const int64_t blocks = n / kBlock;
  for (int64_t b = 0; b < blocks; ++b) largest[b] = MaxMagnitude(values + b * kBlock, kBlock);
  for (int64_t b = blocks; b < kBlocks; ++b) largest[b] = 0.0f;
  const float d = kE2M1Max * g;
  for (int64_t b = 0; b < kBlocks; ++b) {
    const float quotient = largest[b] / d;
    const uint32_t ratio = FloatBits(quotient) & Mask(largest[b] != 0.0f);
    const float magnitude = BitsFloat(ratio & 0x7fffffffu);
    const Rounded rounded = RoundE4M3(AtMost(magnitude, kE4M3Max));
    const uint32_t sign = ratio & 0x80000000u;
    const uint32_t code = (CodeE4M3(rounded) & 0x7f) | sign >> 24;
    const uint32_t value = FloatBits(ValueOf(rounded)) | sign;
    const uint32_t nan = Mask(BitsFloat(ratio) != BitsFloat(ratio));
    codes[b] = (nan & kE4M3Nan) | (code & ~nan);
    s8[b] = BitsFloat((nan & ratio) | (value & ~nan));
  }
  for (int64_t b = 0; b < blocks; ++b) bytes[b] = static_cast<uint8_t>(codes[b]);
}

// Replaces 16 values by e2m1(value / (s8 * g)) * s8, which is exact in bfloat16. Infinities stay
// infinite, so that the outputs of the row show them.
inline void QuantizeBlock(float s8, float g, float* values) {
  const float s = s8 * g;
  const uint32_t kept = s == 0.0f ? 0 : 0xffffffffu;
  for (int c = 0; c < kBlock; ++c) {
    const uint32_t bits = FloatBits(values[c] / s) & kept;
    const uint32_t y = bits & 0x7fffffffu;
    const uint32_t rounded = FloatBits(ValueOf(RoundE2M1(AtMost(BitsFloat(y), kE2M1Max))));
    const bool finite = (FloatBits(values[c]) & 0x7fffffffu) < 0x7f800000u;
    const uint32_t take = Mask(finite) & Mask(y <= 0x7f800000u);
    const uint32_t code = (rounded & take) | (y & ~take);
    values[c] = BitsFloat(code | (bits & 0x80000000u)) * s8;
  }
}

inline void QuantizeChunk(float g, int64_t n, float* values) {
  uint8_t bytes[kChunk / kBlock];
  float s8[kChunk / kBlock];
  FindBlockScales(values, n, g, bytes, s8);
  for (int64_t b = 0; b < n / kBlock; ++b) QuantizeBlock(s8[b], g, values + b * kBlock);
}

inline void LoadRow(const RowSource& source, int64_t first, int64_t n, float* values) {
  LoadValues(source.x, source.type, first, n, values);
  if (source.weigh) {
    for (int64_t c = 0; c < n; ++c) values[c] *= source.weight;
    RoundTo(source.type, n, values);
  }
}

// Returns the global scale of a row: the given one, or amax(row) / 2688.
float RowGlobalScale(const RowSource& source) {
  if (source.quantize == ActivationScale::kNone) return 1.0f;
  if (source.quantize == ActivationScale::kStatic) return source.input_scale;
  float values[kChunk];
  float chunk_max[2] = {0.0f, 0.0f};
  for (int64_t first = 0; first < source.k; first += kChunk) {
    const int64_t n = std::min(kChunk, source.k - first);
    LoadRow(source, first, n, values);
    chunk_max[1] = MaxMagnitude(values, n);
    chunk_max[0] = MaxMagnitude(chunk_max, 2);
  }
  return GlobalScale(chunk_max[0]);
}

float PrepareRow(const RowSource& source, RowFormat format, uint8_t* row) {
  const int64_t k_pad = RoundUp(source.k, kRowPadding);
  const float g = RowGlobalScale(source);
  float values[kChunk];
  for (int64_t first = 0; first < source.k; first += kChunk) {
    const int64_t n = std::min(kChunk, source.k - first);
    LoadRow(source, first, n, values);
    if (source.quantize != ActivationScale::kNone && g == 0.0f) {
      for (int64_t c = 0; c < n; ++c)
        values[c] = 0.0f;  // a row of zeros has scale 0, and stays a row of zeros
    } else if (source.quantize != ActivationScale::kNone) {
      QuantizeChunk(g, n, values);
    }
    StoreValues(values, n, format, k_pad, first, row);
  }
  const int64_t bytes = format.bf16 ? 2 : 4;
  for (int p = 0; p < format.pieces; ++p)
    std::memset(row + (p * k_pad + source.k) * bytes, 0, (k_pad - source.k) * bytes);
  return g;
}

void Round(const float* values, int64_t n, DataType type, void* out) {
  if (type == DataType::kF32) {
    std::memcpy(out, values, n * sizeof(float));
    return;
  }
  uint16_t bits[kChunk];
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t count = std::min(kChunk, n - first);
    if (type == DataType::kBF16) {
      for (int64_t c = 0; c < count; ++c) bits[c] = FloatToBFloat(values[first + c]);
    } else {
      for (int64_t c = 0; c < count; ++c) bits[c] = FloatToHalf(values[first + c]);
    }
    std::memcpy(static_cast<uint16_t*>(out) + first, bits, count * sizeof(uint16_t));
  }
}

void Accumulate(const float* d, float weight, int64_t n, float* sum) {
  for (int64_t c = 0; c < n; ++c) sum[c] += weight * d[c];
}

// Finds the codes of 16 values under the scale s, one for each word. If s is 0 or NaN, the codes
// are 0.
inline void EncodeBlock(const float* values, float s, uint32_t* codes) {
  const float divisor = s == 0.0f ? BitsFloat(0x7fc00000u) : s;
  for (int c = 0; c < kBlock; ++c) {
    const uint32_t bits = FloatBits(values[c]);
    const float q = BitsFloat(bits & 0x7fffffffu) / divisor;
    const uint32_t code = CodeE2M1(RoundE2M1(AtMost(q, kE2M1Max))) & 7;
    codes[c] = (code | (bits >> 28 & 8)) & Mask(q == q);
  }
}

float LargestMagnitude(const void* x, DataType type, int64_t n) {
  float values[kChunk];
  float chunk_max[2] = {0.0f, 0.0f};
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t count = std::min(kChunk, n - first);
    LoadValues(x, type, first, count, values);
    chunk_max[1] = MaxMagnitude(values, count);
    chunk_max[0] = MaxMagnitude(chunk_max, 2);
  }
  return chunk_max[0];
}

void Quantize(const void* x, DataType type, int64_t k, float global_scale, uint8_t* packed,
              uint8_t* scales) {
  float values[kChunk], s8[kChunk / kBlock];
  uint64_t pairs[kChunk / 2];
  for (int64_t first = 0; first < k; first += kChunk) {
    const int64_t n = std::min(kChunk, k - first);
    LoadValues(x, type, first, n, values);
    FindBlockScales(values, n, global_scale, scales + first / kBlock, s8);
    for (int64_t b = 0; b < n / kBlock; ++b) {
      uint32_t codes[kBlock];
      EncodeBlock(values + b * kBlock, s8[b] * global_scale, codes);
      std::memcpy(pairs + b * kBlock / 2, codes, sizeof(codes));
    }
    uint8_t* to = packed + first / 2;
    for (int64_t i = 0; i < n / 2; ++i) to[i] = static_cast<uint8_t>(pairs[i] | pairs[i] >> 28);
  }
}

// Replaces a head by weight * values / sqrt(mean(values^2) + eps), with the roundings of
// `normalize` in numerics/norms.py.
inline void NormalizeHead(const HeadSource& head, float* values) {
  constexpr int kLanes = 16;
  float weight[kChunk], lanes[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= head.d; c += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] += values[c + i] * values[c + i];
  }
  for (int i = 0; c < head.d; ++c, ++i) lanes[i] += values[c] * values[c];
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(head.d) + head.eps);
  LoadValues(head.weight, head.weight_type, 0, head.d, weight);
  for (c = 0; c < head.d; ++c) values[c] *= factor;
  RoundTo(head.weight_type, head.d, values);
  for (c = 0; c < head.d; ++c) values[c] *= weight[c];
  RoundTo(head.weight_type, head.d, values);
}

// Rotates the pairs of channels i and i + half.
inline void RotateHead(const HeadSource& head, float* values) {
  float* const second = values + head.half;
  for (int64_t i = 0; i < head.half; ++i) {
    const float a = values[i], b = second[i];
    values[i] = a * head.cosine[i] - b * head.sine[i];
    second[i] = b * head.cosine[i] + a * head.sine[i];
  }
}

void PrepareHead(const HeadSource& head, void* out) {
  static_assert(kMaxPreparedWidth <= kChunk, "LoadValues loads a head at once");
  float values[kChunk];
  LoadValues(head.x, head.type, 0, head.d, values);
  if (head.rotates_first) {
    RotateHead(head, values);
    RoundTo(head.type, head.d, values);
  }
  if (head.weight != nullptr) {
    NormalizeHead(head, values);
    RoundTo(head.type, head.d, values);
  }
  if (!head.rotates_first) RotateHead(head, values);
  if (head.rounding == nullptr) return Round(values, head.d, head.type, out);
  RoundTo(head.type, head.d, values);
  const E4M3Rounding rounding = *head.rounding;
  auto* bytes = static_cast<uint8_t*>(out);
  for (int64_t c = 0; c < head.d; ++c) bytes[c] = EncodeE4M3(values[c], rounding);
}

}  // namespace
}  // namespace nvfp4::cpu
