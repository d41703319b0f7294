// The arrays in device memory of a GEMM of fp4_groups.cuh. This file uses neither XLA nor CUDA.
#pragma once

#include <cstdint>

#include "cuda/workspace.h"
#include "nvfp4.h"

namespace nvfp4 {

// Block scales are stored in tiles of 128 rows by 4 blocks (see Swizzle128x4). Operands are
// therefore padded to a multiple of 64 of k, with zeros, and their scales to a multiple of 128
// rows.
constexpr int64_t kScaleTileRows = 128;
constexpr int64_t kScaleTileK = 64;
constexpr int64_t kScaleTileBytes = 512;

NVFP4_HOST_DEVICE constexpr int64_t PadTo(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The scales of the rows of each expert begin at a tile. This formula leaves each expert enough
// tiles: (start + rows) / 128 + 1 >= start / 128 + (rows / 128, rounded up).
NVFP4_HOST_DEVICE int64_t FirstScaleTile(int32_t start, int64_t expert) {
  return start / kScaleTileRows + expert;
}
constexpr int64_t MaxScaleTiles(int64_t rows, int64_t experts) {
  return rows / kScaleTileRows + experts;
}

// The bytes of cute::Shape<int, int, int>.
struct GroupShape {
  int32_t m, n, k;
};

// The part of the layout cutlass::detail::Sm1xxBlockScaledConfig<16> that is not a compile-time
// constant. The whole layout is
//   (((32, 4), row_tiles), ((16, 4), k_tiles), (1, batches)) :
//   (((16, 4), row_stride), ((0, 1), 512), (0, batch_stride))
struct ScaleLayout {
  int32_t row_tiles, k_tiles, batches;
  int32_t row_stride, batch_stride;  // in bytes
};

NVFP4_HOST_DEVICE ScaleLayout MakeScaleLayout(int32_t rows, int32_t k) {
  const auto row_tiles = static_cast<int32_t>((rows + kScaleTileRows - 1) / kScaleTileRows);
  const auto k_tiles = static_cast<int32_t>((k + kScaleTileK - 1) / kScaleTileK);
  const auto row_stride = static_cast<int32_t>(kScaleTileBytes * k_tiles);
  return {row_tiles, k_tiles, 1, row_stride, row_stride * row_tiles};
}

// The arrays of one operand, with `count` entries each.
struct GroupOperand {
  const uint8_t** codes;
  int64_t* strides;  // distance of rows, in codes
  const uint8_t** scales;
  ScaleLayout* scale_layouts;
};

// The arrays of a GEMM, with `count` entries each.
struct Fp4Groups {
  int32_t count;
  GroupShape* shapes;
  GroupOperand weights;
  GroupOperand rows;
  void** outputs;  // bf16
  int64_t* output_strides;
  const float** alphas;  // point into `alpha`
  float* alpha;
};

inline GroupOperand TakeGroupOperand(Sections* sections, int64_t count) {
  GroupOperand operand;
  operand.codes = sections->Take<const uint8_t*>(count);
  operand.strides = sections->Take<int64_t>(count);
  operand.scales = sections->Take<const uint8_t*>(count);
  operand.scale_layouts = sections->Take<ScaleLayout>(count);
  return operand;
}

inline Fp4Groups TakeFp4Groups(Sections* sections, int64_t count) {
  Fp4Groups groups;
  groups.count = static_cast<int32_t>(count);
  groups.shapes = sections->Take<GroupShape>(count);
  groups.weights = TakeGroupOperand(sections, count);
  groups.rows = TakeGroupOperand(sections, count);
  groups.outputs = sections->Take<void*>(count);
  groups.output_strides = sections->Take<int64_t>(count);
  groups.alphas = sections->Take<const float*>(count);
  groups.alpha = sections->Take<float>(count);
  return groups;
}

// The most device memory that a collective uses, on any GPU: six tensor maps of 128 bytes for each
// multiprocessor.
constexpr int64_t kCollectiveBytes = 512 << 10;

}  // namespace nvfp4
