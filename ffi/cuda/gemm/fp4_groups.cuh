// A GEMM of NVFP4 rows by the NVFP4 weights of their experts, in the form that CUTLASS's grouped
// block-scaled collectives need. It consists of arrays in device memory, with one entry for each
// expert.
//
//   output[r, j] = alpha[e] * sum_b (weight_scale[j, b] * row_scale[r, b] * dot of 16 codes)
//
// Weights are operand A and rows are operand B, so that m counts weight rows, and n sorted rows,
// which may be few. The output is transposed: the outputs of a sorted row are contiguous.
//
// This file does not need CUTLASS, because the arrays are plain bytes. fp4_gemm_sm100.cu and a test
// compare them with CUTLASS's own types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/routing/expert_rows.h"
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

// The quantized rows of a GEMM.
struct Fp4Rows {
  uint8_t* codes;        // [rows, k/2]
  uint8_t* block_scale;  // [MaxScaleTiles, k/64, 512]; expert e begins at FirstScaleTile
  int32_t k;             // padded to a multiple of 64
};

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
  __nv_bfloat16** outputs;
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
  groups.outputs = sections->Take<__nv_bfloat16*>(count);
  groups.output_strides = sections->Take<int64_t>(count);
  groups.alphas = sections->Take<const float*>(count);
  groups.alpha = sections->Take<float>(count);
  return groups;
}

// One GEMM of all experts, which is to be packed into `groups`.
struct Fp4Product {
  Fp4Groups groups;
  ExpertWeights weight;  // layout "fp4_128x64"
  int32_t weight_rows;   // weight rows of an expert, without padding
  Fp4Rows rows;
  __nv_bfloat16* output;  // [rows, output_stride]
  int64_t output_stride;  // a multiple of 8
  bool scaled;            // if set, alpha = global_scale[e, 0] * input_scale[e], otherwise 1
};

struct PackedProducts {
  int32_t count;
  Fp4Product products[2];
  ExpertRows rows;
  int32_t max_rows;
  int32_t* places;  // if set, receives the sorted row of each slot
};

cudaError_t LaunchPackGroups(cudaStream_t stream, const PackedProducts& products);

// From this mean number of rows of an expert on, the collective with large tiles runs.
constexpr int64_t kManyRows = 128;

// The most device memory that a collective uses, on any GPU: six tensor maps of 128 bytes for each
// multiprocessor.
constexpr int64_t kCollectiveBytes = 512 << 10;

// Launches the GEMM of packed groups: that of fp4_gemm_sm100.cu or, on devices without its
// instructions and in builds with the emulation, that of fp4_gemm_emulated.cu.
cudaError_t LaunchFp4Gemm(cudaStream_t stream, const Fp4Groups& groups, int64_t rows,
                          void* workspace);
cudaError_t LaunchFp4GemmSm100(cudaStream_t stream, const Fp4Groups& groups, bool many_rows,
                               void* workspace);
cudaError_t LaunchFp4GemmEmulated(cudaStream_t stream, const Fp4Groups& groups);

}  // namespace nvfp4
