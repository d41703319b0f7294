// Computes one expert layer with the plain GEMM, for any type:
//   y[t] = sum_j w[t, j] * (W2[e] @ act(W1[e] @ x[t] + b1[e]) + b2[e]), e = ids[t, j]
//
// Launches for each chunk of tokens:
//   sort        sorts slots by expert, and lists tiles           sort_by_expert.cu
//   quantize    in W4A4: gathers and quantizes x                 quantize.cu
//   GEMM 1      gathers x; W1, bias, activation -> a [rows, i]   plain_gemm.cu
//   quantize    in W4A4: quantizes a                             quantize.cu
//   GEMM 2      W2, bias -> d [slots, h] float32                 plain_gemm.cu
//   combine     y[t] = sum of w[t, j] * d[t, j], in order of j   combine.cuh
//
// Chunks bound the workspace (d has 4 h bytes for each slot) and keep slot counts within 16 bits.
// Every chunk reads the weights again. With 32768 slots in a chunk, that time does not matter.
//
// The layers on engines run the same sequence with faster kernels.
#include <algorithm>

#include "cuda/epilogues/combine.cuh"
#include "cuda/gemm/plain_gemm.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/quantizers/quantize.cuh"
#include "cuda/routing/sort_by_expert.cuh"
#include "cuda/workspace.h"

namespace nvfp4 {
namespace {

cudaError_t LaunchCombineFloats(cudaStream_t stream, DataType type, const CombineTokens& tokens,
                                const float* down) {
  const FinishedOutputs<float> outputs = {down, tokens.h};
  switch (type) {
    case DataType::kBF16:
      return LaunchCombine<__nv_bfloat16>(stream, tokens, outputs, /*overlaps=*/false);
    case DataType::kF16:
      return LaunchCombine<__half>(stream, tokens, outputs, /*overlaps=*/false);
    case DataType::kF32:
      return LaunchCombine<float>(stream, tokens, outputs, /*overlaps=*/false);
  }
  return cudaErrorInvalidValue;
}

// The tokens of one chunk.
struct Chunk {
  const uint8_t* x;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* y;
  int64_t tokens;
  int64_t slots;
};

// Quantizes `operand` if the call asks for it, and points `operand` to the codes.
cudaError_t QuantizeOperand(cudaStream_t stream, const MoECall& call, const MoEWorkspace& workspace,
                            int64_t max_rows, int64_t k, const float* input_scale,
                            PlainLeft* operand) {
  if (call.activation_scale == ActivationScale::kNone) return cudaSuccess;
  const QuantizedRows& rows = workspace.quantized;
  const RowQuantizer quantizer = {
      workspace.rows,
      max_rows,
      static_cast<int32_t>(call.shape.e),
      call.type,
      operand->values,
      operand->slots,
      operand->slots_per_row,
      operand->slot_weights,
      static_cast<int32_t>(k),
      call.activation_scale == ActivationScale::kStatic ? input_scale : nullptr,
      rows.codes,
      rows.block_scale,
      rows.row_scale,
      /*rounded=*/nullptr};
  *operand = {nullptr, nullptr, 1, nullptr, rows.codes, rows.block_scale, rows.row_scale};
  return LaunchQuantizeRows(stream, quantizer);
}

cudaError_t LaunchGateUp(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers,
                         const MoEWorkspace& workspace, const Chunk& chunk) {
  const MoEShape& shape = call.shape;
  PlainLeft left = {chunk.x,
                    workspace.rows.slots,
                    static_cast<int32_t>(shape.top_k),
                    call.weight_on_input ? chunk.expert_weights : nullptr,
                    nullptr,
                    nullptr,
                    nullptr};
  NVFP4_RETURN_IF_CUDA_ERROR(QuantizeOperand(stream, call, workspace, chunk.slots, shape.h,
                                             buffers.gate_up.input_scale, &left));
  PlainGemm gemm = {};
  gemm.rows = workspace.rows;
  gemm.max_tiles = MaxTiles(chunk.slots, shape.e, kTileRows);
  gemm.type = call.type;
  gemm.left = left;
  gemm.weight = buffers.gate_up;
  gemm.weight_rows = shape.n1;
  gemm.bias_rows = shape.n1;
  gemm.parts = call.activation.gated ? 2 : 1;
  gemm.k = static_cast<int32_t>(shape.h);
  gemm.columns = static_cast<int32_t>(shape.i);
  gemm.activate = true;
  gemm.activation = call.activation;
  gemm.output = {workspace.activated, call.type, nullptr};
  return LaunchPlainGemm(stream, gemm);
}

cudaError_t LaunchDown(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers,
                       const MoEWorkspace& workspace, const Chunk& chunk) {
  const MoEShape& shape = call.shape;
  PlainLeft left = {workspace.activated, nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  NVFP4_RETURN_IF_CUDA_ERROR(QuantizeOperand(stream, call, workspace, chunk.slots, shape.i,
                                             buffers.down.input_scale, &left));
  PlainGemm gemm = {};
  gemm.rows = workspace.rows;
  gemm.max_tiles = MaxTiles(chunk.slots, shape.e, kTileRows);
  gemm.type = call.type;
  gemm.left = left;
  gemm.weight = buffers.down;
  gemm.weight_rows = shape.h;
  gemm.bias_rows = shape.h;
  gemm.parts = 1;
  gemm.k = static_cast<int32_t>(shape.i);
  gemm.columns = static_cast<int32_t>(shape.h);
  gemm.output = {workspace.down, DataType::kF32, workspace.rows.slots};
  return LaunchPlainGemm(stream, gemm);
}

}  // namespace

cudaError_t LaunchMoE(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const MoEShape& shape = call.shape;
  const MoEWorkspace workspace = TakeMoE(buffers.workspace, shape, call.type);
  const int64_t chunk_tokens = ChunkTokens(shape, kPlainChunkSlots);
  const int64_t row_bytes = shape.h * Bytes(call.type);
  for (int64_t first = 0; first < shape.t; first += chunk_tokens) {
    const int64_t tokens = std::min(chunk_tokens, shape.t - first);
    const Chunk chunk = {static_cast<const uint8_t*>(buffers.x) + first * row_bytes,
                         buffers.expert_ids + first * shape.top_k,
                         buffers.expert_weights + first * shape.top_k,
                         static_cast<uint8_t*>(buffers.y) + first * row_bytes,
                         tokens,
                         tokens * shape.top_k};
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchSortByExpert(stream, chunk.expert_ids, chunk.slots, shape.e,
                                                  workspace.rows, kPlainRule, TileSchedules{}));
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchGateUp(stream, call, buffers, workspace, chunk));
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchDown(stream, call, buffers, workspace, chunk));
    const CombineTokens combine = {chunk.expert_ids,
                                   call.weight_on_input ? nullptr : chunk.expert_weights,
                                   chunk.y,
                                   tokens,
                                   static_cast<int32_t>(shape.h),
                                   static_cast<int32_t>(shape.top_k),
                                   static_cast<int32_t>(shape.e)};
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchCombineFloats(stream, call.type, combine, workspace.down));
  }
  return cudaSuccess;
}

}  // namespace nvfp4
