// A product of NVFP4 rows by the NVFP4 weights of their experts, in the form that CUTLASS's grouped
// block-scaled collectives take it: arrays in device memory, one entry for each expert.
//
//   output[r, j] = alpha[e] * sum_b (weight_scale[j, b] * row_scale[r, b] * dot of 16 codes)
//
// Weights are operand A and rows operand B, so that m counts weight rows and n sorted rows, of
// which there may be few; the output is transposed, a sorted row of it is contiguous.
// Nothing here needs CUTLASS: the arrays are plain bytes, and fp4_gemm_sm100.cu and a test hold
// them against CUTLASS's own types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/routing/expert_rows.cuh"
#include "cuda/workspace.cuh"
#include "nvfp4.h"

namespace nvfp4 {

// Block scales come in tiles of 128 rows by 4 blocks (see Swizzle128x4), so operands are padded to
// 64 of k, with zeros, and their scales to 128 rows.
constexpr int64_t kScaleTileRows = 128;
constexpr int64_t kScaleTileK = 64;
constexpr int64_t kScaleTileBytes = 512;

NVFP4_HOST_DEVICE constexpr int64_t PadTo(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The scales of an expert's rows begin at a tile. Experts that follow each other need no more tiles
// than this leaves them: (start + rows) / 128 + 1 >= start / 128 + rows / 128 rounded up.
NVFP4_HOST_DEVICE int64_t FirstScaleTile(int32_t start, int64_t expert) {
  return start / kScaleTileRows + expert;
}
constexpr int64_t MaxScaleTiles(int64_t rows, int64_t experts) {
  return rows / kScaleTileRows + experts;
}

// Rows of a product, quantized.
struct Fp4Rows {
  uint8_t* codes;        // [rows, k/2]
  uint8_t* block_scale;  // [MaxScaleTiles, k/64, 512], those of expert e from FirstScaleTile on
  int32_t k;             // padded
};

// cute::Shape<int, int, int>
struct GroupShape {
  int32_t m, n, k;
};

// What is not known to the compiler in the layout of cutlass::detail::Sm1xxBlockScaledConfig<16>:
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

// Arrays [count] of one operand.
struct GroupOperand {
  const uint8_t** codes;
  int64_t* strides;  // of rows, in codes
  const uint8_t** scales;
  ScaleLayout* scale_layouts;
};

// Arrays [count].
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

// One product of all experts, to be packed into `groups`.
struct Fp4Product {
  Fp4Groups groups;
  ExpertWeights weight;  // layout "fp4_128x64"
  int32_t weight_rows;   // of an expert, without padding
  Fp4Rows rows;
  __nv_bfloat16* output;  // [rows, output_stride]
  int64_t output_stride;  // a multiple of 8
  bool scaled;            // alpha = global_scale[e, 0] * input_scale[e], else 1
};

struct PackedProducts {
  int32_t count;
  Fp4Product products[2];
  ExpertRows rows;
  int32_t max_rows;
  int32_t* places;  // where set: places[slot] = its sorted row
};

cudaError_t LaunchPackGroups(cudaStream_t stream, const PackedProducts& products);

// Rows of an expert, on average, from which on the collective with large tiles runs.
constexpr int64_t kManyRows = 128;

// What a collective may use of device memory, on any GPU: tensor maps of 128 bytes, six for each
// multiprocessor.
constexpr int64_t kCollectiveBytes = 512 << 10;

// The product of packed groups: by fp4_gemm_sm100.cu, or by fp4_gemm_emulated.cu on devices that
// have no such instructions, in builds that are made for it.
cudaError_t LaunchFp4Gemm(cudaStream_t stream, const Fp4Groups& groups, int64_t rows,
                          void* workspace);
cudaError_t LaunchFp4GemmSm100(cudaStream_t stream, const Fp4Groups& groups, bool many_rows,
                               void* workspace);
cudaError_t LaunchFp4GemmEmulated(cudaStream_t stream, const Fp4Groups& groups);

}  // namespace nvfp4
