// Computes one expert layer in bf16 or f16 on FP4 tensor cores of compute capability 12.x:
//   y[t] = sum_j w[t, j] * (W2[e] @ q(act(W1[e] @ q(x[t]) + b1[e])) + b2[e]), e = ids[t, j]
// where q rounds to NVFP4.
//
// Launches for each chunk of tokens:
//   sort        sorts slots by expert, lists tiles, schedules GEMMs    sort_by_expert.cu
//   quantize    x[t], or x[t] * w[t, j], gathered in sorted order       quantize.cu
//   GEMM 1      W1, bias, activation, quantization -> a [rows, i]       expert_gemm_sm120.cu
//   GEMM 2      W2, bias -> d [slots, h], in the type of x              expert_gemm_sm120.cu
//   combine     y[t] = sum of w[t, j] * d[t, j], in order of j          combine.cu
//
// The epilogue of GEMM 1 cannot quantize in two cases. A token scale needs the whole row. If gate
// and up alternate, several warps hold the outputs of one block. GEMM 1 then stores 16 bits, and a
// launch of quantize.cu follows.
//
// GEMM 1, GEMM 2 and combine may each start before the launch before them ends.
#include "cuda/epilogues/finish.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/layers/engine_products.cuh"
#include "cuda/layers/round_rows.cuh"

namespace nvfp4 {
namespace {

cudaError_t LaunchChunk(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers,
                        const MoEW4A4Workspace& workspace, int64_t first) {
  const MoEShape& shape = call.shape;
  const TokenChunk chunk = MakeTokenChunk(call, buffers, first);
  const GemmKernel kernel = ChooseGemmSm120(chunk.slots, shape.e);
  LayerProducts products = MakeLayerProducts(call, buffers, chunk, workspace.tables, kernel,
                                             workspace.down, workspace.down);
  auto& [up, down] = products;
  const bool fused =
      call.activation_scale == ActivationScale::kStatic && CanRoundOutputs(call.activation);
  if (fused) {
    const QuantizedRows& activated = workspace.activated;
    const float* input_scale = buffers.down.input_scale;
    up.output = {activated.codes, call.type, nullptr, activated.block_scale, input_scale};
    down.left = {
        activated.codes,      nullptr, 1, static_cast<int32_t>(chunk.slots), nullptr, input_scale,
        activated.block_scale};
  }
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchSort(stream, call, chunk, products));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchEncodeRows(stream, call.activation_scale, chunk.slots, shape.e,
                                              call.weight_on_input ? chunk.expert_weights : nullptr,
                                              workspace.inputs, &up));
  NVFP4_RETURN_IF_CUDA_ERROR(kernel.launch(stream, up));
  if (!fused) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchEncodeRows(stream, call.activation_scale, chunk.slots, shape.e,
                                                nullptr, workspace.activated, &down));
  }
  NVFP4_RETURN_IF_CUDA_ERROR(kernel.launch(stream, down));
  return LaunchCombineChunk(stream, call, chunk, workspace.down);
}

}  // namespace

cudaError_t LaunchMoEW4A4(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const MoEW4A4Workspace workspace = TakeMoEW4A4(buffers.workspace, call.shape);
  for (int64_t first = 0; first < call.shape.t; first += ChunkTokens(call.shape)) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchChunk(stream, call, buffers, workspace, first));
  }
  return cudaSuccess;
}

}  // namespace nvfp4
