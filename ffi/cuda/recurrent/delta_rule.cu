// Divides a prompt into chunks, and launches the two kernels of the gated delta rule.
#include "cuda/recurrent/delta_rule.cuh"

#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kLargeChunk = 64, kSmallChunk = 32;

static_assert(kLargeChunk == kDeltaRuleChunk, "the workspace is that of large chunks");

int64_t PaddedTokens(const DeltaRuleCall& c) {
  return CeilDiv(c.t, kLargeChunk) * kLargeChunk * c.b * c.key_heads * c.shared;
}

}  // namespace

int64_t DeltaRuleWorkspaceBytes(const DeltaRuleCall& c) {
  return PaddedTokens(c) * (kRuleWidth + kLargeChunk + 2) * static_cast<int64_t>(sizeof(float));
}

// Large chunks have fewer steps, and small ones fit into the shared memory of every device.
cudaError_t LaunchDeltaRule(cudaStream_t stream, const DeltaRuleCall& c,
                            const DeltaRuleBuffers& p) {
  const int chunk =
      DeltaScanBytes(kLargeChunk, 2) <= BlockSharedBytes() ? kLargeChunk : kSmallChunk;
  const int64_t tokens = PaddedTokens(c);
  float* known = static_cast<float*>(p.workspace);
  float* pairs = known + tokens * kRuleWidth;
  const ChunkBuffers chunks = {known, pairs, pairs + tokens * kLargeChunk};
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchDeltaPrepare(stream, c, p, chunks, chunk));
  return LaunchDeltaScan(stream, c, p, chunks, chunk);
}

}  // namespace nvfp4
