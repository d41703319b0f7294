// The grouped product of sorted rows on an engine, bf16 and f16: y[r] = W[e(r)] @ x[r] + bias; in
// W4A4 of rows rounded to NVFP4 (see moe_w4a16.cu).
//
// Launches: tiles, the walk, and zeros for the rows that no expert owns (routing.cu), then the
// product (expert_gemm_sm90.cu, expert_gemm_sm80.cu), which may start while the first ends. A
// linear layer is the case of one expert.
#include "engine_products.cuh"
#include "launch_kernel.cuh"
#include "round_rows.cuh"

namespace nvfp4 {
namespace {

struct Workspace {
  ProductTables tables;
  uint8_t* rounded;  // [m, k], room that W4A16 leaves unused
  float* row_scale;  // [m]
  int64_t bytes;
};

Workspace TakeWorkspace(void* buffer, const GroupedGemmShape& shape) {
  Sections sections(buffer);
  Workspace workspace;
  workspace.tables = TakeProductTables(&sections, shape.m, shape.e, /*sorted=*/true, 1);
  workspace.rounded = sections.Take<uint8_t>(2 * shape.m * shape.k);
  workspace.row_scale = sections.Take<float>(shape.m);
  workspace.bytes = sections.bytes();
  return workspace;
}

}  // namespace

int64_t GroupedGemmW4A16WorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeWorkspace(nullptr, shape).bytes;
}

cudaError_t LaunchGroupedGemmW4A16(cudaStream_t stream, const GroupedGemmCall& call,
                                   const GroupedGemmBuffers& buffers) {
  const GroupedGemmShape& shape = call.shape;
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const Workspace workspace = TakeWorkspace(buffers.workspace, shape);
  const GemmPlan plan = PlanGemm(call.engine, shape.m, shape.e);
  ExpertGemm gemm = MakeGroupedProduct(call, buffers, workspace.tables, plan);
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchTables(stream, call, buffers, gemm));
  if (call.activation_scale != ActivationScale::kNone) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchRoundRows(stream, call.activation_scale, shape.m, shape.e,
                                               nullptr, workspace.row_scale, workspace.rounded,
                                               &gemm));
  }
  return plan.launch(stream, gemm);
}

}  // namespace nvfp4
