// The grouped product of sorted rows on an engine, bf16 and f16: y[r] = W[e(r)] @ x[r] + bias; in
// W4A4 of rows rounded to NVFP4 (see moe_w4a16.cu).
//
// Two launches for each chunk of rows. The first makes the tiles, the schedule, and zeros for the
// rows that no expert owns (sort_by_expert.cu). The second is the product (expert_gemm_sm90.cu,
// expert_gemm_sm80.cu), which may start while the first ends. A linear layer has one expert.
#include "cuda/launch_kernel.cuh"
#include "cuda/layers/engine_products.cuh"
#include "cuda/quantizers/round_rows.cuh"

namespace nvfp4 {
namespace {

struct Workspace {
  ProductTables tables;
  uint8_t* rounded;  // [rows of a chunk, k], room that W4A16 leaves unused
  float* row_scale;  // [rows of a chunk]
  int64_t bytes;
};

Workspace TakeWorkspace(void* buffer, const GroupedGemmShape& shape) {
  Sections sections(buffer);
  Workspace workspace;
  const int64_t rows = EngineChunkRows(shape);
  workspace.tables = TakeProductTables(&sections, rows, shape.e, /*sorted=*/true, 1);
  workspace.rounded = sections.Take<uint8_t>(2 * rows * shape.k);
  workspace.row_scale = sections.Take<float>(rows);
  workspace.bytes = sections.bytes();
  return workspace;
}

cudaError_t LaunchChunk(cudaStream_t stream, const GroupedGemmCall& call,
                        const GroupedGemmBuffers& buffers, const Workspace& workspace,
                        const RowChunk& chunk) {
  const GemmPlan plan = PlanGemm(call.engine, chunk.rows, call.shape.e);
  ExpertGemm gemm = MakeGroupedProduct(call, buffers, chunk, workspace.tables, plan);
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchTables(stream, call, buffers, chunk, gemm));
  if (call.activation_scale != ActivationScale::kNone) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchRoundRows(stream, call.activation_scale, chunk.rows,
                                               call.shape.e, nullptr, workspace.row_scale,
                                               workspace.rounded, &gemm));
  }
  return plan.launch(stream, gemm);
}

}  // namespace

int64_t GroupedGemmW4A16WorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeWorkspace(nullptr, shape).bytes;
}

cudaError_t LaunchGroupedGemmW4A16(cudaStream_t stream, const GroupedGemmCall& call,
                                   const GroupedGemmBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const Workspace workspace = TakeWorkspace(buffers.workspace, call.shape);
  return ForRowChunks(call, buffers, [&](const RowChunk& chunk) {
    return LaunchChunk(stream, call, buffers, workspace, chunk);
  });
}

}  // namespace nvfp4
