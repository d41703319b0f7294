// Computes y[r] = W[e(r)] @ q(x[r]) + bias in W4A4 on FP4 tensor cores of compute capability 10.x,
// in bf16. q rounds to NVFP4. Rows come sorted by expert. A linear layer is the case of one expert.
//
// Launches:
//   rows        starts of each expert; zeros for rows that no expert owns   group_rows.cu
//   pack        packs the arguments of the collective                       fp4_groups.cu
//   quantize    quantizes x                                                 fp4_rows.cu
//   GEMM        writes y or, if y needs a further launch, unscaled sums     fp4_gemm_sm100.cu
//   finish      applies scales and bias to these sums                       fp4_rows.cu
//
// The GEMM can write y itself under three conditions: one number scales all sums of an expert,
// there is no bias, and the rows of y are aligned to 16 bytes.
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/fp4_rows.cuh"
#include "cuda/routing/group_rows.cuh"

namespace nvfp4 {
namespace {

// The sort needs a rule; nothing here reads its tiles.
constexpr TileRule kRule = {kUnreadTileRows, 1};

}  // namespace

cudaError_t LaunchGroupedGemmW4A4Sm100(cudaStream_t stream, const GroupedGemmCall& call,
                                       const GroupedGemmBuffers& buffers) {
  const GroupedGemmShape& shape = call.shape;
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const GroupedGemmW4A4Sm100Workspace workspace =
      TakeGroupedGemmW4A4Sm100(buffers.workspace, shape);
  const auto m = static_cast<int32_t>(shape.m), k = static_cast<int32_t>(shape.k);
  const bool by_expert = call.activation_scale == ActivationScale::kStatic;
  const bool direct = by_expert && shape.parts == 1 && buffers.weight.bias == nullptr &&
                      shape.n % kOutputMultiple == 0;
  const int64_t stride = PadTo(shape.n, kOutputMultiple);
  auto *y = static_cast<__nv_bfloat16*>(buffers.y),
       *sums = static_cast<__nv_bfloat16*>(workspace.sums);
  const Fp4Rows rows = {workspace.codes, workspace.block_scale,
                        static_cast<int32_t>(PadTo(shape.k, kScaleTileK))};
  const Fp4Product product = {
      workspace.groups, buffers.weight, static_cast<int32_t>(shape.n), rows, direct ? y : sums,
      stride,           direct};

  NVFP4_RETURN_IF_CUDA_ERROR(LaunchGroupTiles(stream, buffers.group_sizes, 0, shape.m, shape.e,
                                              workspace.rows, kRule, TileSchedules{},
                                              {y, shape.n * Bytes(call.type)}));
  NVFP4_RETURN_IF_CUDA_ERROR(
      LaunchPackGroups(stream, {1, {product, {}}, workspace.rows, m, /*places=*/nullptr}));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchQuantizeFp4(
      stream,
      Fp4Quantizer{workspace.rows, shape.m, static_cast<int32_t>(shape.e),
                   by_expert ? buffers.weight.input_scale : nullptr, workspace.row_scale, rows},
      GatheredRows{static_cast<const __nv_bfloat16*>(buffers.x), nullptr, 1, nullptr, k}));
  NVFP4_RETURN_IF_CUDA_ERROR(
      LaunchFp4Gemm(stream, workspace.groups, shape.m, workspace.collective));
  if (direct) return cudaSuccess;
  const Fp4Sums unscaled = MakeFp4Sums(sums, stride, shape.n, buffers.weight, shape.parts,
                                       by_expert, workspace.row_scale);
  return LaunchFinishFp4(stream, unscaled, workspace.rows, shape.m, shape.e, y);
}

}  // namespace nvfp4
