// Divides a prompt into chunks, and launches the two kernels of the gated delta rule.
#include "cuda/recurrent/delta_rule.cuh"

#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kLargeChunk = 64, kSmallChunk = 32;

static_assert(kLargeChunk == kDeltaRuleChunk, "the workspace is that of large chunks");

int64_t PaddedTokens(const DeltaRuleCall& c) {
  return CeilDiv(c.t, kLargeChunk) * kLargeChunk * c.b * c.key_heads;
}

}  // namespace

int64_t DeltaRuleWorkspaceBytes(const DeltaRuleCall& c) {
  const int64_t numbers = 2 * kRuleWidth + c.shared * (kRuleWidth + kLargeChunk + 2);
  return PaddedTokens(c) * numbers * static_cast<int64_t>(sizeof(float));
}

// Large chunks have fewer steps, and small ones fit into the shared memory of every device.
cudaError_t LaunchDeltaRule(cudaStream_t stream, const DeltaRuleCall& c,
                            const DeltaRuleBuffers& p) {
  const int chunk = HasLargeDeltaScan() ? kLargeChunk : kSmallChunk;
  const int64_t tokens = PaddedTokens(c);
  float* const queries = static_cast<float*>(p.workspace);
  float* const keys = queries + tokens * kRuleWidth;
  float* const known = keys + tokens * kRuleWidth;
  float* const pairs = known + tokens * c.shared * kRuleWidth;
  float* const decays = pairs + tokens * c.shared * kLargeChunk;
  const ChunkBuffers chunks = {queries, keys, known, pairs, decays};
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchDeltaPrepare(stream, c, p, chunks, chunk));
  return LaunchDeltaScan(stream, c, p, chunks, chunk);
}

}  // namespace nvfp4
