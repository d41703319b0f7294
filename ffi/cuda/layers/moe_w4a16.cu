// Computes one expert layer in bf16 or f16 on the engine of an architecture:
//   y[t] = sum_j w[t, j] * (W2[e] @ act(W1[e] @ x[t] + b1[e]) + b2[e]), e = ids[t, j]
// In W4A4, the rows of both GEMMs are rounded to NVFP4 first. Code * block scale is exact in 16
// bits, so that each product equals that of FP4 tensor cores.
//
// Launches for each chunk of tokens:
//   sort        sorts slots by expert, lists tiles, schedules GEMMs       sort_by_expert.cu
//   scale       x[t] * w[t, j], sorted, if weights multiply the inputs     below
//   round       in W4A4: rounds the rows of GEMM 1. With token scales, each token once and in its
//               own place; otherwise in sorted order                       quantize.cu
//   GEMM 1      gathers x; W1, bias, activation -> a [rows, i]             expert_gemm_sm*.cu
//   round       in W4A4: rounds a in place, if the epilogue of GEMM 1 cannot: with token scales,
//               and if gate and up alternate                               quantize.cu
//   GEMM 2      W2, bias -> d [slots, h], in the type of x                 expert_gemm_sm*.cu
//   combine     y[t] = sum of w[t, j] * d[t, j], in order of j             combine.cu
//
// The last launch may be left to a norm that follows (combine_rms_norm.cu), if there is one chunk.
//
// A handful of slots needs no sort. Two kernels then run the layer, which group slots and round
// inside:
//   GEMM 1      W1, bias, activation -> a [slots, i]                       expert_gemm_few.cu
//   GEMM 2      W2, bias and combine -> y                                  combined_gemm_few.cu
//
// From sm_90 on, the sort, GEMM 1, GEMM 2 and combine may each start before the launch before them
// ends.
#include "cuda/epilogues/finish.cuh"
#include "cuda/gemm/expert_gemm_few.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/layers/engine_products.cuh"
#include "cuda/layers/round_rows.cuh"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // 16-bit elements in 16 bytes

// out[r] = x[slots[r] / top_k] * weights[slots[r]] for sorted rows r, rounded to T.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    ScaleRows(const T* x, const float* weights, ExpertRows rows, int32_t num_experts, int32_t top_k,
              int32_t h, T* out) {
  const int32_t vectors = h / kVector;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / vectors, column = index % vectors * kVector;
  if (row >= rows.starts[num_experts]) return;
  const int32_t slot = rows.slots[row];
  T values[kVector];
  *reinterpret_cast<uint4*>(values) =
      *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(slot / top_k) * h + column);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    values[i] = FromFloat<T>(ToFloat(values[i]) * weights[slot]);
  }
  *reinterpret_cast<uint4*>(out + row * h + column) = *reinterpret_cast<uint4*>(values);
}

template <typename T>
cudaError_t LaunchScaleRows(cudaStream_t stream, const MoECall& call, const TokenChunk& chunk,
                            const MoEW4A16Workspace& workspace, ExpertGemm* up) {
  T* scaled = reinterpret_cast<T*>(workspace.down);
  const int64_t vectors = chunk.slots * (call.shape.h / kVector);
  const dim3 grid(static_cast<unsigned>(CeilDiv(vectors, kThreads)));
  NVFP4_RETURN_IF_CUDA_ERROR(Launch(stream, grid, kThreads, ScaleRows<T>,
                                    static_cast<const T*>(up->left.values), chunk.expert_weights,
                                    up->rows, static_cast<int32_t>(call.shape.e),
                                    up->left.slots_per_row, up->k, scaled));
  up->left = {scaled, nullptr, 1, static_cast<int32_t>(chunk.slots), nullptr, nullptr};
  return cudaSuccess;
}

// row_scale[r] = scales[slots[r] / top_k] for sorted rows r.
__global__ void __launch_bounds__(kThreads)
    SortScales(const float* scales, ExpertRows rows, int32_t num_experts, int32_t top_k,
               float* row_scale) {
  const int32_t row = static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (row < rows.starts[num_experts]) row_scale[row] = scales[rows.slots[row] / top_k];
}

// Rounds each token once, with the scale of that token.
cudaError_t LaunchRoundTokens(cudaStream_t stream, const MoECall& call, const TokenChunk& chunk,
                              const MoEW4A16Workspace& workspace, ExpertGemm* up) {
  auto* scales = reinterpret_cast<float*>(workspace.activated);  // free until GEMM 1
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchRoundGathered(stream, chunk.tokens, scales, workspace.down, up));
  up->left.row_scale = workspace.row_scale;
  const dim3 grid(static_cast<unsigned>(CeilDiv(chunk.slots, kThreads)));
  return Launch(stream, grid, kThreads, SortScales, scales, up->rows,
                static_cast<int32_t>(call.shape.e), up->left.slots_per_row, workspace.row_scale);
}

