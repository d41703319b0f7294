// The grouped product that every op of this extension is made of, and the engines that run it.
//
//   out[r] = act(W[e(r)] @ x[r] * row_scale[r] * input_scale[e(r)] * global_scale + bias)
//
//   expert_gemm_sm90.cu   bf16, f16   wgmma, bulk copies; Hopper
//   expert_gemm_sm80.cu   bf16, f16   mma.sync, cp.async; everything since Ampere
//   expert_gemm_sm120.cu  NVFP4       mma.sync on codes and scales, cp.async; 12.x
#pragma once

#include <cuda_runtime.h>

#include "cuda/gemm/weight_tile.cuh"
#include "cuda/launch.h"
#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

// Rows of the engine's type: 16-bit ones for tensor cores. Where activations are quantized these
// are code * block_scale, and their global scale is that of the row, or of all rows of an expert.
struct LeftOperand {
  const void* values;    // [*, k]
  const int32_t* slots;  // where set, sorted row r is row slots[r] / slots_per_row
  int32_t slots_per_row;
  const float* row_scale;    // [rows] in sorted order, or null
  const float* input_scale;  // [e] or null
  // Of the engine on FP4: values are codes, sorted, rows PadK(k) / 2 bytes apart, and these their
  // scales, rows PadK(k) / 16 bytes apart. Zeros pad a row.
  const uint8_t* block_scale = nullptr;
};

constexpr int64_t kPaddedK = 128;
__host__ __device__ constexpr int64_t PadK(int64_t k) {
  return (k + kPaddedK - 1) / kPaddedK * kPaddedK;
}

// Output: [*, columns] of `type`.
struct Output {
  void* values;
  DataType type;
  const int32_t* slots;  // where set, sorted row r goes to row slots[r]
  // Where set, outputs, rounded to `type`, are rounded to NVFP4 under input_scale[expert] too, each
  // 16 columns, and stored as code * block_scale (only where CanRoundOutputs). Where block_scale is
  // set as well, by the engine on FP4, values and these are the codes and scales that a LeftOperand
  // of k = columns has, in sorted order, with zeros that pad its rows.
  uint8_t* block_scale = nullptr;
  const float* input_scale = nullptr;
};

struct ExpertGemm {
  ExpertRows rows;
  TileRule rule;
  TileSchedule schedule;
  float* partial_sums;  // kPartialSumBytes
  bool plan_is_older;   // rows, schedule: older than the kernel just before this one
  DataType type;        // of left.values
  LeftOperand left;
  ExpertWeights weight;  // in the engine's layout, for two halves where activation is gated
  int32_t bias_rows;     // of an expert: rows without padding
  int32_t parts;         // global scales of an expert, 1 or 2
  int32_t k;
  int32_t columns;  // outputs of a row, after the activation
  bool activate;    // the columns are activations of one or two weight rows
  ActivationParameters activation;
  Output output;

  __host__ __device__ bool gated() const { return activate && activation.gated; }
  // Tiles of weight rows of one expert.
  __host__ __device__ int32_t m_tiles() const {
    return ((gated() ? 2 : 1) * columns + kTileM - 1) / kTileM;
  }
};

// How products of `rows` rows of `experts` experts are cut into tiles and blocks, and the kernel
// for that. Where the device can, it may start before the kernel ahead of it has ended.
struct GemmPlan {
  TileRule rule;
  int32_t block_tiles;  // 64-row weight tiles of a block
  int32_t step_tiles;   // of 64 of k, of a step
  int32_t blocks;       // of threads
  cudaError_t (*launch)(cudaStream_t stream, const ExpertGemm& gemm);
};

GemmPlan PlanSm90(int64_t rows, int64_t experts);
GemmPlan PlanSm80(int64_t rows, int64_t experts);
GemmPlan PlanSm120(int64_t rows, int64_t experts);

inline GemmPlan PlanGemm(EngineKind engine, int64_t rows, int64_t experts) {
  return engine == EngineKind::kSm90 ? PlanSm90(rows, experts) : PlanSm80(rows, experts);
}

// The schedule of `gemm` under `plan`.
inline TileSchedule MakeTileSchedule(const GemmPlan& plan, const ExpertGemm& gemm,
                                     WorkStart* starts, int32_t* ready) {
  const int32_t step = plan.step_tiles * kTileK;
  return {plan.blocks, (gemm.k + step - 1) / step,
          (gemm.m_tiles() + plan.block_tiles - 1) / plan.block_tiles, starts, ready};
}

// Bounds that size the workspace whatever the device: blocks of a schedule, and the partial
// sums that they may have to store.
constexpr int32_t kMaxBlocks = 768;
constexpr int64_t kMinTileRows = 8;
constexpr int64_t kPartialSumBytes = int64_t{32} << 20;

}  // namespace nvfp4
