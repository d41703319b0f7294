// The GEMM of expert_gemm.cuh for at most kFewSlots slots, which need not be sorted.
#pragma once

#include "cuda/gemm/expert_gemm.cuh"

namespace nvfp4 {

constexpr int kFewSlots = 32;  // one for each lane of a warp

// The slots of a GEMM. Slot s has row s / left.slots_per_row of the left operand and row s of the
// output. The tables for sorted rows (ExpertGemm::rows, schedule, left.slots, output.slots) are not
// read. If left.input_scale is set, the kernel rounds rows to NVFP4.
struct FewSlots {
  const int32_t* expert_ids;  // [num_slots]; any value
  int32_t num_slots;
  int32_t num_experts;
  // The weights that the next GEMM on the stream reads for the same slots, or null.
  ExpertWeights next;
  int32_t next_m_tiles;
  int32_t next_k_tiles;
};

// Returns whether a GEMM fits into the shared memory of a block on the current device, and is
// faster here than after a sort. Shared memory holds the rows and, if `rounds` is set, the rows of
// the slots. `weights` is the largest number of weights that all slots can read in both GEMMs of a
// layer.
bool FewSlotsFit(int64_t slots, int64_t slots_per_row, int64_t k, bool rounds, int64_t weights);

cudaError_t LaunchExpertGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few,
                                bool overlaps);

}  // namespace nvfp4
