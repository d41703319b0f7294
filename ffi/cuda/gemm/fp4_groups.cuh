// A GEMM of NVFP4 rows by the NVFP4 weights of their experts, in the form that CUTLASS's grouped
// block-scaled collectives need. It consists of arrays in device memory, with one entry for each
// expert.
//
//   output[r, j] = alpha[e] * sum_b (weight_scale[j, b] * row_scale[r, b] * dot of 16 codes)
//
// Weights are operand A and rows are operand B, so that m counts weight rows, and n sorted rows,
// which may be few. The output is transposed: the outputs of a sorted row are contiguous.
//
// This file does not need CUTLASS, because the arrays are plain bytes. fp4_gemm_sm100.cu and a test
// compare them with CUTLASS's own types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cuda/gemm/fp4_groups.h"
#include "cuda/launch.h"
#include "cuda/routing/expert_rows.h"

namespace nvfp4 {

// The quantized rows of a GEMM.
struct Fp4Rows {
  uint8_t* codes;        // [rows, k/2]
  uint8_t* block_scale;  // [MaxScaleTiles, k/64, 512]; expert e begins at FirstScaleTile
  int32_t k;             // padded to a multiple of 64
};

// One GEMM of all experts, which is to be packed into `groups`.
struct Fp4Product {
  Fp4Groups groups;
  ExpertWeights weight;  // layout "fp4_128x64"
  int32_t weight_rows;   // weight rows of an expert, without padding
  Fp4Rows rows;
  __nv_bfloat16* output;  // [rows, output_stride]
  int64_t output_stride;  // a multiple of 8
  bool scaled;            // if set, alpha = global_scale[e, 0] * input_scale[e], otherwise 1
};

struct PackedProducts {
  int32_t count;
  Fp4Product products[2];
  ExpertRows rows;
  int32_t max_rows;
  int32_t* places;  // if set, receives the sorted row of each slot
};

cudaError_t LaunchPackGroups(cudaStream_t stream, const PackedProducts& products);

// From this mean number of rows of an expert on, the collective with large tiles runs.
constexpr int64_t kManyRows = 128;

// Launches the GEMM of packed groups: that of fp4_gemm_sm100.cu or, on devices without its
// instructions and in builds with the emulation, that of fp4_gemm_emulated.cu.
cudaError_t LaunchFp4Gemm(cudaStream_t stream, const Fp4Groups& groups, int64_t rows,
                          void* workspace);
cudaError_t LaunchFp4GemmSm100(cudaStream_t stream, const Fp4Groups& groups, bool many_rows,
                               void* workspace);
cudaError_t LaunchFp4GemmEmulated(cudaStream_t stream, const Fp4Groups& groups);

}  // namespace nvfp4
