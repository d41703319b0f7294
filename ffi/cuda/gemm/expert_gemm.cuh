// The grouped GEMM that every op of this extension runs, and the engines that compute it.
//
//   out[r] = act(W[e(r)] @ x[r] * row_scale[r] * input_scale[e(r)] * global_scale + bias)
//
// With transposed weights, for gradients, W[e(r)].T takes the place of W[e(r)]. Then k counts the
// rows of W, and the output has its columns.
//
//   expert_gemm_sm90.cu            bf16, f16   wgmma, bulk copies; Hopper.
//   expert_gemm_few_rows_sm90.cu   bf16, f16   mma.sync, bulk copies; experts with few rows,
//   Hopper. expert_gemm_sm80.cu            bf16, f16   mma.sync, cp.async; everything since Ampere.
//   expert_gemm_sm120.cu           NVFP4       mma.sync on codes and scales, cp.async; 12.x.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/gemm/weight_tile.cuh"
#include "cuda/launch.h"
#include "cuda/layers/forms.h"
#include "cuda/scheduling/tile_scheduler.cuh"
#include "cuda/workspace.h"

namespace nvfp4 {

// The left operand: rows of 16-bit numbers for tensor cores. If activations are quantized, these
// are code * block_scale, and their global scale is that of the row, or of all rows of an expert.
struct LeftOperand {
  const void* values;    // [*, k]
  const int32_t* slots;  // if set, sorted row r is row slots[r] / slots_per_row
  int32_t slots_per_row;
  int32_t rows;              // of `values`
  const float* row_scale;    // [rows] in sorted order; or null
  const float* input_scale;  // [e] or null
  // Set for the engine on FP4 tensor cores. Then `values` are codes in sorted order, rows PadK(k) /
  // 2 bytes apart, and these are their block scales, rows PadK(k) / 16 bytes apart. Zeros pad a
  // row.
  const uint8_t* block_scale = nullptr;
};

// The output [*, columns] of `type`.
struct Output {
  void* values;
  DataType type;
  const int32_t* slots;  // if set, sorted row r goes to row slots[r]
  // If input_scale is set, the outputs are rounded to `type` and then to NVFP4 under
  // input_scale[expert], in blocks of 16 columns. They are stored as code * block_scale.
  // CanRoundOutputs must be true.
  //
  // If block_scale is set as well, for the engine on FP4 tensor cores, codes and block scales are
  // stored to `values` and `block_scale`. They have the form of a LeftOperand with k = columns, in
  // sorted order, with zeros that pad its rows.
  uint8_t* block_scale = nullptr;
  const float* input_scale = nullptr;
};

struct ExpertGemm {
  ExpertRows rows;
  TileRule rule;
  TileSchedule schedule;
  float* partial_sums;  // of kPartialSumBytes bytes
  // Whether rows, schedule and weights were written before the preceding kernel.
  bool schedule_is_unchanged;
  DataType type;  // type of left.values
  LeftOperand left;
  ExpertWeights weight;  // in the layout of the engine, of two halves if gated
  int32_t bias_rows;     // elements of the bias of an expert
  int32_t parts;         // global scales of an expert: 1, 2, or one for each row if not gated
  int32_t k;
  int32_t columns;  // outputs of a row, after the activation
  bool activate;    // each column is the activation of one or two weight rows
  ActivationParameters activation;
  Output output;

  __host__ __device__ bool gated() const { return activate && activation.gated; }
  // The number of tiles of weight rows of one expert.
  __host__ __device__ int32_t m_tiles() const {
    return ((gated() ? 2 : 1) * columns + kTileM - 1) / kTileM;
  }
};

// How a GEMM of some rows of some experts is cut into tiles and blocks, and the function that
// launches its kernel. If the device can, the kernel may start before the one ahead of it has
// ended.
struct GemmKernel {
  TileRule rule;
  int32_t block_tiles;  // weight tiles of 64 rows of a block
  int32_t step_tiles;   // how many times 64 of k a step covers
  int32_t blocks;       // blocks of threads
  bool takes_work;      // whether they take output tiles one by one (tile_scheduler.cuh)
  cudaError_t (*launch)(cudaStream_t stream, const ExpertGemm& gemm);
};

GemmKernel ChooseGemmSm90(int64_t rows, int64_t experts);
GemmKernel ChooseGemmSm80(int64_t rows, int64_t experts);
GemmKernel ChooseGemmSm120(int64_t rows, int64_t experts);
GemmKernel FewRowsGemmSm90();  // for many experts with few rows each
GemmKernel ChooseTransposedGemmSm90(int64_t rows, int64_t experts);

inline GemmKernel ChooseGemm(EngineKind engine, int64_t rows, int64_t experts) {
  return engine == EngineKind::kSm90 ? ChooseGemmSm90(rows, experts)
                                     : ChooseGemmSm80(rows, experts);
}

// Makes the schedule of `gemm` for `kernel`.
inline TileSchedule MakeTileSchedule(const GemmKernel& kernel, const ExpertGemm& gemm,
                                     WorkStart* starts, int32_t* ready) {
  const int32_t step = kernel.step_tiles * kTileK;
  return {kernel.blocks,
          (gemm.k + step - 1) / step,
          (gemm.m_tiles() + kernel.block_tiles - 1) / kernel.block_tiles,
          starts,
          ready,
          {},
          kernel.takes_work};
}

// Returns the bytes of shared memory of the largest kernel of an engine.
template <typename Variant, size_t kCount>
constexpr int64_t MaxSharedBytes(const Variant (&variants)[kCount]) {
  int64_t most = 0;
  for (const Variant& variant : variants) most = std::max<int64_t>(most, variant.shared_bytes);
  return most;
}

}  // namespace nvfp4
