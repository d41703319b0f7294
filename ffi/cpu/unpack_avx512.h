// Unpacks codes and scales of the layout "cpu_16x16" in AVX-512 registers, and multiplies them by a
// few rows of x.
//
// gemm_avx512.cc and gemm_amx.cc include this file below their target pragma; see elementwise.h.
//
// A word shuffle looks up 32 words at once in a table of 32 entries. It uses no more than 5 bits of
// each index, and the table holds the 16 codes twice, so that the upper bits need no mask. A shift
// by 0, 4, 8 or 12 therefore suffices to turn nibble j of 32 words into 32 bfloat16. Word w is row
// w >> 1 and k = 8 z + 2 j + (w & 1). vdpbf16ps and AMX tiles read pairs in this order.
namespace nvfp4::cpu {
namespace {

// As `Vectors` of elementwise.h, whose Widen GCC 12 compiles to three times as many instructions.
struct DenseVectors {
  static constexpr int kWidth = 16, kRegisters = 32;
  using Floats = __m512;

  __attribute__((always_inline)) static inline __m512 Widen(const uint16_t* numbers) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
};

// Returns 256 * e2m1(code) in bfloat16, for each code twice. The factor 256 cancels the 2^-8 of
// ScaleVector.
inline __m512i CodeTable() {
  struct Table {
    Table() {
      for (int c = 0; c < 32; ++c)
        words[c] = static_cast<uint16_t>(FloatBits(256.0f * DecodeE2M1(c & 15)) >> 16);
    }
    alignas(64) uint16_t words[32];
  };
  static const Table table;
  return _mm512_load_si512(table.words);
}

// Returns 2^-8 * e4m3 of 16 bytes. The conversion goes through float16, because vcvtph2ps is exact
// for subnormals.
inline __m512 ScaleVector(const uint8_t* scales) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                        _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
  return _mm512_cvtph_ps(half);
}

// Returns the weights of k = 8 z + 2 j and 8 z + 2 j + 1, as pairs of bfloat16, where j is kNibble.
template <int kNibble>
inline __m512i Codes(__m512i vector, __m512i table) {
  const __m512i index = kNibble ? _mm512_srli_epi16(vector, 4 * kNibble) : vector;
  return _mm512_permutexvar_epi16(index, table);
}

inline __m512 EvenFloats(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

inline __m512 OddFloats(__m512i pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
}

// Prefetches the codes that lie ahead of block b. The hardware prefetches scales better by itself:
// when this function asked for both, it was measured to be a third slower.
inline void PrefetchBlock(const WeightPair& weights, int g, int64_t b) {
  const char* ahead = reinterpret_cast<const char*>(weights.codes_ahead(g, b));
  _mm_prefetch(ahead, _MM_HINT_T0);
  _mm_prefetch(ahead + kCacheLine, _MM_HINT_T0);
}

// sum[g][n] += the weights of nibble kNibble times x[n], as pairs of bfloat16.
template <int kNibble, int kCount>
inline void DotNibble(const __m512i v[2], __m512i table, const uint8_t* const* x, int64_t offset,
                      __m512 sum[2][kCount]) {
  const __m512i q[2] = {Codes<kNibble>(v[0], table), Codes<kNibble>(v[1], table)};
  for (int n = 0; n < kCount; ++n) {
    int32_t pair;
    std::memcpy(&pair, x[n] + offset + kNibble * 4, sizeof(pair));
    const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(pair);
    sum[0][n] = _mm512_dpbf16_ps(sum[0][n], (__m512bh)q[0], broadcast);
    sum[1][n] = _mm512_dpbf16_ps(sum[1][n], (__m512bh)q[1], broadcast);
  }
}

// Multiplies both groups by kCount vectors of bfloat16. The sum of a block uses unscaled weights,
// and is multiplied by the block scale afterwards. `out` holds kCount rows of 32.
template <int kCount>
void DotRows(const WeightPair& weights, const uint8_t* const* x, float* out) {
  const __m512i table = CodeTable();
  __m512 acc[2][kCount];
  for (int n = 0; n < kCount; ++n) acc[0][n] = acc[1][n] = _mm512_setzero_ps();
  for (int64_t b = 0; b < weights.k / kBlock; ++b) {
    __m512 sum[2][kCount];
    for (int n = 0; n < kCount; ++n) sum[0][n] = sum[1][n] = _mm512_setzero_ps();
    PrefetchBlock(weights, 0, b);
    PrefetchBlock(weights, 1, b);
    for (int z = 0; z < 2; ++z) {
      __m512i v[2];
      for (int g = 0; g < 2; ++g) v[g] = _mm512_loadu_si512(weights.codes[g] + b * 128 + z * 64);
      const int64_t offset = b * 2 * kBlock + z * 16;
      DotNibble<0, kCount>(v, table, x, offset, sum);
      DotNibble<1, kCount>(v, table, x, offset, sum);
      DotNibble<2, kCount>(v, table, x, offset, sum);
      DotNibble<3, kCount>(v, table, x, offset, sum);
    }
    for (int g = 0; g < 2; ++g) {
      const __m512 scale = ScaleVector(weights.scales[g] + b * kGroup);
      for (int n = 0; n < kCount; ++n) acc[g][n] = _mm512_fmadd_ps(sum[g][n], scale, acc[g][n]);
    }
  }
  for (int n = 0; n < kCount; ++n) {
    _mm512_storeu_ps(out + n * kPair, acc[0][n]);
    _mm512_storeu_ps(out + n * kPair + kGroup, acc[1][n]);
  }
}

constexpr int kMostDots = 6;  // most vectors of DotRows: rows times pieces

// Multiplies rows for which count * pieces <= kMostDots. Pieces are added, the smallest first.
void DotPieces(const WeightPair& weights, const Rows& rows, float* out) {
  using Fn = void (*)(const WeightPair&, const uint8_t* const*, float*);
  constexpr Fn kTable[kMostDots + 1] = {nullptr,    DotRows<1>, DotRows<2>, DotRows<3>,
                                        DotRows<4>, DotRows<5>, DotRows<6>};
  const int pieces = rows.format.pieces, count = static_cast<int>(rows.count);
  const uint8_t* x[kMostDots];
  float sums[kMostDots * kPair];
  for (int n = 0; n < count * pieces; ++n) {
    x[n] = rows.data + n / pieces * rows.stride +
           n % pieces * RoundUp(weights.k, kRowPadding) * sizeof(uint16_t);
  }
  kTable[count * pieces](weights, x, sums);
  for (int r = 0; r < count; ++r) {
    for (int c = 0; c < kPair; ++c) {
      float sum = 0.0f;
      for (int p = pieces - 1; p >= 0; --p) sum += sums[(r * pieces + p) * kPair + c];
      out[r * kPair + c] = sum;
    }
  }
}

}  // namespace
}  // namespace nvfp4::cpu
