// The recurrence of Mamba-2 for prompts: divides the workspace, and launches the two kernels.
#include "cuda/recurrent/chunk_scan.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"

namespace nvfp4 {
namespace {

ChunkSizes SizesOf(const Mamba2ScanCall& c) {
  return {c.b, c.t, c.groups, c.heads / c.groups, c.n, c.p};
}

}  // namespace

int64_t Mamba2ScanWorkspaceBytes(const Mamba2ScanCall& c) {
  return ChunkWorkspaceBytes(Recurrence::kMamba2, SizesOf(c));
}

cudaError_t LaunchMamba2Scan(cudaStream_t stream, const Mamba2ScanCall& c,
                             const Mamba2ScanBuffers& p) {
  const ChunkSizes sizes = SizesOf(c);
  const ChunkBuffers chunks = DivideWorkspace(Recurrence::kMamba2, sizes, p.workspace);
  const ScanBuffers scan = {p.x, p.D, p.lengths, p.state, p.y};
  const int chunk = ScanChunk<Recurrence::kMamba2>();
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchMamba2Prepare(stream, c, p, chunks, chunk));
  return LaunchScan<Recurrence::kMamba2>(stream, sizes, scan, chunks, chunk);
}

}  // namespace nvfp4
