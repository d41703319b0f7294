// The product of expert_gemm.cuh for at most kFewSlots slots, which are not sorted before.
#pragma once

#include "cuda/gemm/expert_gemm.cuh"

namespace nvfp4 {

constexpr int kFewSlots = 32;  // a lane of a warp for each

// The slots of a product: slot s has row s / left.slots_per_row of the left operand and row s of
// the output, whose tables (ExpertGemm::rows, schedule, left.slots, output.slots) are not read.
// Where left.input_scale is set, rows are rounded to NVFP4 on their way.
struct FewSlots {
  const int32_t* expert_ids;  // [num_slots], any value
  int32_t num_slots;
  int32_t num_experts;
  // Weights that the next product on the stream reads for the same slots, or null.
  ExpertWeights next;
  int32_t next_m_tiles;
  int32_t next_k_tiles;
};

// Whether a product fits into a block's shared memory on the current device, and is faster than
// after a sort. Shared memory holds the rows and, where `rounds` is set, those of the slots too.
// `weights` is the largest number of weights that all slots read, of both products of a layer.
bool FewSlotsFit(int64_t slots, int64_t slots_per_row, int64_t k, bool rounds, int64_t weights);

cudaError_t LaunchExpertGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few,
                                bool overlaps);

}  // namespace nvfp4
