// Quantizes x to NVFP4 under one global scale, with the same bits as `numerics.nvfp4.quantize`.
//
//   x [m, k] bf16, f16 or f32  ->  packed [m, k/2], and block_scale [m, k/16] or in the 128x4 order
//
// Bottleneck: one division for each value. A work item is a block of rows. The arithmetic is in
// elementwise.h and nvfp4.h. Test: tests/backends/test_quantizer.py.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "../nvfp4.h"
#include "experts.h"
#include "ops.h"

namespace nvfp4::cpu {
namespace {

constexpr int64_t kTileRows = 128;  // rows of a tile of the 128x4 order, and of a work item

void FindAmax(const QuantizeArguments& p, const Kernels& kernels, int64_t tile,
              std::atomic<uint32_t>* largest) {
  const int64_t first = tile * kTileRows, rows = std::min(kTileRows, p.m - first);
  const uint8_t* x = static_cast<const uint8_t*>(p.x) + first * p.k * Bytes(p.type);
  const uint32_t mine = FloatBits(kernels.largest_magnitude(x, p.type, rows * p.k));
  uint32_t seen = largest->load();
  while (seen < mine && !largest->compare_exchange_weak(seen, mine)) {
  }
}

void QuantizeRows(const QuantizeArguments& p, const Kernels& kernels, int64_t tile, float g) {
  const int64_t blocks = p.k / kBlock, padded = RoundUp(blocks, 4);
  const int64_t first = tile * kTileRows, end = std::min(first + kTileRows, p.m);
  if (p.swizzle) std::memset(p.block_scale + first * padded, 0, kTileRows * padded);
  for (int64_t row = first; row < end; ++row) {
    const uint8_t* x = static_cast<const uint8_t*>(p.x) + row * p.k * Bytes(p.type);
    uint8_t* packed = p.packed + row * p.k / 2;
    if (!p.swizzle) {
      kernels.quantize(x, p.type, p.k, g, packed, p.block_scale + row * blocks);
      continue;
    }
    constexpr int64_t kValues = 1024, kScales = kValues / kBlock;
    for (int64_t k = 0; k < p.k; k += kValues) {
      const int64_t count = std::min(kValues, p.k - k);
      uint8_t scales[kScales];
      kernels.quantize(x + k * Bytes(p.type), p.type, count, g, packed + k / 2, scales);
      for (int64_t b = 0; b < count / kBlock; ++b)
        p.block_scale[Swizzle128x4(row, k / kBlock + b, padded)] = scales[b];
    }
  }
}

}  // namespace

void RunQuantizeCpu(const QuantizeArguments& arguments, const Kernels& kernels, ThreadPool& pool) {
  const int64_t tiles = CeilDivide(arguments.m, kTileRows);
  float g = 0.0f;
  if (arguments.global_scale != nullptr) {
    g = *arguments.global_scale;
  } else {
    // The bits of magnitudes are ordered as the magnitudes are, with NaN above infinity. Their
    // maximum does not depend on the order of the tiles.
    std::atomic<uint32_t> largest{0};
    RunPhases(
        pool, 1, [&](int64_t) { return tiles; },
        [&](int64_t, int64_t tile) { FindAmax(arguments, kernels, tile, &largest); });
    DefaultFloatEnvironment environment;
    g = GlobalScale(BitsFloat(largest.load()));
  }
  *arguments.used_scale = g;
  RunPhases(
      pool, 1, [&](int64_t) { return tiles; },
      [&](int64_t, int64_t tile) { QuantizeRows(arguments, kernels, tile, g); });
}

}  // namespace nvfp4::cpu
