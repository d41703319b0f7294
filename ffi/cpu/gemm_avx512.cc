// Computes out[r, c] = sum_k W[c, k] x[r, k] for 32 outputs with AVX-512 and its BF16 instructions.
//
//   weights  two groups of 16 rows in layout "cpu_16x16"
//   rows     bfloat16 [count, k_pad] if experts have few rows, otherwise float32 [count, k_pad]
//   out      float32 [count, 32]
//
// Bottleneck: reading weights for few rows, fused multiply-add (32 weights a cycle) for many. On
// current CPUs, vdpbf16ps computes half as many products a cycle as float32 multiply-adds do. It
// needs no conversion of the weights to float32, however, and is therefore faster as long as
// unpacking is the larger part of the work.
//
//   few rows, bfloat16  DotRows (unpack_avx512.h)
//   one row, float32    unpacks in registers; multiplies the sum of each 16 k by its scales
//   otherwise           unpacks and scales 128 k to a panel float32 [128, 32] of 16 KiB, and uses
//                       it for every row; the sums of 12 rows, 2 vectors each, fill the registers
//
// The table of kernels is in kernels.h. Test: tests/backends/test_cpu_kernel.py, isa="avx512".
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../nvfp4.h"
#include "kernels.h"

// GCC 12 warns inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")

#include "elementwise.h"
#include "unpack_avx512.h"

namespace nvfp4::cpu {
namespace {

constexpr int64_t kPanel = 128;  // k of a panel
constexpr int kRows = 12;        // rows of a register tile
constexpr int64_t kFewRows = 2;  // rows are bfloat16 up to this mean number of rows of an expert

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

template <int kNibble>
inline void UnpackNibble(__m512i v, __m512i table, __m512 scale, float* panel) {
  const __m512i q = Codes<kNibble>(v, table);
  _mm512_store_ps(panel + 2 * kNibble * kPair, _mm512_mul_ps(EvenFloats(q), scale));
  _mm512_store_ps(panel + (2 * kNibble + 1) * kPair, _mm512_mul_ps(OddFloats(q), scale));
}

// Unpacks `count` k to a panel float32 [k, 32] of scaled weights.
void UnpackPanel(const WeightPair& weights, int64_t first, int64_t count, float* panel) {
  const __m512i table = CodeTable();
  for (int g = 0; g < 2; ++g) {
    for (int64_t k = 0; k < count; k += kBlock) {
      const int64_t block = (first + k) / kBlock;
      const __m512 scale = ScaleVector(weights.scales[g] + block * kGroup);
      PrefetchBlock(weights, g, block);
      for (int z = 0; z < 2; ++z) {
        const uint8_t* codes = weights.codes[g] + block * 128 + z * 64;
        float* to = panel + (k + z * 8) * kPair + g * kGroup;
        const __m512i v = _mm512_loadu_si512(codes);
        UnpackNibble<0>(v, table, scale, to);
        UnpackNibble<1>(v, table, scale, to);
        UnpackNibble<2>(v, table, scale, to);
        UnpackNibble<3>(v, table, scale, to);
      }
    }
  }
}

// out [kCount, 32] += panel times kCount rows of x.
template <int kCount>
void MultiplyPanel(const float* panel, int64_t count, const uint8_t* x, int64_t stride,
                   float* out) {
  __m512 acc[kCount][2];
  for (auto& sums : acc) sums[0] = sums[1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; ++k, panel += kPair, x += sizeof(float)) {
    const __m512 w0 = _mm512_load_ps(panel), w1 = _mm512_load_ps(panel + kGroup);
    for (int r = 0; r < kCount; ++r) {
      const __m512 value = _mm512_set1_ps(*reinterpret_cast<const float*>(x + r * stride));
      acc[r][0] = _mm512_fmadd_ps(w0, value, acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(w1, value, acc[r][1]);
    }
  }
  for (int r = 0; r < kCount; ++r) {
    float* to = out + r * kPair;
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), acc[r][0]));
    _mm512_storeu_ps(to + kGroup, _mm512_add_ps(_mm512_loadu_ps(to + kGroup), acc[r][1]));
  }
}

using PanelFn = void (*)(const float*, int64_t, const uint8_t*, int64_t, float*);
constexpr PanelFn kMultiplyPanel[kRows + 1] = {
    nullptr,           MultiplyPanel<1>,  MultiplyPanel<2>, MultiplyPanel<3>, MultiplyPanel<4>,
    MultiplyPanel<5>,  MultiplyPanel<6>,  MultiplyPanel<7>, MultiplyPanel<8>, MultiplyPanel<9>,
    MultiplyPanel<10>, MultiplyPanel<11>, MultiplyPanel<12>};

// Multiplies rows of float32, panel by panel.
void MultiplyFloat32(const WeightPair& weights, const Rows& rows, float* out) {
  std::fill(out, out + rows.count * kPair, 0.0f);
  alignas(kCacheLine) float panel[kPanel * kPair];
  // Rows are cut into tiles of about equal height: 16 rows become 8 + 8, not 12 + 4.
  const int64_t tiles = (rows.count + kRows - 1) / kRows;
  const int64_t height = (rows.count + tiles - 1) / tiles;
  for (int64_t first = 0; first < weights.k; first += kPanel) {
    const int64_t count = std::min(kPanel, weights.k - first);
    UnpackPanel(weights, first, count, panel);
    for (int64_t r = 0; r < rows.count; r += height) {
      const int64_t here = std::min(height, rows.count - r);
      kMultiplyPanel[here](panel, count, rows.data + r * rows.stride + first * sizeof(float),
                           rows.stride, out + r * kPair);
    }
  }
}

void MultiplyBFloat16(const WeightPair& weights, const Rows& rows, float* out) {
  for (int64_t r = 0; r < rows.count; r += kMostDots) {
    Rows part = rows;
    part.data += r * rows.stride;
    part.count = std::min<int64_t>(kMostDots, rows.count - r);
    DotPieces(weights, part, out + r * kPair);
  }
}

void Multiply(const WeightPair& weights, const Rows& rows, float* out) {
  if (rows.format.bf16) {
    MultiplyBFloat16(weights, rows, out);
  } else if (rows.count == 1) {
    MultiplyOneRow(weights, reinterpret_cast<const float*>(rows.data), out);
  } else {
    MultiplyFloat32(weights, rows, out);
  }
}

RowFormat ChooseRows(DataType type, ActivationScale scale, int64_t mean_rows) {
  const bool exact = type == DataType::kBF16 || scale != ActivationScale::kNone;
  return {exact && mean_rows <= kFewRows, 1};
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

const Kernels kAvx512Kernels = {"avx512",   Supported,  ChooseRows,   Multiply,
                                PrepareRow, Activate,   ScaleAndBias, StoreColumns,
                                Round,      Accumulate, Quantize,     LargestMagnitude};

}  // namespace nvfp4::cpu

#endif  // defined(__x86_64__)
