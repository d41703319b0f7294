// Joins the results of attention for the parts of the keys; see merge_parts.cu.
#pragma once

#include "cuda/attention/attention.cuh"

namespace nvfp4 {

// Writes y from the `splits` parts of each row, at most kSplitBlocks, that the preceding kernel has
// written. The kernel overlaps with that one.
cudaError_t LaunchMergeParts(cudaStream_t stream, const AttentionCall& call,
                             const AttentionBuffers& buffers, const Parts& parts, int splits);

}  // namespace nvfp4
