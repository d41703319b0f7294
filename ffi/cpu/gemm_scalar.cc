// Computes out[r, c] = sum_k W[c, k] x[r, k] for 32 outputs in portable C++, for any CPU.
//
//   weights  two groups of 16 rows in layout "cpu_16x16"    rows  float32 [count, k_pad]
//   out      float32 [count, 32]
//
// Bottleneck: float32 multiply-add. 64 k are unpacked to a panel float32 [64, 32] in the
// first-level cache, which is used for every row. The inner loop runs over the 32 outputs. A
// compiler turns it into the vectors of its target: NEON on AArch64, SSE2 on x86-64.
//
// Sums run over k in order, 64 at a time, and are then added to out.
//
// The table of kernels is in kernels.h. Reference: ops/experts/meaning.py.
// Test: tests/backends/test_cpu_kernel.py, isa="scalar".
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../nvfp4.h"
#include "kernels.h"

#include "elementwise.h"  // after kernels.h, which it needs

namespace nvfp4::cpu {
using DenseVectors = Vectors<Floats4, 16>;
}  // namespace nvfp4::cpu

#include "few_rows.h"  // after elementwise.h, which it needs
#include "transposed_tiles.h"

namespace nvfp4::cpu {
namespace {

constexpr int64_t kPanel = 64;  // k of a panel: 8 KiB

void UnpackBlock(const uint8_t* codes, const uint8_t* scales, float* panel) {
  for (int row = 0; row < kGroup; ++row) {
    const float scale = DecodeE4M3(scales[row]);
    for (int k = 0; k < kBlock; ++k) {
      const int word = 2 * row + k % 2, nibble = k % 8 / 2;
      const uint8_t byte = codes[k / 8 * 64 + 2 * word + nibble / 2];
      panel[k * kPair + row] = DecodeE2M1(byte >> nibble % 2 * 4) * scale;
    }
  }
}

void Multiply(const WeightPair& weights, const Rows& rows, float* out) {
  std::fill(out, out + rows.count * kPair, 0.0f);
  alignas(kCacheLine) float panel[kPanel * kPair];
  for (int64_t first = 0; first < weights.k; first += kPanel) {
    const int64_t count = std::min(kPanel, weights.k - first);
    for (int64_t k = 0; k < count; k += kBlock) {
      for (int g = 0; g < 2; ++g) {
        const int64_t block = (first + k) / kBlock;
        UnpackBlock(weights.codes[g] + block * 128, weights.scales[g] + block * kGroup,
                    panel + k * kPair + g * kGroup);
      }
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      const float* x = reinterpret_cast<const float*>(rows.data + r * rows.stride) + first;
      float sum[kPair] = {};
      for (int64_t k = 0; k < count; ++k) {
        for (int c = 0; c < kPair; ++c) sum[c] += panel[k * kPair + c] * x[k];
      }
      for (int c = 0; c < kPair; ++c) out[r * kPair + c] += sum[c];
    }
  }
}

RowFormat Float32Rows(DataType, ActivationScale, int64_t) { return {false, 1}; }

// A panel of float32, for products with transposed weights.
struct Float32Columns {
  using Vector = Floats4;
  static constexpr int64_t kValueBytes = sizeof(float);
  static constexpr int kRows = 2;

  static int64_t CountVectors(int64_t groups) { return 4 * groups; }
  static Floats4 MultiplyAdd(Floats4 w, Floats4 x, Floats4 sum) { return sum + w * x; }
  static void AddSums(const Floats4 sums[kTileColumns], float* out) {
    for (int c = 0; c < kTileColumns; ++c)
      out[c] += (sums[c][0] + sums[c][1]) + (sums[c][2] + sums[c][3]);
  }

  static void Unpack(const WeightColumns& weights, int64_t block, int64_t first, int64_t groups,
                     uint8_t* panel) {
    const int64_t vectors = CountVectors(groups);
    for (int64_t g = 0; g < groups; ++g) {
      float values[kBlock * kPair];
      UnpackBlock(weights.Codes(first + g, block), weights.Scales(first + g, block), values);
      for (int64_t c = 0; c < kBlock; ++c) {
        for (int64_t v = 0; v < 4; ++v) {
          std::memcpy(PanelVector<Float32Columns>(panel, vectors, 4 * g + v, c),
                      values + c * kPair + 4 * v, sizeof(Floats4));
        }
      }
    }
  }
};

void MultiplyTransposed(const WeightColumns& weights, int64_t block, const Rows& rows, float* out) {
  MultiplyColumns<Float32Columns>(weights, block, rows, out);
}

RowFormat TransposedRows(DataType) { return {false, 1}; }

bool Supported() { return true; }

}  // namespace

const Kernels kScalarKernels = {"scalar",       Supported,          Float32Rows, Multiply,
                                TransposedRows, MultiplyTransposed, PrepareRow,  Activate,
                                ScaleAndBias,   StoreColumns,       Round,       Accumulate,
                                Quantize,       LargestMagnitude,   Dense,       PrepareHead};

}  // namespace nvfp4::cpu
