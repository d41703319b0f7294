// Computes out[r, c] = sum_k W[c, k] x[r, k] for 32 outputs with AMX-BF16 tiles.
//
//   weights  two groups of 16 rows in layout "cpu_16x16"
//   rows     bfloat16 [count, pieces, k_pad], readable up to a multiple of 16 rows
//   out      float32 [count rounded up to a multiple of 16, 32]
//
// Bottleneck: reading weights up to about 16 rows of an expert, then unpacking, then the tiles.
//
// Unpacking: a code times its block scale is exact in bfloat16 (nvfp4.h). A panel therefore holds
// scaled weights, and only the global scale is left to the epilogue. The words of the layout are
// the pairs of k that a tile register needs. A B tile is 16 pairs of k by 16 outputs, 1 KiB, in
// order.
//
// Tiles: 2 x 2 tiles of C with 16 rows by 16 outputs, 2 of A with 16 rows by 32 k, and 2 of B. With
// 2 x 2 tiles of C, each tile product needs one tile load, which is what the load ports can do.
//
//   few rows     DotRows (unpack_avx512.h): unpacking to memory would cost more than it saves
//   to 32 rows   C stays in tiles; while 32 k are multiplied, the next 32 are unpacked (2 KiB each)
//   more rows    512 k at a time are unpacked (32 KiB) and used for all rows; C is kept in `out`
//
// The operating system must permit the use of tiles; Supported() asks for that. Every call
// configures and releases the tiles, because the threads belong to XLA.
//
// The table of kernels is in kernels.h. Test: tests/backends/test_cpu_kernel.py, isa="amx".
//
// Source: Intel 64 Software Developer's Manual, volume 1, chapter 18 (AMX, XTILEDATA).
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../nvfp4.h"
#include "kernels.h"

// GCC 12 warns inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")

#include "elementwise.h"
#include "tiles_amx.h"
#include "unpack_avx512.h"

#include "few_rows.h"  // after elementwise.h and unpack_avx512.h, which it needs
#include "transposed_tiles.h"

#include "transposed_avx512.h"  // after transposed_tiles.h and unpack_avx512.h, which it needs

