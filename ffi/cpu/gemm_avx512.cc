// Computes out[r, c] = sum_k W[c, k] x[r, k] for 32 outputs with AVX-512 and its BF16 instructions.
//
//   weights  two groups of 16 rows in layout "cpu_16x16"
//   rows     bfloat16 [count, k_pad] where that is exact and fast, otherwise float32 [count, k_pad]
//   out      float32 [count, 32]
//
// Bottleneck: reading weights for few rows, multiply-add for many. vdpbf16ps multiplies 32 pairs of
// values, a float32 multiply-add 16. AMD's Zen 5 issues as many of the one as of the other in a
// cycle, so that bfloat16 rows are twice as fast. On Intel's Xeon, vdpbf16ps was measured to
// compute half as many products a cycle. It needs no conversion of the weights to float32, however,
// and is therefore faster there as long as unpacking is the larger part of the work.
//
//   few rows, bfloat16  DotRows (unpack_avx512.h)
//   one row, float32    unpacks in registers; multiplies the sum of each 16 k by its scales
//   otherwise           unpacks and scales some k to a panel [k, 32] of 16 KiB, and uses it for
//                       every row; the sums of 12 rows, 2 vectors each, fill the registers
//
// A panel holds the type of the rows. bfloat16 holds a scaled weight exactly: the significand of a
// code has 2 bits and that of a scale has 4, so that their product has at most 6 of 8 bits.
//
// The table of kernels is in kernels.h. Test: tests/backends/test_cpu_kernel.py, isa="avx512".
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../nvfp4.h"
#include "kernels.h"

// GCC 12 warns inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")

#include "elementwise.h"
#include "panel_avx512.h"
#include "unpack_avx512.h"

#include "few_rows.h"  // after both, which it needs
#include "transposed_tiles.h"

#include "transposed_avx512.h"  // after transposed_tiles.h and unpack_avx512.h, which it needs

