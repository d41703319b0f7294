// The grouped product of sorted rows on FP4 tensor cores, bf16 and f16: y[r] = W[e(r)] @ q(x[r]) +
// bias, where q rounds to NVFP4. A linear layer is the case of one expert.
//
// Launches: tiles, the walk, and zeros for the rows that no expert owns (routing.cu), the quantizer
// (quantize.cu), then the product (expert_gemm_sm120.cu).
#include "expert_gemm.cuh"
#include "launch_kernel.cuh"
#include "round_rows.cuh"
#include "workspace.cuh"

namespace nvfp4 {
namespace {

struct Workspace {
  ExpertRows rows;
  Start* starts;
  int32_t* ready;
  float* partial_sums;
  QuantizedRows inputs;  // [m, k]
  int64_t bytes;
};

Workspace TakeWorkspace(void* buffer, const GroupedGemmShape& shape) {
  Sections sections(buffer);
  Workspace workspace;
  workspace.rows = TakeExpertRows(&sections, shape.m, shape.e, kMinTileRows, /*sorted=*/true);
  workspace.starts = sections.Take<Start>(kMaxBlocks + 1);
  workspace.ready = sections.Take<int32_t>(kReadyFlags * kMaxBlocks);
  workspace.partial_sums = sections.Take<float>(kPartialSumBytes / 4);
  workspace.inputs = TakeQuantizedRows(&sections, shape.m, PadK(shape.k));
  workspace.bytes = sections.bytes();
  return workspace;
}

}  // namespace

int64_t GroupedGemmW4A4WorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeWorkspace(nullptr, shape).bytes;
}

cudaError_t LaunchGroupedGemmW4A4(cudaStream_t stream, const GroupedGemmCall& call,
                                  const GroupedGemmBuffers& buffers) {
  const GroupedGemmShape& shape = call.shape;
  if (shape.m == 0 || shape.n == 0) return cudaSuccess;
  const Workspace workspace = TakeWorkspace(buffers.workspace, shape);
  const GemmPlan plan = PlanSm120(shape.m, shape.e);
  ExpertGemm gemm = {};
  gemm.rows = workspace.rows;
  gemm.rule = plan.rule;
  gemm.partial_sums = workspace.partial_sums;
  gemm.type = call.type;
  gemm.left = {buffers.x, nullptr, 1, nullptr, nullptr};
  gemm.weight = buffers.weight;
  gemm.bias_rows = static_cast<int32_t>(shape.n);
  gemm.parts = static_cast<int32_t>(shape.parts);
  gemm.k = static_cast<int32_t>(shape.k);
  gemm.columns = static_cast<int32_t>(shape.n);
  gemm.output = {buffers.y, call.type, nullptr};
  gemm.walk = MakeWalk(plan, gemm, workspace.starts, workspace.ready);
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchGroupTiles(stream, buffers.group_sizes, shape.m, shape.e,
                                              workspace.rows, plan.rule, Walks{1, {gemm.walk, {}}},
                                              {buffers.y, shape.n * Bytes(call.type)}));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchEncodeRows(stream, call.activation_scale, shape.m, shape.e,
                                              nullptr, workspace.inputs, &gemm));
  return plan.launch(stream, gemm);
}

}  // namespace nvfp4
