// Quantizes activations to NVFP4 for a W4A4 GEMM; see quantize.cu.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/routing/expert_rows.h"
#include "nvfp4.h"

namespace nvfp4 {

struct RowQuantizer {
  // If rows.starts is null, all max_rows rows are quantized, and input_scale must be null.
  ExpertRows rows;
  int64_t max_rows;  // upper bound of rows.starts[num_experts]
  int32_t num_experts;
  DataType type;
  const void* values;    // [*, k]
  const int32_t* slots;  // if set, sorted row r is row slots[r] / slots_per_row
  int32_t slots_per_row;
  const float* slot_weights;  // if set, row r is first multiplied by slot_weights[slots[r]]
  int32_t k;
  const float* input_scale;  // [e]: global scales of rows; if null, amax(row) / 2688
  uint8_t* codes;            // [max_rows, k/2] of [max_rows, padded_k/2], in sorted order
  uint8_t* block_scale;      // [max_rows, k/16] of [max_rows, padded_k/16]
  float* row_scale;          // [max_rows]: receives the global scale of each row; may be null
  // If set, receives code * block scale instead of codes and scales: [max_rows, k] of `type`, which
  // 16 bits hold exactly. It may be `values` if there are no slots.
  void* rounded;
  int32_t padded_k = 0;  // 0 means k; codes and scales past k become zeros
};

cudaError_t LaunchQuantizeRows(cudaStream_t stream, const RowQuantizer& quantizer);

}  // namespace nvfp4
