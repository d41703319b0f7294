// A small linear layer with plain weights for one row, in one kernel without a workspace.
#pragma once

#include "cuda/launch.h"

namespace nvfp4 {

// Whether the kernel takes the call, and is faster than that of dense_few.cuh. It takes one row,
// without scales. All outputs must be computed at once on the current device.
bool FitsDenseVector(const DenseFewCall& call);

// As LaunchDenseFew. The call must not be empty.
cudaError_t LaunchDenseVector(cudaStream_t stream, const DenseFewCall& call,
                              const DenseFewBuffers& buffers);

}  // namespace nvfp4
