// Computes y[r] = W[e(r)] @ q(x[r]) + bias for rows that come sorted by expert, in bf16 or f16 on
// FP4 tensor cores of compute capability 12.x. q rounds to NVFP4. A linear layer is the case of one
// expert.
//
// Launches for each chunk of rows:
//   rows        lists tiles, plans the GEMM, and writes zeros to rows
//               that no expert owns                                         group_rows.cu
//   quantize    quantizes x                                                 quantize.cu
//   GEMM        W, bias -> y                                                expert_gemm_sm120.cu
#include "cuda/launch_kernel.cuh"
#include "cuda/layers/engine_products.cuh"
#include "cuda/layers/round_rows.cuh"

namespace nvfp4 {
namespace {

struct Workspace {
  ProductTables tables;
  QuantizedRows inputs;  // [rows of a chunk, k]
  int64_t bytes;
};

Workspace TakeWorkspace(void* buffer, const GroupedGemmShape& shape) {
  Sections sections(buffer);
  Workspace workspace;
  const int64_t rows = EngineChunkRows(shape);
  workspace.tables = TakeProductTables(&sections, rows, shape.e, /*sorted=*/true, 1);
  workspace.inputs = TakeQuantizedRows(&sections, rows, PadK(shape.k));
  workspace.bytes = sections.bytes();
  return workspace;
}

cudaError_t LaunchChunk(cudaStream_t stream, const GroupedGemmCall& call,
                        const GroupedGemmBuffers& buffers, const Workspace& workspace,
                        const RowChunk& chunk) {
  const GemmPlan plan = PlanSm120(chunk.rows, call.shape.e);
  ExpertGemm gemm = MakeGroupedProduct(call, buffers, chunk, workspace.tables, plan);
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchTables(stream, call, buffers, chunk, gemm));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchEncodeRows(stream, call.activation_scale, chunk.rows,
                                              call.shape.e, nullptr, workspace.inputs, &gemm));
  return plan.launch(stream, gemm);
}

}  // namespace

int64_t GroupedGemmW4A4WorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeWorkspace(nullptr, shape).bytes;
}

cudaError_t LaunchGroupedGemmW4A4(cudaStream_t stream, const GroupedGemmCall& call,
                                  const GroupedGemmBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const Workspace workspace = TakeWorkspace(buffers.workspace, call.shape);
  return ForRowChunks(call, buffers, [&](const RowChunk& chunk) {
    return LaunchChunk(stream, call, buffers, workspace, chunk);
  });
}

}  // namespace nvfp4
