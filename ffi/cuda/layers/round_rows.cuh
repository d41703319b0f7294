// Rounds the rows of a GEMM to NVFP4. The result is code * block scale in the type of the rows or,
// for the engine on FP4 tensor cores, codes and scales. The epilogue of the GEMM applies the global
// scale.
#pragma once

#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/quantizers/quantize.cuh"
#include "cuda/workspace.h"

namespace nvfp4 {

// Describes the quantization of the rows of `gemm`, at most `max_rows`, into sorted order. If
// `slot_weights` is set, each row is first multiplied by the weight of its slot. `row_scale`
// [max_rows] is scratch for token scales.
inline RowQuantizer MakeRowQuantizer(ActivationScale scale, int64_t max_rows, int64_t experts,
                                     const float* slot_weights, float* row_scale,
                                     const ExpertGemm* gemm) {
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
  return quantizer;
}

// Rounds the rows of `gemm` to `rounded`, and makes `gemm` read them there.
inline cudaError_t LaunchRoundRows(cudaStream_t stream, ActivationScale scale, int64_t max_rows,
                                   int64_t experts, const float* slot_weights, float* row_scale,
                                   void* rounded, ExpertGemm* gemm) {
  RowQuantizer quantizer =
      MakeRowQuantizer(scale, max_rows, experts, slot_weights, row_scale, gemm);
  quantizer.rounded = rounded;
  const auto rows = static_cast<int32_t>(max_rows);
  gemm->left = {rounded, nullptr, 1, rows, quantizer.row_scale, quantizer.input_scale};
  return LaunchQuantizeRows(stream, quantizer);
}

// Rounds the `num_rows` rows that `gemm` gathers to `rounded`, each once and with a token scale,
// and makes `gemm` read them there. The caller sorts the scales.
inline cudaError_t LaunchRoundGathered(cudaStream_t stream, int64_t num_rows, float* scales,
                                       void* rounded, ExpertGemm* gemm) {
  RowQuantizer quantizer = {};
  quantizer.max_rows = num_rows;
  quantizer.type = gemm->type;
  quantizer.values = gemm->left.values;
  quantizer.k = gemm->k;
  quantizer.row_scale = scales;
  quantizer.rounded = rounded;
  gemm->left.values = rounded;
  return LaunchQuantizeRows(stream, quantizer);
}

// Quantizes the rows of `gemm` to `quantized`, which has PadK(k) columns, and makes `gemm` read
// them there.
inline cudaError_t LaunchEncodeRows(cudaStream_t stream, ActivationScale scale, int64_t max_rows,
                                    int64_t experts, const float* slot_weights,
                                    const QuantizedRows& quantized, ExpertGemm* gemm) {
  RowQuantizer quantizer =
      MakeRowQuantizer(scale, max_rows, experts, slot_weights, quantized.row_scale, gemm);
  quantizer.codes = quantized.codes;
  quantizer.block_scale = quantized.block_scale;
  quantizer.padded_k = static_cast<int32_t>(PadK(gemm->k));
  gemm->left = {quantized.codes,
                nullptr,
                1,
                static_cast<int32_t>(max_rows),
                quantizer.row_scale,
                quantizer.input_scale,
                quantized.block_scale};
  return LaunchQuantizeRows(stream, quantizer);
}

}  // namespace nvfp4
