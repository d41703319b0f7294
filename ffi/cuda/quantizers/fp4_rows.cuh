// What stands between the products of moe_w4a4_sm100.cu and grouped_gemm_w4a4_sm100.cu: rows are
// quantized to the form of fp4_groups.cuh, and the sums of a product become values.
#pragma once

#include "cuda/epilogues/activations.cuh"
#include "cuda/gemm/fp4_groups.cuh"

namespace nvfp4 {

// value[r, j] = sum[r, j] * global_scale[e, part of j] * (scale of row r) + bias[e, j]
struct Fp4Sums {
  const __nv_bfloat16* values;  // [rows, stride]
  int64_t stride;
  int32_t columns;
  const float* global_scale;  // [e, parts]
  int32_t parts;
  bool interleaved;          // columns of the two parts alternate
  const float* input_scale;  // [e], or null: scales are those of rows
  const float* row_scale;    // [rows]
  const float* bias;         // [e, columns] or null

  // Of columns of one part: the scale of a row's sums.
  __device__ __forceinline__ float Scale(int64_t row, int64_t expert, int part) const {
    return global_scale[expert * parts + part] *
           (input_scale != nullptr ? input_scale[expert] : row_scale[row]);
  }
  __device__ __forceinline__ int PartOf(int32_t column) const {
    if (parts == 1) return 0;
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

// Row r of the sorted rows is x[slots[r] / slots_per_row] * slot_weights[slots[r]], rounded to
// bfloat16; x[r] without slots, unweighted without weights.
struct GatheredRows {
  const __nv_bfloat16* x;  // [*, k]
  const int32_t* slots;
  int32_t slots_per_row;
  const float* slot_weights;
  int32_t k;
};

// Row r is the activation of the values of sums[r], rounded to bfloat16.
struct ActivatedRows {
  Fp4Sums sums;
  ActivationParameters activation;
  int32_t k;
};

// How rows are quantized.
struct Fp4Quantizer {
  ExpertRows rows;
  int64_t max_rows;  // bound of rows.starts[num_experts]
  int32_t num_experts;
  const float* input_scale;  // [e], or null: amax(row) / 2688
  float* row_scale;          // [max_rows], written where input_scale is null
  Fp4Rows output;
};

// Quantizes as formats.quantize does, but that a block which holds NaN or infinity gets the scale
// NaN; pads with zeros.
cudaError_t LaunchQuantizeFp4(cudaStream_t stream, const Fp4Quantizer& quantizer,
                              const GatheredRows& source);
cudaError_t LaunchQuantizeFp4(cudaStream_t stream, const Fp4Quantizer& quantizer,
                              const ActivatedRows& source);

// y[r, columns] = the values of sums, for the rows that experts own.
cudaError_t LaunchFinishFp4(cudaStream_t stream, const Fp4Sums& sums, const ExpertRows& rows,
                            int64_t max_rows, int64_t num_experts, __nv_bfloat16* y);

// y[t] = sum over j in order of weights[t, j] * the values of sums[places[t, j]], of one part.
struct Fp4Combine {
  Fp4Sums sums;
  const int32_t* places;        // [t, top_k], of slots that are routed
  const int32_t* expert_ids;    // [t, top_k]
  const float* expert_weights;  // [t, top_k], or null: all 1
  __nv_bfloat16* y;             // [t, columns]
  int64_t t;
  int32_t top_k, num_experts;
};

cudaError_t LaunchCombineFp4(cudaStream_t stream, const Fp4Combine& combine);

}  // namespace nvfp4
