// The plain grouped GEMM, for calls that no engine supports; see plain_gemm.cu.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

constexpr int kTileRows = static_cast<int>(kPlainTileRows);  // most rows of a tile
constexpr TileRule kPlainRule = {kTileRows, kTileRows};

// The left operand: rows of T, or rows of NVFP4 codes with a float32 scale for each row.
struct PlainLeft {
  const void* values;    // [*, k] of `type`; null if quantized
  const int32_t* slots;  // if set, sorted row r is row slots[r] / slots_per_row
  int32_t slots_per_row;
  const float* slot_weights;   // if set, row r is first multiplied by slot_weights[slots[r]]
  const uint8_t* codes;        // [rows, k/2], in sorted order
  const uint8_t* block_scale;  // [rows, k/16]
  const float* row_scale;      // [rows]
};

// The output [*, columns] of `type`.
struct PlainOutput {
  void* values;
  DataType type;
  const int32_t* slots;  // if set, sorted row r goes to row slots[r]
};

struct PlainGemm {
  ExpertRows rows;
  int64_t max_tiles;  // upper bound of rows.num_tiles; the size of the grid
  DataType type;      // type of the activations of the caller
  PlainLeft left;
  ExpertWeights weight;
  int64_t weight_rows;  // weight rows of an expert, without padding
  int64_t bias_rows;    // elements of the bias of an expert
  int32_t parts;        // global scales of an expert: 1, 2, or one for each row if not gated
  int32_t k;
  int32_t columns;  // outputs of a row, after the activation
  bool activate;    // each column is the activation of one or two weight rows
  ActivationParameters activation;
  PlainOutput output;
};

cudaError_t LaunchPlainGemm(cudaStream_t stream, const PlainGemm& gemm);

}  // namespace nvfp4
