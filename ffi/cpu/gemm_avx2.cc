// Computes out[r, c] = sum_k W[c, k] x[r, k] for 32 outputs with AVX2, FMA and F16C.
//
//   weights  two groups of 16 rows in layout "cpu_16x16"    rows  float32 [count, k_pad]
//   out      float32 [count, 32]
//
// Bottleneck: reading weights for one row of x, fused multiply-add (16 weights a cycle) for many
// rows.
//
// Unpacking: two byte shuffles turn 32 codes into the high and the low bytes of their bfloat16, and
// an interleave joins these to words. A 32-bit lane then holds two words of one weight row. A shift
// to the left makes a float32 of one word, and a mask makes one of the other. The lanes of a vector
// are (row, parity of k). The pair x[k], x[k + 1] is broadcast to them, and neighboring lanes are
// added after the last k.
//
//   one row    unpacks in registers; the sum of a block of 16 k is multiplied by its scales
//   more rows  unpacks and scales 128 k to a panel of 16 KiB, which is used for every row
//
// A panel has 4 slices of 8 outputs. A slice has two vectors for every pair of k: rows 0 1 4 5 and
// rows 2 3 6 7 of the slice, each with both k. Their horizontal sum has rows 0 to 7 in order.
//
// The table of kernels is in kernels.h. Test: tests/backends/test_cpu_kernel.py, isa="avx2".
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../nvfp4.h"
#include "kernels.h"

#pragma GCC target("avx2,fma,f16c")

#include "elementwise.h"

namespace nvfp4::cpu {
using DenseVectors = Vectors<Floats8, 16>;
}  // namespace nvfp4::cpu

#include "few_rows.h"  // after elementwise.h, which it needs
#include "transposed_tiles.h"

namespace nvfp4::cpu {
namespace {

constexpr int64_t kPanel = 128;         // k of a panel: 16 KiB
constexpr int64_t kSlice = kPanel * 8;  // floats of a panel for 8 outputs
constexpr int kRows = 6;                // 6 rows x 2 vectors of sums fill the registers

// Holds 256 * e2m1(code) in bfloat16, as two tables of bytes. The factor 256 cancels the 2^-8 of
// ScaleVector.
struct CodeTables {
  __m256i high, low;
  CodeTables() {
    alignas(32) uint8_t h[32], l[32];
    for (int c = 0; c < 32; ++c) {
      const uint32_t bits = FloatBits(256.0f * DecodeE2M1(c & 15));
      h[c] = static_cast<uint8_t>(bits >> 24);
      l[c] = static_cast<uint8_t>(bits >> 16);
    }
    high = _mm256_load_si256(reinterpret_cast<const __m256i*>(h));
    low = _mm256_load_si256(reinterpret_cast<const __m256i*>(l));
  }
};

// Returns 2^-8 * e4m3 of 8 bytes. The conversion goes through float16, because vcvtph2ps is exact
// for subnormals.
inline __m256 ScaleVector(const uint8_t* scales) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7),
                                     _mm_set1_epi16(static_cast<int16_t>(0xBF80)));
  return _mm256_cvtph_ps(half);
}

// Unpacks 8 weight rows by 8 k. w[j][s] has k = 2 j and 2 j + 1 of rows 0 1 4 5 (s = 0) or rows 2 3
// 6 7 (s = 1).
inline void UnpackQuarter(const uint8_t* codes, const CodeTables& tables, __m256 w[4][2]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000));
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  for (int odd = 0; odd < 2; ++odd) {
    const __m256i c = _mm256_and_si256(odd ? _mm256_srli_epi16(v, 4) : v, nibble);
    const __m256i high = _mm256_shuffle_epi8(tables.high, c);
    const __m256i low = _mm256_shuffle_epi8(tables.low, c);
    const __m256i words[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    for (int s = 0; s < 2; ++s) {
      w[odd][s] = _mm256_castsi256_ps(_mm256_slli_epi32(words[s], 16));
      w[odd + 2][s] = _mm256_castsi256_ps(_mm256_and_si256(words[s], mask));
    }
  }
}

// Prefetches the codes that lie ahead of block b. The hardware prefetches scales better by itself:
// when this function asked for both, it was measured to be a third slower.
inline void PrefetchBlock(const WeightPair& weights, int g, int64_t b) {
  const char* ahead = reinterpret_cast<const char*>(weights.codes_ahead(g, b));
  _mm_prefetch(ahead, _MM_HINT_T0);
  _mm_prefetch(ahead + kCacheLine, _MM_HINT_T0);
}

// Returns x[k] and x[k + 1] in every pair of lanes.
inline __m256 BroadcastPair(const float* x) {
  double pair;
  std::memcpy(&pair, x, sizeof(pair));
  return _mm256_castpd_ps(_mm256_set1_pd(pair));
}

