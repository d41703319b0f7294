// One expert layer in bf16 or f16 on FP4 tensor cores: y[t] = sum_j w[t, j] *
// (W2[e] @ q(act(W1[e] @ q(x[t]) + b1[e])) + b2[e]), e = ids[t, j], where q rounds to NVFP4.
//
// Launches, for each chunk of tokens:
//   sort        slots by expert, tiles, the walks of both products      routing.cu
//   quantize    x[t], or x[t] * w[t, j], gathered in sorted order       quantize.cu
//   product 1   W1, bias, activation, quantized -> a [rows, i]          expert_gemm_sm120.cu
//   product 2   W2, bias -> d [slots, h], in the type of x              the same
//   combine     y[t] = sum of w[t, j] * d[t, j] over j in order         combine.cu
//
// A scale for each token needs whole rows, and where gate and up alternate, a block of outputs is
// not one warp's: there product 1 stores 16 bits, and a launch of its own quantizes them.
//
// Products and combine may each start while the one before ends. Product 2 then reads the plan and
// its weights early: the sort is older than product 1, which waited before letting anyone start.
#include <algorithm>

#include "combine.cuh"
#include "elements.cuh"
#include "expert_gemm.cuh"
#include "launch_kernel.cuh"
#include "quantized_store.cuh"
#include "round_rows.cuh"
#include "workspace.cuh"

namespace nvfp4 {
namespace {

constexpr int64_t kChunkSlots = 65536;  // what routing.cu sorts; memory stays bounded

int64_t ChunkTokens(const MoEShape& shape) {
  return std::min(shape.t, kChunkSlots / std::max<int64_t>(shape.top_k, 1));
}

struct Workspace {
  ExpertRows rows;
  Start* starts[2];
  int32_t* ready[2];
  float* partial_sums;
  QuantizedRows inputs;     // [slots, h]
  QuantizedRows activated;  // [slots, i]
  uint8_t* down;            // [slots, h]; before that a [slots, i], where 16 bits of it are stored
  int64_t bytes;
};

Workspace TakeWorkspace(void* buffer, const MoEShape& shape) {
  Sections sections(buffer);
  const int64_t slots = ChunkTokens(shape) * shape.top_k;
  Workspace workspace;
  workspace.rows = TakeExpertRows(&sections, slots, shape.e, kMinTileRows, /*sorted=*/false);
  for (int product = 0; product < 2; ++product) {
    workspace.starts[product] = sections.Take<Start>(kMaxBlocks + 1);
    workspace.ready[product] = sections.Take<int32_t>(kReadyFlags * kMaxBlocks);
  }
  workspace.partial_sums = sections.Take<float>(kPartialSumBytes / 4);
  workspace.inputs = TakeQuantizedRows(&sections, slots, PadK(shape.h));
  workspace.activated = TakeQuantizedRows(&sections, slots, PadK(shape.i));
  workspace.down = sections.Take<uint8_t>(2 * slots * std::max(shape.h, shape.i));
  workspace.bytes = sections.bytes();
  return workspace;
}

cudaError_t LaunchChunk(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers,
                        const Workspace& workspace, int64_t first, int64_t tokens) {
  const MoEShape& shape = call.shape;
  const int64_t slots = tokens * shape.top_k, row_bytes = shape.h * Bytes(call.type);
  const auto h = static_cast<int32_t>(shape.h), i = static_cast<int32_t>(shape.i);
  const auto e = static_cast<int32_t>(shape.e), top_k = static_cast<int32_t>(shape.top_k);
  const uint8_t* x = static_cast<const uint8_t*>(buffers.x) + first * row_bytes;
  const int32_t* expert_ids = buffers.expert_ids + first * shape.top_k;
  const float* expert_weights = buffers.expert_weights + first * shape.top_k;
  const bool fused =
      call.activation_scale == ActivationScale::kStatic && CanQuantizeOutput(call.activation);

  const GemmPlan plan = PlanSm120(slots, shape.e);
  ExpertGemm up = {};
  up.rows = workspace.rows;
  up.rule = plan.rule;
  up.partial_sums = workspace.partial_sums;
  up.type = call.type;
  up.left = {x, workspace.rows.slots, top_k, nullptr, nullptr};
  up.weight = buffers.gate_up;
  up.bias_rows = static_cast<int32_t>(shape.n1);
  up.parts = call.activation.gated ? 2 : 1;
  up.k = h;
  up.columns = i;
  up.activate = true;
  up.activation = call.activation;
  up.output = {workspace.down, call.type, nullptr};
  if (fused) {
    up.output = {workspace.activated.codes, call.type, nullptr, workspace.activated.block_scale,
                 buffers.down.input_scale};
  }
  up.walk = MakeWalk(plan, up, workspace.starts[0], workspace.ready[0]);

  ExpertGemm down = up;
  down.plan_is_older = true;
  down.left = {workspace.down, nullptr, 1, nullptr, nullptr};
  if (fused) {
    down.left = {workspace.activated.codes,      nullptr, 1, nullptr, buffers.down.input_scale,
                 workspace.activated.block_scale};
  }
  down.weight = buffers.down;
  down.bias_rows = h;
  down.parts = 1;
  down.k = i;
  down.columns = h;
  down.activate = false;
  down.output = {workspace.down, call.type, workspace.rows.slots};
  down.walk = MakeWalk(plan, down, workspace.starts[1], workspace.ready[1]);

  NVFP4_RETURN_IF_CUDA_ERROR(LaunchSortByExpert(stream, expert_ids, slots, shape.e, workspace.rows,
                                                up.rule, Walks{2, {up.walk, down.walk}}));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchEncodeRows(stream, call.activation_scale, slots, shape.e,
                                              call.weight_on_input ? expert_weights : nullptr,
                                              workspace.inputs, &up));
  NVFP4_RETURN_IF_CUDA_ERROR(plan.launch(stream, up));
  if (!fused) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchEncodeRows(stream, call.activation_scale, slots, shape.e,
                                                nullptr, workspace.activated, &down));
  }
  NVFP4_RETURN_IF_CUDA_ERROR(plan.launch(stream, down));
  return LaunchCombine(stream, call.type,
                       {workspace.down, expert_ids, expert_weights,
                        static_cast<uint8_t*>(buffers.y) + first * row_bytes, tokens, h, top_k, e,
                        !call.weight_on_input});
}

}  // namespace

int64_t MoEW4A4WorkspaceBytes(const MoEShape& shape) { return TakeWorkspace(nullptr, shape).bytes; }

cudaError_t LaunchMoEW4A4(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers) {
  const MoEShape& shape = call.shape;
  const Workspace workspace = TakeWorkspace(buffers.workspace, shape);
  const int64_t chunk = ChunkTokens(shape);
  for (int64_t first = 0; first < shape.t; first += chunk) {
    NVFP4_RETURN_IF_CUDA_ERROR(
        LaunchChunk(stream, call, buffers, workspace, first, std::min(chunk, shape.t - first)));
  }
  return cudaSuccess;
}

}  // namespace nvfp4