namespace nvfp4::cpu {
namespace {

constexpr int64_t kStepBytes = 2 * kTileBytes;
constexpr int64_t kPanelSteps = 16;  // 512 k: 32 KiB
constexpr int64_t kMostFewDots = 2;  // rows times pieces up to which DotRows is faster than tiles

// Stores scaled weights as pairs of bfloat16. The scaled weights are exact in bfloat16, so that the
// low halves of the float32 lanes are zero.
template <int kNibble>
inline void UnpackNibble(__m512i v, __m512i table, __m512 scale, uint8_t* pairs) {
  const __m512i q = Codes<kNibble>(v, table);
  const __m512i even = _mm512_castps_si512(_mm512_mul_ps(EvenFloats(q), scale));
  const __m512i odd = _mm512_castps_si512(_mm512_mul_ps(OddFloats(q), scale));
  _mm512_store_si512(pairs + kNibble * 64, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
}

// Unpacks one block of 16 k of a group to half a B tile.
inline void UnpackBlock(const uint8_t* codes, const uint8_t* scales, __m512i table,
                        uint8_t* pairs) {
  const __m512 scale = ScaleVector(scales);
  for (int z = 0; z < 2; ++z) {
    const __m512i v = _mm512_loadu_si512(codes + z * 64);
    UnpackNibble<0>(v, table, scale, pairs + z * 256);
    UnpackNibble<1>(v, table, scale, pairs + z * 256);
    UnpackNibble<2>(v, table, scale, pairs + z * 256);
    UnpackNibble<3>(v, table, scale, pairs + z * 256);
  }
}

// Unpacks 32 k of both groups to two B tiles side by side. If k ends after the first 16, the rest
// is zeros.
inline void UnpackStep(const WeightPair& weights, int64_t step, __m512i table, uint8_t* tiles) {
  for (int g = 0; g < 2; ++g, tiles += kTileBytes) {
    const uint8_t* codes = weights.codes[g] + step * 256;
    const uint8_t* scales = weights.scales[g] + step * kTileK;
    PrefetchBlock(weights, g, 2 * step);
    UnpackBlock(codes, scales, table, tiles);
    if (step * kTileK + kBlock < weights.k) {
      PrefetchBlock(weights, g, 2 * step + 1);
      UnpackBlock(codes + 128, scales + kGroup, table, tiles + 512);
    } else {
      for (int64_t byte = 512; byte < kTileBytes; byte += 64)
        _mm512_store_si512(tiles + byte, _mm512_setzero_si512());
    }
  }
}

// C += A B over 32 k. C is in tiles 0 and 1, and in tiles 2 and 3 for rows 16 to 31. A is in 4 and
// 5, B in 6 and 7.
template <bool kTwoTiles>
inline void MultiplyStep(const uint8_t* tiles, const uint8_t* x, const Rows& rows, int64_t k_pad) {
  for (int piece = 0; piece < rows.format.pieces; ++piece, x += k_pad * sizeof(uint16_t)) {
    _tile_loadd(6, tiles, 64);
    _tile_loadd(4, x, rows.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tiles + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwoTiles) {
      _tile_loadd(5, x + kTile * rows.stride, rows.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Multiplies steps [first, last) of one or two row tiles, and unpacks each step while the step
// before it is multiplied. Step s is stored at place (s - first) % places of `panel`.
template <bool kTwoTiles>
inline void UnpackAndMultiply(const WeightPair& weights, int64_t first, int64_t last,
                              const Rows& rows, int64_t k_pad, int64_t places, uint8_t* panel) {
  const __m512i table = CodeTable();
  const uint8_t* x = rows.data + first * kTileK * 2;
  UnpackStep(weights, first, table, panel);
  for (int64_t place = 0; first + place < last; ++place, x += kTileK * 2) {
    if (first + place + 1 < last) {
      UnpackStep(weights, first + place + 1, table, panel + (place + 1) % places * kStepBytes);
    }
    SettleMemory();
    MultiplyStep<kTwoTiles>(panel + place % places * kStepBytes, x, rows, k_pad);
    SettleMemory();
  }
}

// Multiplies at most 32 rows. The sums stay in the tiles, and each step is read once.
template <bool kTwoTiles>
void MultiplyShort(const WeightPair& weights, const Rows& rows, float* out) {
  constexpr int64_t kPlaces = 2;
  const int64_t k_pad = RoundUp(weights.k, kRowPadding);
  alignas(kCacheLine) uint8_t panel[kPlaces * kStepBytes];
  ZeroTiles<kTwoTiles>();
  UnpackAndMultiply<kTwoTiles>(weights, 0, k_pad / kTileK, rows, k_pad, kPlaces, panel);
  StoreTiles<kTwoTiles>(out, kPair);
}

// Multiplies steps [first, last) of one or two row tiles by a panel that is already unpacked.
template <bool kTwoTiles>
void MultiplyPanel(const uint8_t* panel, int64_t first, int64_t last, const uint8_t* x,
                   const Rows& rows, int64_t k_pad, float* out) {
  SettleMemory();
  first ? LoadTiles<kTwoTiles>(out, kPair) : ZeroTiles<kTwoTiles>();
  for (int64_t step = first; step < last; ++step, panel += kStepBytes)
    MultiplyStep<kTwoTiles>(panel, x + step * kTileK * 2, rows, k_pad);
  StoreTiles<kTwoTiles>(out, kPair);
}

void MultiplyLong(const WeightPair& weights, const Rows& rows, float* out) {
  const int64_t k_pad = RoundUp(weights.k, kRowPadding), steps = k_pad / kTileK;
  alignas(kCacheLine) uint8_t panel[kPanelSteps * kStepBytes];
  for (int64_t first = 0; first < steps; first += kPanelSteps) {
    const int64_t last = std::min(first + kPanelSteps, steps);
    first ? LoadTiles<true>(out, kPair) : ZeroTiles<true>();
    UnpackAndMultiply<true>(weights, first, last, rows, k_pad, kPanelSteps, panel);
    StoreTiles<true>(out, kPair);
    for (int64_t r = 2 * kTile; r < rows.count; r += 2 * kTile) {
      const auto multiply = rows.count - r > kTile ? MultiplyPanel<true> : MultiplyPanel<false>;
      multiply(panel, first, last, rows.data + r * rows.stride, rows, k_pad, out + r * kPair);
    }
  }
}

void Multiply(const WeightPair& weights, const Rows& rows, float* out) {
  if (rows.count * rows.format.pieces <= kMostFewDots) {
    DotPieces(weights, rows, out);
    return;
  }
  ConfigureTiles(std::min(rows.count, kTile));
  if (rows.count <= kTile) {
    MultiplyShort<false>(weights, rows, out);
  } else if (rows.count <= 2 * kTile) {
    MultiplyShort<true>(weights, rows, out);
  } else {
    MultiplyLong(weights, rows, out);
  }
  _tile_release();
}

// A piece holds 8 significant bits: all of a bfloat16 or quantized value, while float16 has 11 and
// float32 has 24.
RowFormat ChooseRows(DataType type, ActivationScale scale, int64_t) {
  if (type == DataType::kBF16 || scale != ActivationScale::kNone) return {true, 1};
  return {true, type == DataType::kF16 ? 2 : 3};
}

}  // namespace
}  // namespace nvfp4::cpu

#pragma GCC reset_options

namespace nvfp4::cpu {
namespace {

bool CpuHasAmx() {
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return (edx & kAmxBf16) && (edx & kAmxTile);
}

// Linux lets a process use tiles only after it has asked. One request holds for all threads of the
// process.
bool TilePermission() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool Supported() {
  static const bool supported = kAvx512Kernels.supported() && CpuHasAmx() && TilePermission();
  return supported;
}

}  // namespace

const Kernels kAmxKernels = {"amx",          Supported,          ChooseRows, Multiply,
                             TransposedRows, MultiplyTransposed, PrepareRow, Activate,
                             ScaleAndBias,   StoreColumns,       Round,      Accumulate,
                             Quantize,       LargestMagnitude,   Dense,      PrepareHead};

}  // namespace nvfp4::cpu

#endif  // defined(__x86_64__)
