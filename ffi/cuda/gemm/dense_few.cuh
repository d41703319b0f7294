// A linear layer with plain weights for at most kMostDenseRows rows (launch.h), in one kernel
// without a workspace.
#pragma once

#include "cuda/launch.h"

namespace nvfp4 {

// How a layer is cut. A cluster of `ranks` blocks computes the outputs of `tile` weight rows,
// and a block has up to `rank_pieces` of the pieces of k.
struct DenseFewCut {
  int32_t tile;  // 16, 64 or 128
  int32_t ranks;
  int32_t rank_pieces;
  int32_t shared_bytes;  // dynamic shared memory of a block
};

// Cuts a layer for the current device, into clusters of blocks if `clusters` is set.
DenseFewCut CutDenseFew(const DenseFewCall& call, bool clusters);

// As LaunchDenseFew, with a cut of the caller's choice. The call must not be empty.
cudaError_t LaunchDenseCut(cudaStream_t stream, const DenseFewCall& call,
                           const DenseFewBuffers& buffers, const DenseFewCut& cut);

}  // namespace nvfp4
