// The steps before and after the GEMMs of moe_w4a4_sm100.cu and grouped_gemm_w4a4_sm100.cu. Rows
// are quantized to the form of fp4_groups.cuh. Scales and biases turn the sums of a GEMM into
// values.
#pragma once

#include "cuda/epilogues/activations.cuh"
#include "cuda/gemm/fp4_groups.cuh"

namespace nvfp4 {

// The sums of a GEMM: value[r, j] = sum[r, j] * global_scale[e, part of j] * (scale of row r) +
// bias[e, j].
struct Fp4Sums {
  const __nv_bfloat16* values;  // [rows, stride]
  int64_t stride;
  int32_t columns;
  const float* global_scale;  // [e, parts]
  int32_t parts;
  bool interleaved;          // whether columns of the two parts alternate
  const float* input_scale;  // [e]; null if each row has its own scale
  const float* row_scale;    // [rows]
  const float* bias;         // [e, columns] or null

  // Returns the scale of the sums of a row, for columns of one part.
  __device__ __forceinline__ float Scale(int64_t row, int64_t expert, int part) const {
    return global_scale[expert * parts + part] *
           (input_scale != nullptr ? input_scale[expert] : row_scale[row]);
  }
  __device__ __forceinline__ int PartOf(int32_t column) const {
    if (parts == 1) return 0;
    if (parts > 2) return column;
    return interleaved ? column & 1 : static_cast<int>(2 * int64_t{column} >= columns);
  }
  __device__ __forceinline__ float Bias(int64_t expert, int32_t column) const {
    return bias == nullptr ? 0.0f : bias[expert * columns + column];
  }
};

inline Fp4Sums MakeFp4Sums(const __nv_bfloat16* values, int64_t stride, int64_t columns,
                           const ExpertWeights& weight, int64_t parts, bool by_expert,
                           const float* row_scale) {
  return {values,
          stride,
          static_cast<int32_t>(columns),
          weight.global_scale,
          static_cast<int32_t>(parts),
          /*interleaved=*/false,
          by_expert ? weight.input_scale : nullptr,
          row_scale,
          weight.bias};
}

// Sorted row r is x[slots[r] / slots_per_row] * slot_weights[slots[r]], rounded to bfloat16.
// Without slots it is x[r], and without slot_weights nothing is multiplied.
struct GatheredRows {
  const __nv_bfloat16* x;  // [*, k]
  const int32_t* slots;
  int32_t slots_per_row;
  const float* slot_weights;
  int32_t k;
};

// Sorted row r is the activation of the values of sums[r], rounded to bfloat16.
struct ActivatedRows {
  Fp4Sums sums;
  ActivationParameters activation;
  int32_t k;
};

// How rows are quantized.
struct Fp4Quantizer {
  ExpertRows rows;
  int64_t max_rows;  // upper bound of rows.starts[num_experts]
  int32_t num_experts;
  const float* input_scale;  // [e]; if null, amax(row) / 2688
  float* row_scale;          // [max_rows]; written if input_scale is null
  Fp4Rows output;
};

// Quantizes rows with the same bits as `numerics.nvfp4.quantize`, with one exception: a block that
// holds NaN or infinity gets the scale NaN. Pads rows with zeros.
cudaError_t LaunchQuantizeFp4(cudaStream_t stream, const Fp4Quantizer& quantizer,
                              const GatheredRows& source);
cudaError_t LaunchQuantizeFp4(cudaStream_t stream, const Fp4Quantizer& quantizer,
                              const ActivatedRows& source);

// y[r] = the values of sums[r], for the rows that experts own.
cudaError_t LaunchFinishFp4(cudaStream_t stream, const Fp4Sums& sums, const ExpertRows& rows,
                            int64_t max_rows, int64_t num_experts, __nv_bfloat16* y);

// y[t] = sum over j, in order, of weights[t, j] * the values of sums[places[t, j]]. The sums have
// one part.
struct Fp4Combine {
  Fp4Sums sums;
  const int32_t* places;        // [t, top_k]; set for slots that are routed
  const int32_t* expert_ids;    // [t, top_k]
  const float* expert_weights;  // [t, top_k]; if null, all weights are 1
  __nv_bfloat16* y;             // [t, columns]
  int64_t t;
  int32_t top_k, num_experts;
};

cudaError_t LaunchCombineFp4(cudaStream_t stream, const Fp4Combine& combine);

}  // namespace nvfp4
