// Rows of a product on an engine, rounded to NVFP4: code * block scale in the type of the rows,
// with the global scale left to the epilogue.
#pragma once

#include "expert_gemm.cuh"
#include "quantize.cuh"

namespace nvfp4 {

// Rounds the rows of `gemm`, at most `max_rows`, in sorted order to `rounded`, and points it there.
// A row is multiplied by slot_weights[its slot] first where they are set. `row_scale` [max_rows] is
// scratch for rows that have scales of their own.
inline cudaError_t LaunchRoundRows(cudaStream_t stream, ActivationScale scale, int64_t max_rows,
                                   int64_t experts, const float* slot_weights, float* row_scale,
                                   void* rounded, ExpertGemm* gemm) {
  const bool by_expert = scale == ActivationScale::kStatic;
  RowQuantizer quantizer = {};
  quantizer.rows = gemm->rows;
  quantizer.max_rows = max_rows;
  quantizer.num_experts = static_cast<int32_t>(experts);
  quantizer.type = gemm->type;
  quantizer.values = gemm->left.values;
  quantizer.slots = gemm->left.slots;
  quantizer.slots_per_row = gemm->left.slots_per_row;
  quantizer.slot_weights = slot_weights;
  quantizer.k = gemm->k;
  quantizer.input_scale = by_expert ? gemm->weight.input_scale : nullptr;
  quantizer.row_scale = by_expert ? nullptr : row_scale;
  quantizer.rounded = rounded;
  gemm->left = {rounded, nullptr, 1, quantizer.row_scale, quantizer.input_scale};
  return LaunchQuantizeRows(stream, quantizer);
}

}  // namespace nvfp4
