// The form of the kernel for linear layers with few rows (linear_few.cuh) that has wide output
// tiles. It takes any number of rows up to kLinearFewRows and any k, and needs clusters.
#pragma once

#include "cuda/gemm/linear_few.cuh"

namespace nvfp4 {

// Cuts a layer with n outputs and `k_tiles` weight tiles along k for the current device.
LinearFewCut CutLinearWide(int64_t rows, int64_t n, int64_t k_tiles);

cudaError_t LaunchLinearWide(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows,
                             const LinearFewCut& cut);

}  // namespace nvfp4
