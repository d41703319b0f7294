// Computes y[r] = W[e(r)] @ q(x[r]) + bias for rows that come sorted by expert, in bf16 or f16 on
// FP4 tensor cores of compute capability 12.x. q rounds to NVFP4. A linear layer is the case of one
// expert.
//
// Launches for each chunk of rows:
//   rows        lists tiles, schedules the GEMM, and writes zeros to rows
//               that no expert owns                                         group_rows.cu
//   quantize    quantizes x                                                 quantize.cu
//   GEMM        W, bias -> y                                                expert_gemm_sm120.cu
#include "cuda/launch_kernel.cuh"
#include "cuda/layers/engine_products.cuh"
#include "cuda/layers/round_rows.cuh"

namespace nvfp4 {
namespace {

cudaError_t LaunchChunk(cudaStream_t stream, const GroupedGemmCall& call,
                        const GroupedGemmBuffers& buffers,
                        const GroupedGemmW4A4Workspace& workspace, const RowChunk& chunk) {
  const GemmKernel kernel = ChooseGemmSm120(chunk.rows, call.shape.e);
  ExpertGemm gemm = MakeGroupedProduct(call, buffers, chunk, workspace.tables, kernel);
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchTables(stream, call, buffers, chunk, gemm));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchEncodeRows(stream, call.activation_scale, chunk.rows,
                                              call.shape.e, nullptr, workspace.inputs, &gemm));
  return kernel.launch(stream, gemm);
}

}  // namespace

cudaError_t LaunchGroupedGemmW4A4(cudaStream_t stream, const GroupedGemmCall& call,
                                  const GroupedGemmBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const GroupedGemmW4A4Workspace workspace = TakeGroupedGemmW4A4(buffers.workspace, call.shape);
  return ForRowChunks(call, buffers, [&](const RowChunk& chunk) {
    return LaunchChunk(stream, call, buffers, workspace, chunk);
  });
}

}  // namespace nvfp4