void MultiplyOneRow(const WeightPair& weights, const float* x, float* out) {
  const CodeTables tables;
  const int64_t blocks = weights.k / kBlock;
  for (int g = 0; g < 2; ++g) {
    __m256 acc[2][2];
    for (auto& half : acc) half[0] = half[1] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* codes = weights.codes[g] + b * 128;
      PrefetchBlock(weights, g, b);
      for (int half = 0; half < 2; ++half) {
        __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int z = 0; z < 2; ++z) {
          __m256 w[4][2];
          UnpackQuarter(codes + z * 64 + half * 32, tables, w);
          for (int j = 0; j < 4; ++j) {
            const __m256 pair = BroadcastPair(x + b * kBlock + z * 8 + j * 2);
            sum[0] = _mm256_fmadd_ps(w[j][0], pair, sum[0]);
            sum[1] = _mm256_fmadd_ps(w[j][1], pair, sum[1]);
          }
        }
        const __m256 scale = ScaleVector(weights.scales[g] + b * kGroup + half * 8);
        acc[half][0] = _mm256_fmadd_ps(sum[0], _mm256_unpacklo_ps(scale, scale), acc[half][0]);
        acc[half][1] = _mm256_fmadd_ps(sum[1], _mm256_unpackhi_ps(scale, scale), acc[half][1]);
      }
    }
    for (int half = 0; half < 2; ++half)
      _mm256_storeu_ps(out + g * kGroup + half * 8, _mm256_hadd_ps(acc[half][0], acc[half][1]));
  }
}

void UnpackPanel(const WeightPair& weights, int64_t first, int64_t count, float* panel) {
  const CodeTables tables;
  for (int slice = 0; slice < 4; ++slice) {
    const int g = slice / 2, half = slice % 2;
    for (int64_t k = 0; k < count; k += kBlock) {
      const int64_t block = (first + k) / kBlock;
      const __m256 scale = ScaleVector(weights.scales[g] + block * kGroup + half * 8);
      const __m256 scales[2] = {_mm256_unpacklo_ps(scale, scale), _mm256_unpackhi_ps(scale, scale)};
      if (half == 0) PrefetchBlock(weights, g, block);
      for (int z = 0; z < 2; ++z) {
        __m256 w[4][2];
        UnpackQuarter(weights.codes[g] + block * 128 + z * 64 + half * 32, tables, w);
        float* to = panel + slice * kSlice + (k + z * 8) * 8;
        for (int j = 0; j < 4; ++j) {
          _mm256_store_ps(to + j * 16, _mm256_mul_ps(w[j][0], scales[0]));
          _mm256_store_ps(to + j * 16 + 8, _mm256_mul_ps(w[j][1], scales[1]));
        }
      }
    }
  }
}

// out[r, slice] += a slice of the panel times kCount rows of x.
template <int kCount>
void MultiplySlice(const float* slice, int64_t count, const uint8_t* x, int64_t stride,
                   float* out) {
  __m256 acc[kCount][2];
  for (auto& sums : acc) sums[0] = sums[1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < count; k += 2, slice += 16, x += 2 * sizeof(float)) {
    const __m256 w0 = _mm256_load_ps(slice), w1 = _mm256_load_ps(slice + 8);
    for (int r = 0; r < kCount; ++r) {
      const __m256 pair = BroadcastPair(reinterpret_cast<const float*>(x + r * stride));
      acc[r][0] = _mm256_fmadd_ps(w0, pair, acc[r][0]);
      acc[r][1] = _mm256_fmadd_ps(w1, pair, acc[r][1]);
    }
  }
  for (int r = 0; r < kCount; ++r) {
    float* to = out + r * kPair;
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_hadd_ps(acc[r][0], acc[r][1])));
  }
}

using SliceFn = void (*)(const float*, int64_t, const uint8_t*, int64_t, float*);
constexpr SliceFn kMultiplySlice[kRows + 1] = {nullptr,          MultiplySlice<1>, MultiplySlice<2>,
                                               MultiplySlice<3>, MultiplySlice<4>, MultiplySlice<5>,
                                               MultiplySlice<6>};

void Multiply(const WeightPair& weights, const Rows& rows, float* out) {
  if (rows.count == 1) {
    MultiplyOneRow(weights, reinterpret_cast<const float*>(rows.data), out);
    return;
  }
  std::fill(out, out + rows.count * kPair, 0.0f);
  alignas(kCacheLine) float panel[kPanel * kPair];
  for (int64_t first = 0; first < weights.k; first += kPanel) {
    const int64_t count = std::min(kPanel, weights.k - first);
    UnpackPanel(weights, first, count, panel);
    for (int64_t r = 0; r < rows.count; r += kRows) {
      const int64_t here = std::min<int64_t>(kRows, rows.count - r);
      for (int slice = 0; slice < 4; ++slice) {
        kMultiplySlice[here](panel + slice * kSlice, count,
                             rows.data + r * rows.stride + first * sizeof(float), rows.stride,
                             out + r * kPair + slice * 8);
      }
    }
  }
}

