// One expert layer: y[t] = sum_j w[t, j] * (W2[e] @ act(W1[e] @ x[t] + b1[e]) + b2[e]), e = ids[t,
// j].
//
// Launches, for each chunk of tokens:
//   sort        slots by expert, tiles                            sort_by_expert.cu
//   quantize    x, gathered, where activations are quantized      quantize.cu
//   product 1   gather, W1, bias, activation -> a [rows, i]       plain_gemm.cu
//   quantize    a, likewise
//   product 2   W2, bias -> d [slots, h] float32                  plain_gemm.cu
//   combine     y[t] = sum of w[t, j] * d[t, j] over j in order
//
// Chunks bound the workspace (d is 4 h bytes a slot) and let slots be counted in 16 bits; a chunk
// of 32768 slots is long past the point where reading the weights again costs anything.
// Every target of the extension's expert layers runs this sequence.
#include <algorithm>

#include "cuda/gemm/plain_gemm.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/layers/workspace.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/quantizers/quantize.cuh"
#include "cuda/routing/sort_by_expert.cuh"

namespace nvfp4 {
namespace {

constexpr int64_t kChunkSlots = 32768;
constexpr int kThreads = 256;
static_assert(kMaxTopK <= kChunkSlots, "a chunk holds at least one token");

int64_t ChunkTokens(const MoEShape& shape) {
  return std::min(shape.t, kChunkSlots / std::max<int64_t>(shape.top_k, 1));
}

struct MoEWorkspace {
  ExpertRows rows;
  uint8_t* activated;       // [slots, i] of x's type, in sorted order
  float* down;              // [slots, h]
  QuantizedRows quantized;  // room that W4A16 leaves unused, an eighth of the rest
  int64_t bytes;
};

MoEWorkspace TakeMoEWorkspace(void* buffer, const MoEShape& shape, DataType type) {
  Sections sections(buffer);
  const int64_t slots = ChunkTokens(shape) * shape.top_k;
  MoEWorkspace workspace;
  workspace.rows = TakeExpertRows(&sections, slots, shape.e, kTileRows, /*sorted=*/false);
  workspace.activated = sections.Take<uint8_t>(slots * shape.i * Bytes(type));
  workspace.down = sections.Take<float>(slots * shape.h);
  workspace.quantized = TakeQuantizedRows(&sections, slots, std::max(shape.h, shape.i));
  workspace.bytes = sections.bytes();
  return workspace;
}

struct CombineArguments {
  const float* down;            // [t, top_k, h]; slots that are not routed were never written
  const int32_t* expert_ids;    // [t, top_k]
  const float* expert_weights;  // [t, top_k]
  int64_t t, h;
  int32_t top_k, num_experts;
  bool weighted;
};

// Four columns of a token for each thread; h is a multiple of 16.
template <typename T>
__global__ void __launch_bounds__(kThreads) Combine(const CombineArguments p, T* y) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.t * (p.h / 4)) return;
  const int64_t token = index / (p.h / 4), column = index % (p.h / 4) * 4;
  float sums[4] = {};
  for (int j = 0; j < p.top_k; ++j) {
    const int64_t slot = token * p.top_k + j;
    const int32_t expert = p.expert_ids[slot];
    if (expert < 0 || expert >= p.num_experts) continue;
    const float weight = p.weighted ? p.expert_weights[slot] : 1.0f;
    const float4 d = *reinterpret_cast<const float4*>(p.down + slot * p.h + column);
    sums[0] += weight * d.x;
    sums[1] += weight * d.y;
    sums[2] += weight * d.z;
    sums[3] += weight * d.w;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) y[token * p.h + column + c] = FromFloat<T>(sums[c]);
}

cudaError_t LaunchCombine(cudaStream_t stream, const CombineArguments& p, DataType type, void* y) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(p.t * (p.h / 4), kThreads)));
  switch (type) {
    case DataType::kBF16:
      return Launch(stream, grid, kThreads, Combine<__nv_bfloat16>, p,
                    static_cast<__nv_bfloat16*>(y));
    case DataType::kF16:
      return Launch(stream, grid, kThreads, Combine<__half>, p, static_cast<__half*>(y));
    case DataType::kF32:
      return Launch(stream, grid, kThreads, Combine<float>, p, static_cast<float*>(y));
  }
  return cudaErrorInvalidValue;
}

// The tokens of one chunk, and what is known about it.
struct Chunk {
  const uint8_t* x;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* y;
  int64_t tokens;
  int64_t slots;
};

// Quantizes `operand` where the call asks for it, and points it to the codes.
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

int64_t MoEWorkspaceBytes(const MoEShape& shape, DataType type) {
  return TakeMoEWorkspace(nullptr, shape, type).bytes;
}

cudaError_t LaunchMoE(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers) {
  if (call.is_empty()) return LaunchZeros(stream, buffers.y, call.output_bytes());
  const MoEShape& shape = call.shape;
  const MoEWorkspace workspace = TakeMoEWorkspace(buffers.workspace, shape, call.type);
  const int64_t chunk_tokens = ChunkTokens(shape);
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
    const CombineArguments combine = {workspace.down,
                                      chunk.expert_ids,
                                      chunk.expert_weights,
                                      tokens,
                                      shape.h,
                                      static_cast<int32_t>(shape.top_k),
                                      static_cast<int32_t>(shape.e),
                                      !call.weight_on_input};
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchCombine(stream, combine, call.type, chunk.y));
  }
  return cudaSuccess;
}

}  // namespace nvfp4
