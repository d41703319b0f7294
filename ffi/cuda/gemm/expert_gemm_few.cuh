// The two GEMMs of a layer with at most kFewSlots slots, which need not be sorted. forms.h says
// when they run.
#pragma once

#include "cuda/epilogues/combine.cuh"
#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/layers/forms.h"

namespace nvfp4 {

// The slots of a GEMM. Slot s has row s / left.slots_per_row of the left operand and row s of the
// output. The tables for sorted rows (ExpertGemm::rows, schedule, left.slots, output.slots) are not
// read. If left.input_scale is set, the kernel rounds rows to NVFP4.
struct FewSlots {
  const int32_t* expert_ids;  // [num_slots]; any value
  int32_t num_slots;
  int32_t num_experts;
  // The weights that GEMM 2 reads for the same slots. GEMM 1 prefetches them.
  ExpertWeights next;
  int32_t next_m_tiles;
  int32_t next_k_tiles;
  bool row_is_unchanged = false;  // for one token: x is unchanged since the previous kernel
};

// GEMM 1, in expert_gemm_few.cu.
cudaError_t LaunchExpertGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few);

// GEMM 2 together with the sum over the experts of a token, in combined_gemm_few.cu. `gemm` has a
// row for each slot, no activation and no output; `tokens` has the outputs. The kernel overlaps
// with GEMM 1.
cudaError_t LaunchCombinedGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few,
                                  const CombineTokens& tokens);

}  // namespace nvfp4