namespace nvfp4::cpu {
namespace {

constexpr int64_t kPanelBytes = 16 << 10;
// bfloat16 rows up to which DotRows is faster than a panel.
constexpr int64_t kFewRows = 2 * kMostDots;
// Mean number of rows of an expert up to which rows are bfloat16 where vdpbf16ps is slow.
constexpr int64_t kFewRowsOfSlowDots = 2;

template <int kNibble>
inline void FmaNibble(__m512i v, __m512i table, const float* x, __m512 sum[2]) {
  const __m512i q = Codes<kNibble>(v, table);
  sum[0] = _mm512_fmadd_ps(EvenFloats(q), _mm512_set1_ps(x[2 * kNibble]), sum[0]);
  sum[1] = _mm512_fmadd_ps(OddFloats(q), _mm512_set1_ps(x[2 * kNibble + 1]), sum[1]);
}

void MultiplyOneRow(const WeightPair& weights, const float* x, float* out) {
  const __m512i table = CodeTable();
  for (int g = 0; g < 2; ++g) {
    __m512 acc = _mm512_setzero_ps();
    for (int64_t b = 0; b < weights.k / kBlock; ++b) {
      __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      PrefetchBlock(weights, g, b);
      for (int z = 0; z < 2; ++z) {
        const uint8_t* codes = weights.codes[g] + b * 128 + z * 64;
        const float* here = x + b * kBlock + z * 8;
        const __m512i v = _mm512_loadu_si512(codes);
        FmaNibble<0>(v, table, here, sum);
        FmaNibble<1>(v, table, here, sum);
        FmaNibble<2>(v, table, here, sum);
        FmaNibble<3>(v, table, here, sum);
      }
      acc = _mm512_fmadd_ps(_mm512_add_ps(sum[0], sum[1]),
                            ScaleVector(weights.scales[g] + b * kGroup), acc);
    }
    _mm512_storeu_ps(out + g * kGroup, acc);
  }
}

template <typename Panel>
constexpr int64_t kPanelDepth = kPanelBytes / (kPair * Panel::kValueBytes);  // k of a panel

template <typename Panel, int kNibble>
inline void UnpackNibble(__m512i v, __m512i table, __m512 scale, int64_t k, uint8_t* to) {
  const __m512i q = Codes<kNibble>(v, table);
  Panel::Store(_mm512_mul_ps(EvenFloats(q), scale), _mm512_mul_ps(OddFloats(q), scale),
               k + 2 * kNibble, to);
}

// Unpacks and scales the weights of `count` k.
template <typename Panel>
void UnpackPanel(const WeightPair& weights, int64_t first, int64_t count, uint8_t* panel) {
  const __m512i table = CodeTable();
  for (int g = 0; g < 2; ++g) {
    uint8_t* to = panel + g * sizeof(__m512);
    for (int64_t k = 0; k < count; k += kBlock) {
      const int64_t block = (first + k) / kBlock;
      const __m512 scale = ScaleVector(weights.scales[g] + block * kGroup);
      PrefetchBlock(weights, g, block);
      for (int z = 0; z < 2; ++z) {
        const __m512i v = _mm512_loadu_si512(weights.codes[g] + block * 128 + z * 64);
        UnpackNibble<Panel, 0>(v, table, scale, k + z * 8, to);
        UnpackNibble<Panel, 1>(v, table, scale, k + z * 8, to);
        UnpackNibble<Panel, 2>(v, table, scale, k + z * 8, to);
        UnpackNibble<Panel, 3>(v, table, scale, k + z * 8, to);
      }
    }
  }
}

// Multiplies rows, panel by panel.
template <typename Panel>
void MultiplyPanels(const WeightPair& weights, const Rows& rows, float* out) {
  std::fill(out, out + rows.count * kPair, 0.0f);
  alignas(kCacheLine) uint8_t panel[kPanelBytes];
  for (int64_t first = 0; first < weights.k; first += kPanelDepth<Panel>) {
    const int64_t count = std::min(kPanelDepth<Panel>, weights.k - first);
    UnpackPanel<Panel>(weights, first, count, panel);
    MultiplyRows<Panel, true>(panel, count, rows.data + first * Panel::kValueBytes, rows.stride,
                              rows.count, out, kPair);
  }
}

void MultiplyFew(const WeightPair& weights, const Rows& rows, float* out) {
  for (int64_t r = 0; r < rows.count; r += kMostDots) {
    Rows part = rows;
    part.data += r * rows.stride;
    part.count = std::min<int64_t>(kMostDots, rows.count - r);
    DotPieces(weights, part, out + r * kPair);
  }
}

void Multiply(const WeightPair& weights, const Rows& rows, float* out) {
  if (rows.format.bf16) {
    rows.count <= kFewRows ? MultiplyFew(weights, rows, out)
                           : MultiplyPanels<BFloat16Panel>(weights, rows, out);
  } else if (rows.count == 1) {
    MultiplyOneRow(weights, reinterpret_cast<const float*>(rows.data), out);
  } else {
    MultiplyPanels<Float32Panel>(weights, rows, out);
  }
}

RowFormat ChooseRows(DataType type, ActivationScale scale, int64_t mean_rows) {
  static const bool slow = __builtin_cpu_is("intel");
  const bool exact = type == DataType::kBF16 || scale != ActivationScale::kNone;
  return {exact && (!slow || mean_rows <= kFewRowsOfSlowDots), 1};
}

}  // namespace
}  // namespace nvfp4::cpu

#pragma GCC reset_options

namespace nvfp4::cpu {
namespace {

bool Supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

}  // namespace

const Kernels kAvx512Kernels = {"avx512",       Supported,          ChooseRows, Multiply,
                                TransposedRows, MultiplyTransposed, PrepareRow, Activate,
                                ScaleAndBias,   StoreColumns,       Round,      Accumulate,
                                Quantize,       LargestMagnitude,   Dense,      PrepareHead};

}  // namespace nvfp4::cpu

#endif  // defined(__x86_64__)
