// A linear layer in W4A16 for one row of x, in one kernel without a workspace.
#pragma once

#include "cuda/gemm/expert_gemm.cuh"

namespace nvfp4 {

// How a layer is cut: a block computes `slabs` slabs of 16 outputs, and `teams` warps divide the k
// of each.
struct LinearRowCut {
  int32_t slabs, teams;
  int32_t shared_bytes;  // dynamic shared memory of a block
};
LinearRowCut CutLinearRow(int64_t n, int64_t k);

// Computes `gemm`, without an activation, for one row and one expert. It reads neither gemm.rows
// nor gemm.schedule. If gemm.schedule_is_unchanged is set, the weights are unchanged since the
// previous kernel. `norm` computes x, and is null if x exists. starts_next: whether the next kernel
// may start at once (launch_kernel.cuh).
cudaError_t LaunchLinearRow(cudaStream_t stream, const ExpertGemm& gemm, const InputNorm* norm,
                            bool starts_next);

}  // namespace nvfp4
