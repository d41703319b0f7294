// Computes y[r] = W[e(r)] @ x[r] + bias for rows that come sorted by expert, in bf16 or f16 on the
// engine of an architecture. A linear layer is the case of one expert. In W4A4, rows are rounded to
// NVFP4 first (see moe_w4a16.cu).
//
// Launches for each chunk of rows:
//   rows        lists tiles, schedules the GEMM, and writes zeros to rows
//               that no expert owns. Not in W4A16 if one expert owns all
//               rows: then the host schedules the GEMM                      group_rows.cu
//   round       in W4A4: rounds x                                           quantize.cu
//   GEMM        W, bias -> y; may start before the launch before it ends    expert_gemm_sm*.cu
//
// In W4A16, a linear layer with few rows is one launch of linear_row.cu, linear_few.cu or
// linear_sm90.cu.
#include "cuda/gemm/linear_few.cuh"
#include "cuda/gemm/linear_row.cuh"
#include "cuda/gemm/linear_sm90.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/layers/engine_products.cuh"
#include "cuda/layers/round_rows.cuh"
#include "cuda/scheduling/one_expert.cuh"

namespace nvfp4 {
namespace {

cudaError_t LaunchChunk(cudaStream_t stream, const GroupedGemmCall& call,
                        const GroupedGemmBuffers& buffers,
                        const GroupedGemmW4A16Workspace& workspace, const RowChunk& chunk) {
  const GemmKernel kernel = call.transposed ? ChooseTransposedGemmSm90(chunk.rows, call.shape.e)
                                            : ChooseGemm(call.engine, chunk.rows, call.shape.e);
  ExpertGemm gemm = MakeGroupedProduct(call, buffers, chunk, workspace.tables, kernel);
  const bool quantized = call.activation_scale != ActivationScale::kNone;
  NVFP4_RETURN_IF_CUDA_ERROR(buffers.group_sizes == nullptr && !quantized
                                 ? ScheduleOneExpert(stream, chunk.rows, &gemm)
                                 : LaunchTables(stream, call, buffers, chunk, gemm));
  if (quantized) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchRoundRows(stream, call.activation_scale, chunk.rows,
                                               call.shape.e, nullptr, workspace.row_scale,
                                               workspace.rounded, &gemm));
  }
  return kernel.launch(stream, gemm);
}

// Whether the kernel for few rows can form clusters. The target for sm_80 also runs on newer
// devices, some of which have only the code for sm_80.
bool HasClusters(const GroupedGemmCall& call) {
  return call.engine == EngineKind::kSm90 ||
         (ComputeCapabilityMajor() >= 9 && LinearFewHasClusters());
}

// Returns the kernel that runs a call as a linear layer with few rows.
LinearForm ChooseForm(const GroupedGemmCall& call, const GroupedGemmBuffers& buffers) {
  const GroupedGemmShape& shape = call.shape;
  const bool linear = buffers.group_sizes == nullptr && shape.e == 1 &&
                      call.activation_scale == ActivationScale::kNone;
  if (!linear || call.transposed || call.is_empty() || shape.m > kLinearFewRows) {
    return LinearForm::kNone;
  }
  return ChooseLinearForm(shape.m, shape.n, shape.k,
                          {MultiprocessorCount(), BlockSharedBytes(), HasClusters(call),
                           call.engine == EngineKind::kSm90});
}

cudaError_t LaunchFew(cudaStream_t stream, const GroupedGemmCall& call,
                      const GroupedGemmBuffers& buffers, LinearForm form) {
  ExpertGemm gemm = {};
  gemm.type = call.type;
  gemm.left = {buffers.x, nullptr, 1, static_cast<int32_t>(call.shape.m), nullptr, nullptr};
  gemm.weight = buffers.weight;
  gemm.bias_rows = gemm.columns = static_cast<int32_t>(call.shape.n);
  gemm.parts = static_cast<int32_t>(call.shape.parts);
  gemm.k = static_cast<int32_t>(call.shape.k);
  gemm.output = {buffers.y, call.type, nullptr};
  gemm.schedule_is_unchanged = call.weight_is_unchanged;
  const int64_t rows = call.shape.m;
  if (form == LinearForm::kSm90) return LaunchLinearSm90(stream, gemm, rows);
  if (form == LinearForm::kRow) {
    return LaunchLinearRow(stream, gemm, buffers.norm, call.starts_next);
  }
  return LaunchLinearFew(stream, gemm, rows,
                         CutLinearFew(rows, gemm.columns, gemm.k, HasClusters(call)));
}

}  // namespace

cudaError_t LaunchGroupedGemmW4A16(cudaStream_t stream, const GroupedGemmCall& call,
                                   const GroupedGemmBuffers& buffers) {
  const LinearForm form = ChooseForm(call, buffers);
  const bool computes_norm =
      buffers.norm != nullptr && form == LinearForm::kRow && FitsInputNorm(*buffers.norm);
  if (buffers.norm != nullptr && !computes_norm) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchAddRmsNorm(stream, buffers.norm->call, buffers.norm->buffers));
    GroupedGemmBuffers rest = buffers;
    rest.norm = nullptr;
    return LaunchGroupedGemmW4A16(stream, call, rest);
  }
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  if (form != LinearForm::kNone) return LaunchFew(stream, call, buffers, form);
  const GroupedGemmW4A16Workspace workspace =
      TakeGroupedGemmW4A16(buffers.workspace, call.shape, /*rounds=*/!call.transposed);
  return ForRowChunks(call, buffers, [&](const RowChunk& chunk) {
    return LaunchChunk(stream, call, buffers, workspace, chunk);
  });
}

}  // namespace nvfp4