// Launches GEMM 1 and, together with combine, GEMM 2.
cudaError_t LaunchFew(cudaStream_t stream, const MoECall& call, const TokenChunk& chunk,
                      LayerProducts products) {
  auto& [up, down] = products;
  if (call.activation_scale == ActivationScale::kStatic) {
    up.left.input_scale = up.weight.input_scale;
    down.left.input_scale = down.weight.input_scale;
  }
  const auto slots = static_cast<int32_t>(chunk.slots), e = static_cast<int32_t>(call.shape.e);
  const FewSlots last = {chunk.expert_ids, slots, e, {}, 0, 0};
  const bool row_is_unchanged = call.x_is_unchanged && call.shape.t == 1;
  const FewSlots first = {chunk.expert_ids, slots,          e,
                          down.weight,      down.m_tiles(), (down.k + kTileK - 1) / kTileK,
                          row_is_unchanged};
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchExpertGemmFew(stream, up, first));
  return LaunchCombinedGemmFew(stream, down, last, MakeCombineTokens(call, chunk));
}

// Launches what changes x between the sort and GEMM 1.
cudaError_t LaunchInputs(cudaStream_t stream, const MoECall& call, const TokenChunk& chunk,
                         const MoEW4A16Workspace& workspace, ExpertGemm* up) {
  const float* weights = call.weight_on_input ? chunk.expert_weights : nullptr;
  if (call.activation_scale == ActivationScale::kToken && weights == nullptr) {
    return LaunchRoundTokens(stream, call, chunk, workspace, up);
  }
  if (call.activation_scale != ActivationScale::kNone) {
    return LaunchRoundRows(stream, call.activation_scale, chunk.slots, call.shape.e, weights,
                           workspace.row_scale, workspace.down, up);
  }
  if (weights == nullptr) return cudaSuccess;
  return call.type == DataType::kF16
             ? LaunchScaleRows<__half>(stream, call, chunk, workspace, up)
             : LaunchScaleRows<__nv_bfloat16>(stream, call, chunk, workspace, up);
}

cudaError_t LaunchSortedProducts(cudaStream_t stream, const MoECall& call, const TokenChunk& chunk,
                                 const MoEW4A16Workspace& workspace, const GemmKernel& kernel,
                                 LayerProducts products) {
  auto& [up, down] = products;
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchSort(stream, call, chunk, products));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchInputs(stream, call, chunk, workspace, &up));
  // The epilogue of GEMM 1 rounds its outputs if their scale is known beforehand.
  const bool fused =
      call.activation_scale == ActivationScale::kStatic && CanRoundOutputs(call.activation);
  if (fused) up.output.input_scale = down.left.input_scale = down.weight.input_scale;
  NVFP4_RETURN_IF_CUDA_ERROR(kernel.launch(stream, up));
  if (call.activation_scale != ActivationScale::kNone && !fused) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchRoundRows(stream, call.activation_scale, chunk.slots,
                                               call.shape.e, nullptr, workspace.row_scale,
                                               workspace.activated, &down));
  }
  return kernel.launch(stream, down);
}

cudaError_t LaunchChunk(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers,
                        const MoEW4A16Workspace& workspace, int64_t first) {
  const TokenChunk chunk = MakeTokenChunk(call, buffers, first);
  const GemmKernel kernel = ChooseGemm(call.engine, chunk.slots, call.shape.e);
  const LayerProducts products = MakeLayerProducts(call, buffers, chunk, workspace.tables, kernel,
                                                   workspace.activated, workspace.down);
  const LayerForm form = ChooseLayerForm(call.shape, call.type, call.activation_scale,
                                         call.weight_on_input, chunk.slots, BlockSharedBytes());
  if (form == LayerForm::kFewSlots) return LaunchFew(stream, call, chunk, products);
  NVFP4_RETURN_IF_CUDA_ERROR(
      LaunchSortedProducts(stream, call, chunk, workspace, kernel, products));
  if (buffers.combine != nullptr && chunk.tokens == call.shape.t) {
    *buffers.combine = {MakeCombineTokens(call, chunk), workspace.down, call.type};
    return cudaSuccess;
  }
  return LaunchCombineChunk(stream, call, chunk, workspace.down);
}

}  // namespace

cudaError_t LaunchMoEW4A16(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const MoEW4A16Workspace workspace = TakeMoEW4A16(buffers.workspace, call.shape);
  for (int64_t first = 0; first < call.shape.t; first += ChunkTokens(call.shape)) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchChunk(stream, call, buffers, workspace, first));
  }
  return cudaSuccess;
}

}  // namespace nvfp4
