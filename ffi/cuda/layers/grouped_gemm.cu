// Computes y[r] = W[e(r)] @ x[r] * global_scale + bias for rows that come sorted by expert, with
// the plain GEMM. A linear layer is the case of one expert. The targets for sm_80 and sm_90a run
// every call here that grouped_gemm_w4a16.cu does not support.
//
// Launches:
//   rows        lists tiles, and writes zeros to rows that no expert owns   group_rows.cu
//   quantize    in W4A4: quantizes x                                        quantize.cu
//   GEMM        W, bias -> y                                                plain_gemm.cu
#include "cuda/gemm/plain_gemm.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/quantizers/quantize.cuh"
#include "cuda/routing/group_rows.cuh"
#include "cuda/workspace.h"

namespace nvfp4 {
namespace {}  // namespace

cudaError_t LaunchGroupedGemm(cudaStream_t stream, const GroupedGemmCall& call,
                              const GroupedGemmBuffers& buffers) {
  const GroupedGemmShape& shape = call.shape;
  const bool quantized = call.activation_scale != ActivationScale::kNone;
  const GroupedGemmWorkspace workspace = TakeGroupedGemm(buffers.workspace, shape);
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchGroupTiles(stream, buffers.group_sizes, 0, shape.m, shape.e,
                                              workspace.rows, kPlainRule, TileSchedules{},
                                              {buffers.y, shape.n * Bytes(call.type)}));

  PlainLeft left = {buffers.x, nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  if (quantized) {
    const QuantizedRows& rows = workspace.quantized;
    const bool is_static = call.activation_scale == ActivationScale::kStatic;
    const RowQuantizer quantizer = {workspace.rows,
                                    shape.m,
                                    static_cast<int32_t>(shape.e),
                                    call.type,
                                    buffers.x,
                                    nullptr,
                                    1,
                                    nullptr,
                                    static_cast<int32_t>(shape.k),
                                    is_static ? buffers.weight.input_scale : nullptr,
                                    rows.codes,
                                    rows.block_scale,
                                    rows.row_scale,
                                    /*rounded=*/nullptr};
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchQuantizeRows(stream, quantizer));
    left = {nullptr, nullptr, 1, nullptr, rows.codes, rows.block_scale, rows.row_scale};
  }
  PlainGemm gemm = {};
  gemm.rows = workspace.rows;
  gemm.max_tiles = MaxTiles(shape.m, shape.e, kTileRows);
  gemm.type = call.type;
  gemm.left = left;
  gemm.weight = buffers.weight;
  gemm.weight_rows = shape.n;
  gemm.bias_rows = shape.n;
  gemm.parts = static_cast<int32_t>(shape.parts);
  gemm.k = static_cast<int32_t>(shape.k);
  gemm.columns = static_cast<int32_t>(shape.n);
  gemm.output = {buffers.y, call.type, nullptr};
  return LaunchPlainGemm(stream, gemm);
}

}  // namespace nvfp4
