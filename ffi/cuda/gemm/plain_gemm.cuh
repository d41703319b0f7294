// The grouped product that every op of this extension is made of; see plain_gemm.cu.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

constexpr int kTileRows = 64;  // of a row tile of the product
constexpr TileRule kPlainRule = {kTileRows, kTileRows};

// Left operand: rows of T, or rows of NVFP4 codes with a float32 scale each.
struct PlainLeft {
  const void* values;    // [*, k] of `type`; null where quantized
  const int32_t* slots;  // where set, sorted row r is row slots[r] / slots_per_row
  int32_t slots_per_row;
  const float* slot_weights;   // where set, row r is multiplied by slot_weights[slots[r]] first
  const uint8_t* codes;        // [rows, k/2], in sorted order
  const uint8_t* block_scale;  // [rows, k/16]
  const float* row_scale;      // [rows]
};

// PlainOutput: [*, columns] of `type`.
struct PlainOutput {
  void* values;
  DataType type;
  const int32_t* slots;  // where set, sorted row r goes to row slots[r]
};

struct PlainGemm {
  ExpertRows rows;
  int64_t max_tiles;  // bound of rows.num_tiles: the grid
  DataType type;      // of the left operand as the caller has it
  PlainLeft left;
  ExpertWeights weight;
  int64_t weight_rows;  // of an expert, without padding
  int64_t bias_rows;    // likewise
  int32_t parts;        // global scales of an expert
  int32_t k;
  int32_t columns;  // outputs of a row, after the activation
  bool activate;    // the columns are activations of one or two weight rows
  ActivationParameters activation;
  PlainOutput output;
};

cudaError_t LaunchPlainGemm(cudaStream_t stream, const PlainGemm& gemm);

}  // namespace nvfp4
