// A linear layer for at most kLinearFewRows rows, in one kernel without a workspace.
#pragma once

#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/layers/forms.h"

namespace nvfp4 {

// How a linear layer is cut. A cluster of `ranks` blocks computes an output tile, and a block has
// up to `rank_tiles` of the weight tiles along k.
struct LinearFewCut {
  int32_t slabs;  // slabs of 16 weight rows of an output tile: 1, 4, or 8 in linear_few_wide.cu
  int32_t ranks;  // a power of two, except for eight slabs
  int32_t rank_tiles;
  int32_t shared_bytes;  // dynamic shared memory of a block; 0 if the kernel does not run the layer

  bool fits() const { return shared_bytes != 0; }
};

// Whether the code of the kernel for the current device has clusters, as all code since sm_90.
bool LinearFewHasClusters();

// Cuts a layer with n outputs for the current device, into clusters of blocks if `clusters` is set.
LinearFewCut CutLinearFew(int64_t rows, int64_t n, int64_t k, bool clusters);

// Computes `gemm`, without an activation, for its first `rows` rows and one expert. It reads
// neither gemm.rows nor gemm.schedule. If gemm.schedule_is_unchanged is set, the weights are
// unchanged since the previous kernel.
cudaError_t LaunchLinearFew(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows,
                            const LinearFewCut& cut);

}  // namespace nvfp4
