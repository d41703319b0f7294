// The gated delta rule for prompts: divides the workspace, and launches the two kernels.
#include "cuda/recurrent/chunk_scan.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"

namespace nvfp4 {
namespace {

ChunkSizes SizesOf(const DeltaRuleCall& c) { return {c.b, c.t, c.key_heads, c.shared, c.d, c.e}; }

template <Recurrence kKind, typename Prepare>
cudaError_t LaunchBoth(cudaStream_t stream, const DeltaRuleCall& c, const DeltaRuleBuffers& p,
                       Prepare prepare) {
  const ChunkSizes sizes = SizesOf(c);
  const ChunkBuffers chunks = DivideWorkspace(kKind, sizes, p.workspace);
  const ScanBuffers scan = {p.y, nullptr, p.lengths, p.state, p.y};
  const int chunk = ScanChunk<kKind>();
  NVFP4_RETURN_IF_CUDA_ERROR(prepare(stream, c, p, chunks, chunk));
  return LaunchScan<kKind>(stream, sizes, scan, chunks, chunk);
}

}  // namespace

int64_t DeltaRuleWorkspaceBytes(const DeltaRuleCall& c) {
  return ChunkWorkspaceBytes(c.channel_decays ? Recurrence::kChannelDelta : Recurrence::kDelta,
                             SizesOf(c));
}

cudaError_t LaunchDeltaRule(cudaStream_t stream, const DeltaRuleCall& c,
                            const DeltaRuleBuffers& p) {
  return c.channel_decays
             ? LaunchBoth<Recurrence::kChannelDelta>(stream, c, p, LaunchChannelDeltaPrepare)
             : LaunchBoth<Recurrence::kDelta>(stream, c, p, LaunchDeltaPrepare);
}

}  // namespace nvfp4
