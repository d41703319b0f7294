// Computes one expert layer in W4A4 on FP4 tensor cores of compute capability 10.x, in bf16:
//   y[t] = sum_j w[t, j] * (W2[e] @ q(act(W1[e] @ q(x[t]) + b1[e])) + b2[e]), e = ids[t, j]
// where q rounds to NVFP4.
//
// Launches for each chunk of tokens:
//   sort        sorts slots by expert                                      sort_by_expert.cu
//   pack        the arguments of the collectives of both GEMMs             fp4_groups.cu
//   quantize    x[t], or x[t] * w[t, j], sorted                            fp4_rows.cu
//   GEMM 1      W1 -> sums [rows, n1] in bf16                              fp4_gemm_sm100.cu
//   activate    scales, bias, activation, quantization                     fp4_rows.cu
//   GEMM 2      W2 -> sums [rows, h] in bf16                               fp4_gemm_sm100.cu
//   combine     y[t] = sum of w[t, j] * (scales * sums + b2) over j        fp4_rows.cu
//
// The collectives run with alpha = 1. Gate and up may have scales of their own, and rows too. The
// kernel that reads the sums therefore applies each scale once, in float32. Unscaled sums stay
// below 2^23 * k and never overflow bf16.
#include <algorithm>

#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/fp4_rows.cuh"
#include "cuda/routing/sort_by_expert.cuh"

namespace nvfp4 {
namespace {

// The sort needs a rule; nothing here reads its tiles.
constexpr TileRule kRule = {kUnreadTileRows, 1};

// One GEMM of a chunk.
struct Product {
  Fp4Product packed;
  Fp4Quantizer quantizer;  // of its rows
  Fp4Sums sums;
};

// GEMM `index` of a chunk: rows of `k` values by `columns` weight rows.
Product MakeProduct(const MoECall& call, const MoEW4A4Sm100Workspace& workspace, int index,
                    int64_t slots, const ExpertWeights& weight, int64_t k, int64_t columns,
                    int64_t parts) {
  const bool by_expert = call.activation_scale == ActivationScale::kStatic;
  const Fp4Rows rows = {workspace.codes, workspace.block_scale,
                        static_cast<int32_t>(PadTo(k, kScaleTileK))};
  float* row_scale = workspace.row_scale[index];
  auto* sums = static_cast<__nv_bfloat16*>(workspace.sums);
  return {{workspace.groups[index], weight, static_cast<int32_t>(columns), rows, sums, columns,
           /*scaled=*/false},
          {workspace.rows, slots, static_cast<int32_t>(call.shape.e),
           by_expert ? weight.input_scale : nullptr, row_scale, rows},
          MakeFp4Sums(sums, columns, columns, weight, parts, by_expert, row_scale)};
}

cudaError_t LaunchChunk(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers,
                        const MoEW4A4Sm100Workspace& workspace, int64_t first, int64_t tokens) {
  const MoEShape& shape = call.shape;
  const int64_t slots = tokens * shape.top_k;
  const auto e = static_cast<int32_t>(shape.e), top_k = static_cast<int32_t>(shape.top_k);
  const auto* x = static_cast<const __nv_bfloat16*>(buffers.x) + first * shape.h;
  const int32_t* expert_ids = buffers.expert_ids + first * shape.top_k;
  const float* expert_weights = buffers.expert_weights + first * shape.top_k;
  auto* y = static_cast<__nv_bfloat16*>(buffers.y) + first * shape.h;

  const int64_t parts = call.activation.gated ? 2 : 1;
  Product up = MakeProduct(call, workspace, 0, slots, buffers.gate_up, shape.h, shape.n1, parts);
  up.sums.interleaved = call.activation.interleaved;
  const Product down = MakeProduct(call, workspace, 1, slots, buffers.down, shape.i, shape.h, 1);

  NVFP4_RETURN_IF_CUDA_ERROR(LaunchSortByExpert(stream, expert_ids, slots, shape.e, workspace.rows,
                                                kRule, TileSchedules{}));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchPackGroups(stream, {2,
                                                       {up.packed, down.packed},
                                                       workspace.rows,
                                                       static_cast<int32_t>(slots),
                                                       workspace.places}));
  const GatheredRows gathered = {x, workspace.rows.slots, top_k,
                                 call.weight_on_input ? expert_weights : nullptr,
                                 static_cast<int32_t>(shape.h)};
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchQuantizeFp4(stream, up.quantizer, gathered));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchFp4Gemm(stream, up.packed.groups, slots, workspace.collective));
  const ActivatedRows activated = {up.sums, call.activation, static_cast<int32_t>(shape.i)};
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchQuantizeFp4(stream, down.quantizer, activated));
  NVFP4_RETURN_IF_CUDA_ERROR(
      LaunchFp4Gemm(stream, down.packed.groups, slots, workspace.collective));
  return LaunchCombineFp4(stream,
                          {down.sums, workspace.places, expert_ids,
                           call.weight_on_input ? nullptr : expert_weights, y, tokens, top_k, e});
}

}  // namespace

cudaError_t LaunchMoEW4A4Sm100(cudaStream_t stream, const MoECall& call,
                               const MoEBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const MoEShape& shape = call.shape;
  const MoEW4A4Sm100Workspace workspace = TakeMoEW4A4Sm100(buffers.workspace, shape);
  const int64_t chunk = ChunkTokens(shape);
  for (int64_t first = 0; first < shape.t; first += chunk) {
    const int64_t tokens = std::min(chunk, shape.t - first);
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchChunk(stream, call, buffers, workspace, first, tokens));
  }
  return cudaSuccess;
}

}  // namespace nvfp4
