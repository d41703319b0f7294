// Chooses the kernels of an attention call.
#include "cuda/attention/attention.cuh"

namespace nvfp4 {

int64_t AttentionWorkspaceBytes(const AttentionShape& shape) {
  Sections sections(nullptr);
  TakeParts(&sections, shape, Splits(shape));
  return sections.bytes();
}

int64_t LatentAttentionWorkspaceBytes(const AttentionShape& shape) {
  Sections sections(nullptr);
  TakeParts(&sections, shape, LatentSplits(shape));
  return sections.bytes();
}

cudaError_t LaunchAttention(cudaStream_t stream, const AttentionCall& call,
                            const AttentionBuffers& buffers) {
  if (call.is_empty()) return cudaSuccess;
  if (buffers.k_scale != nullptr) return LaunchAttentionFp8(stream, call, buffers);
  if (ComputeCapabilityMajor() == 9 && FillsSm90(call.shape)) {
    return LaunchAttentionSm90(stream, call, buffers);
  }
  return LaunchAttentionSm80(stream, call, buffers);
}

}  // namespace nvfp4
