// The products of attention with AMX-BF16 tiles (attention_block.h).
//
// A tile of B is 16 pairs of k by 16 columns, which is how a panel stores half of its columns. As
// in gemm_amx.cc, 2 x 2 tiles of C take 2 tiles of A and 2 of B, so that each product loads one
// tile.
//
// Bottleneck: the softmax and the tiles, about equally, if a block has many queries; reading keys
// and values if it has few.
//
// Test: tests/ops/test_attention_cpu.py.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "../nvfp4.h"
#include "attention.h"
#include "experts.h"
#include "kernels.h"

// GCC 12 warns inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")

#include "tiles_amx.h"

namespace nvfp4::cpu {
namespace {

struct Products {
  static constexpr int64_t kDepth = kTileK;

  explicit Products(int64_t rows) { ConfigureTiles(std::min(rows, kTile)); }
  ~Products() { _tile_release(); }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  template <bool kAdd>
  void Multiply(const uint8_t* panel, int64_t k, const uint8_t* x, int64_t stride, int64_t count,
                float* out, int64_t out_stride) const {
    SettleMemory();
    for (int64_t r = 0; r < count; r += 2 * kTile) {
      const auto multiply =
          count - r > kTile ? MultiplyTiles<true, kAdd> : MultiplyTiles<false, kAdd>;
      multiply(panel, k, x + r * stride, stride, out + r * out_stride, out_stride);
    }
    SettleMemory();
  }

 private:
  template <bool kTwoTiles, bool kAdd>
  static void MultiplyTiles(const uint8_t* panel, int64_t k, const uint8_t* x, int64_t stride,
                            float* out, int64_t out_stride) {
    constexpr int64_t kPanelStride = kPair * 2 * sizeof(uint16_t);  // bytes of a pair of k
    kAdd ? LoadTiles<kTwoTiles>(out, out_stride) : ZeroTiles<kTwoTiles>();
    for (int64_t at = 0; at < k; at += kTileK, x += kTileK * sizeof(uint16_t)) {
      _tile_loadd(6, panel, kPanelStride);
      _tile_loadd(4, x, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, panel + kPanelStride / 2, kPanelStride);
      _tile_dpbf16ps(1, 4, 7);
      if (kTwoTiles) {
        _tile_loadd(5, x + kTile * stride, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      panel += kTileK / 2 * kPanelStride;
    }
    StoreTiles<kTwoTiles>(out, out_stride);
  }
};

}  // namespace
}  // namespace nvfp4::cpu

#include "attention_block.h"  // after Products, which it needs

#pragma GCC reset_options

namespace nvfp4::cpu {

const AttentionKernels kAttentionAmx = {kAmxKernels.supported, ScratchBytes, Attend, MergeSums};

}  // namespace nvfp4::cpu

#endif  // defined(__x86_64__)