RowFormat Float32Rows(DataType, ActivationScale, int64_t) { return {false, 1}; }

// Adds lanes, which are (row n, parity of the column) where `sums` are of pairs of columns, and
// rows n where they are of columns.
inline __m128 AddHalves(__m256 sums) {
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// A panel of float32, for products with transposed weights.
struct Float32Columns {
  using Vector = __m256;
  static constexpr int64_t kValueBytes = sizeof(float);
  static constexpr int kRows = 2;

  static int64_t CountVectors(int64_t groups) { return 2 * groups; }
  static __m256 MultiplyAdd(__m256 w, __m256 x, __m256 sum) { return _mm256_fmadd_ps(w, x, sum); }
  static void AddSums(const __m256 sums[kTileColumns], float* out) {
    const __m256 pairs =
        _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), AddHalves(pairs)));
  }

  static void Unpack(const WeightColumns& weights, int64_t block, int64_t first, int64_t groups,
                     uint8_t* panel) {
    const CodeTables tables;
    const int64_t vectors = CountVectors(groups);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t group = first + v / 2, half = v % 2;
      if (half == 0) PrefetchColumns(weights, block, group);
      const __m256 scale = ScaleVector(weights.Scales(group, block) + half * 8);
      for (int z = 0; z < 2; ++z) {
        __m256 w[4][2];
        UnpackQuarter(weights.Codes(group, block) + z * 64 + half * 32, tables, w);
        for (int j = 0; j < 4; ++j) {
          uint8_t* const even = PanelVector<Float32Columns>(panel, vectors, v, z * 8 + 2 * j);
          uint8_t* const odd = PanelVector<Float32Columns>(panel, vectors, v, z * 8 + 2 * j + 1);
          _mm256_store_ps(reinterpret_cast<float*>(even),
                          _mm256_mul_ps(_mm256_shuffle_ps(w[j][0], w[j][1], 0x88), scale));
          _mm256_store_ps(reinterpret_cast<float*>(odd),
                          _mm256_mul_ps(_mm256_shuffle_ps(w[j][0], w[j][1], 0xDD), scale));
        }
      }
    }
  }
};

// Multiplies one row in registers. A vector of sums has two columns, of four rows n each.
void MultiplyOneTransposed(const WeightColumns& weights, int64_t block, const float* x,
                           float* out) {
  const CodeTables tables;
  __m256 sums[2][4];
  for (auto& of_vector : sums)
    for (auto& sum : of_vector) sum = _mm256_setzero_ps();
  for (int64_t g = 0; g < weights.groups; ++g) {
    PrefetchColumns(weights, block, g);
    for (int half = 0; half < 2; ++half) {
      const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + g * kGroup + half * 8),
                                          ScaleVector(weights.Scales(g, block) + half * 8));
      const __m256 low = _mm256_unpacklo_ps(scaled, scaled);
      const __m256 high = _mm256_unpackhi_ps(scaled, scaled);
#pragma GCC unroll 2
      for (int z = 0; z < 2; ++z) {
        __m256 w[4][2];
        UnpackQuarter(weights.Codes(g, block) + z * 64 + half * 32, tables, w);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          sums[z][j] = _mm256_fmadd_ps(w[j][0], low, sums[z][j]);
          sums[z][j] = _mm256_fmadd_ps(w[j][1], high, sums[z][j]);
        }
      }
    }
  }
  for (int z = 0; z < 2; ++z) {
    for (int j = 0; j < 4; ++j) {
      const __m128 rows = AddHalves(sums[z][j]);
      const __m128 pair = _mm_add_ps(rows, _mm_movehl_ps(rows, rows));
      _mm_storel_pi(reinterpret_cast<__m64*>(out + z * 8 + 2 * j), pair);
    }
  }
}

constexpr int64_t kFewTransposed = 2;  // rows up to which a panel costs more than it saves

void MultiplyTransposed(const WeightColumns& weights, int64_t block, const Rows& rows, float* out) {
  if (rows.count > kFewTransposed)
    return MultiplyColumns<Float32Columns>(weights, block, rows, out);
  for (int64_t r = 0; r < rows.count; ++r) {
    MultiplyOneTransposed(weights, block,
                          reinterpret_cast<const float*>(rows.data + r * rows.stride),
                          out + r * kBlock);
  }
}

RowFormat TransposedRows(DataType) { return {false, 1}; }

}  // namespace
}  // namespace nvfp4::cpu

#pragma GCC reset_options

namespace nvfp4::cpu {
namespace {

bool Supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

}  // namespace

const Kernels kAvx2Kernels = {"avx2",         Supported,          Float32Rows, Multiply,
                              TransposedRows, MultiplyTransposed, PrepareRow,  Activate,
                              ScaleAndBias,   StoreColumns,       Round,       Accumulate,
                              Quantize,       LargestMagnitude,   Dense,       PrepareHead};

}  // namespace nvfp4::cpu

#endif  // defined(__x86_64__)
