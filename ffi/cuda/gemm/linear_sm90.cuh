// A linear layer for at most kLinearFewRows rows, in one kernel on wgmma without a workspace:
// for 9.0, with weights in NVFP4, in FP8, or of the type of x.
#pragma once

#include "cuda/gemm/dense_few.cuh"
#include "cuda/gemm/linear_few.cuh"

namespace nvfp4 {

// How a layer is cut. A block has the outputs of 64 weight rows, and its `teams` divide k. The
// `ranks` blocks of a cluster divide it before.
struct LinearSm90Cut {
  int32_t teams;  // 2 or 4
  int32_t ranks;  // up to 4; up to 2 with four teams
};

// Cuts a layer with n outputs for the current device. `few`: whether it has at most 16 rows. The
// cut does not depend on the number of rows otherwise. `weight_bits`: 4, 8 or 16, of a stored
// weight.
LinearSm90Cut CutLinearSm90(int64_t n, int64_t k, bool few, int weight_bits);

// Whether the kernel is faster than that of dense_few.cuh on 9.0. That one is faster if there are
// so many outputs that reading x for each 64 of them costs more than reading the weights. forms.h
// chooses for weights in NVFP4.
bool FitsDenseSm90(const DenseFewCall& call);

// As LaunchLinearFew and LaunchDenseFew. `call` must have weights of the type of x,
// or in FP8.
cudaError_t LaunchLinearSm90(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows);
cudaError_t LaunchDenseSm90(cudaStream_t stream, const DenseFewCall& call,
                            const DenseFewBuffers& buffers);

}  // namespace nvfp4
