// The gated delta rule for prompts: divides the workspace, and launches the two kernels.
#include "cuda/recurrent/chunk_scan.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"

namespace nvfp4 {
namespace {

ChunkSizes SizesOf(const DeltaRuleCall& c) { return {c.b, c.t, c.key_heads, c.shared, c.d, c.e}; }

}  // namespace

int64_t DeltaRuleWorkspaceBytes(const DeltaRuleCall& c) {
  return ChunkWorkspaceBytes(Recurrence::kDelta, SizesOf(c));
}

cudaError_t LaunchDeltaRule(cudaStream_t stream, const DeltaRuleCall& c,
                            const DeltaRuleBuffers& p) {
  const ChunkSizes sizes = SizesOf(c);
  const ChunkBuffers chunks = DivideWorkspace(Recurrence::kDelta, sizes, p.workspace);
  const ScanBuffers scan = {p.y, nullptr, p.lengths, p.state, p.y};
  const int chunk = ScanChunk<Recurrence::kDelta>();
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchDeltaPrepare(stream, c, p, chunks, chunk));
  return LaunchScan<Recurrence::kDelta>(stream, sizes, scan, chunks, chunk);
}

}  // namespace nvfp4
