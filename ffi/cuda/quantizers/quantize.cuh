// Activations to NVFP4 on the way into a W4A4 product; see quantize.cu.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/routing/expert_rows.cuh"
#include "nvfp4.h"

namespace nvfp4 {

struct RowQuantizer {
  ExpertRows rows;   // without starts all of max_rows are quantized, and input_scale is null
  int64_t max_rows;  // bound of rows.starts[num_experts]
  int32_t num_experts;
  DataType type;
  const void* values;    // [*, k]
  const int32_t* slots;  // where set, sorted row r is row slots[r] / slots_per_row
  int32_t slots_per_row;
  const float* slot_weights;  // where set, row r is multiplied by slot_weights[slots[r]] first
  int32_t k;
  const float* input_scale;  // [e]: global scale of expert e's rows; null: amax(row) / 2688
  uint8_t* codes;            // [max_rows, k/2] of [max_rows, padded_k/2], in sorted order
  uint8_t* block_scale;      // [max_rows, k/16] of [max_rows, padded_k/16]
  float* row_scale;          // [max_rows]: the global scale that the row was given
  // Where set, instead of the codes and scales: [max_rows, k] of `type`, code * block scale, which
  // 16 bits hold exactly. May be `values` where there are no slots.
  void* rounded;
  int32_t padded_k = 0;  // k where 0; codes and scales past k become zeros
};

cudaError_t LaunchQuantizeRows(cudaStream_t stream, const RowQuantizer& quantizer);

}  // namespace nvfp4
