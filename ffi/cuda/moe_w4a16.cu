// One expert layer in bf16 or f16 on an engine: y[t] = sum_j w[t, j] *
// (W2[e] @ act(W1[e] @ x[t] + b1[e]) + b2[e]), e = ids[t, j]. In W4A4 the rows of both products are
// rounded to NVFP4 first: code * block scale is exact in 16 bits, so that the products are those of
// FP4 tensor cores, term by term.
//
// Launches, for each chunk of tokens:
//   sort        slots by expert, tiles, the walks of both products   routing.cu
//   scale       x[t] * w[t, j], sorted, where weights go on inputs
//   round       x[t], or that, sorted, in W4A4                       quantize.cu
//   product 1   gather, W1, bias, activation -> a [rows, i]          expert_gemm_sm*.cu
//   round       a, in place, in W4A4, where product 1 does not
//   product 2   W2, bias -> d [slots, h], in the type of x           the same
//   combine     y[t] = sum of w[t, j] * d[t, j] over j in order      combine.cu
//
// For a handful of slots there is no sort: the products of expert_gemm_few.cu plan for themselves.
//
// From sm_90 on each of the last three may start while the one before it ends.
// Product 2 then reads the plan and its weights early: the sort is older than product 1, which
// waited for it before letting anyone start.
#include <algorithm>

#include "combine.cuh"
#include "elements.cuh"
#include "epilogue.cuh"
#include "expert_gemm.cuh"
#include "expert_gemm_few.cuh"
#include "launch_kernel.cuh"
#include "round_rows.cuh"
#include "workspace.cuh"

namespace nvfp4 {
namespace {

constexpr int64_t kChunkSlots = 65536;  // what routing.cu sorts; memory stays bounded
constexpr int kThreads = 256;
constexpr int kVector = 8;  // 16-bit elements of 16 bytes

int64_t ChunkTokens(const MoEShape& shape) {
  return std::min(shape.t, kChunkSlots / std::max<int64_t>(shape.top_k, 1));
}

struct Workspace {
  ExpertRows rows;
  Start* starts[2];
  int32_t* ready[2];
  float* partial_sums;
  uint8_t* activated;  // [slots, i], sorted
  uint8_t* down;       // [slots, h]; before that the scaled or rounded inputs, sorted
  float* row_scale;    // [slots] of rounded rows that have scales of their own
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
  workspace.activated = sections.Take<uint8_t>(2 * slots * shape.i);
  workspace.down = sections.Take<uint8_t>(2 * slots * shape.h);
  workspace.row_scale = sections.Take<float>(slots);
  workspace.bytes = sections.bytes();
  return workspace;
}

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

unsigned VectorBlocks(int64_t rows, int64_t h) {
  return static_cast<unsigned>(CeilDiv(rows * (h / kVector), kThreads));
}

// Both products without a sort before them.
cudaError_t LaunchFewProducts(cudaStream_t stream, const int32_t* expert_ids, int64_t slots,
                              int64_t experts, ExpertGemm up, ExpertGemm down) {
  const auto num_slots = static_cast<int32_t>(slots), num_experts = static_cast<int32_t>(experts);
  const FewSlots last = {expert_ids, num_slots, num_experts, {}, 0, 0};
  const FewSlots first = {expert_ids,  num_slots,      num_experts,
                          down.weight, down.m_tiles(), (down.k + kTileK - 1) / kTileK};
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchExpertGemmFew(stream, up, first, /*overlaps=*/false));
  return LaunchExpertGemmFew(stream, down, last, /*overlaps=*/true);
}

template <typename T>
cudaError_t LaunchSortedProducts(cudaStream_t stream, const MoECall& call,
                                 const Workspace& workspace, const GemmPlan& plan,
                                 const int32_t* expert_ids, const float* expert_weights,
                                 int64_t slots, ExpertGemm up, ExpertGemm down) {
  const MoEShape& shape = call.shape;
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchSortByExpert(stream, expert_ids, slots, shape.e, workspace.rows,
                                                up.rule, Walks{2, {up.walk, down.walk}}));
  const bool rounds = call.activation_scale != ActivationScale::kNone;
  if (rounds) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchRoundRows(stream, call.activation_scale, slots, shape.e,
                                               call.weight_on_input ? expert_weights : nullptr,
                                               workspace.row_scale, workspace.down, &up));
  } else if (call.weight_on_input) {
    T* scaled = reinterpret_cast<T*>(workspace.down);
    NVFP4_RETURN_IF_CUDA_ERROR(Launch(stream, dim3(VectorBlocks(slots, shape.h)), kThreads,
                                      ScaleRows<T>, static_cast<const T*>(up.left.values),
                                      expert_weights, workspace.rows, static_cast<int32_t>(shape.e),
                                      up.left.slots_per_row, up.k, scaled));
    up.left = {scaled, nullptr, 1, nullptr, nullptr};
  }
  // Product 1 rounds its own outputs where their scale is known before they are.
  if (call.activation_scale == ActivationScale::kStatic && CanRoundOutputs(up)) {
    up.output.input_scale = down.weight.input_scale;
  }
  NVFP4_RETURN_IF_CUDA_ERROR(plan.launch(stream, up));
  if (up.output.input_scale != nullptr) {
    down.left.input_scale = up.output.input_scale;
  } else if (rounds) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchRoundRows(stream, call.activation_scale, slots, shape.e,
                                               nullptr, workspace.row_scale, workspace.activated,
                                               &down));
  }
  return plan.launch(stream, down);
}

template <typename T>
cudaError_t LaunchChunk(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers,
                        const Workspace& workspace, int64_t first, int64_t tokens) {
  const MoEShape& shape = call.shape;
  const int64_t slots = tokens * shape.top_k;
  const auto h = static_cast<int32_t>(shape.h), i = static_cast<int32_t>(shape.i);
  const auto e = static_cast<int32_t>(shape.e), top_k = static_cast<int32_t>(shape.top_k);
  const T* x = static_cast<const T*>(buffers.x) + first * shape.h;
  const int32_t* expert_ids = buffers.expert_ids + first * shape.top_k;
  const float* expert_weights = buffers.expert_weights + first * shape.top_k;

  const GemmPlan plan = PlanGemm(call.engine, slots, shape.e);
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
  up.output = {workspace.activated, call.type, nullptr};
  up.walk = MakeWalk(plan, up, workspace.starts[0], workspace.ready[0]);

  ExpertGemm down = up;
  down.plan_is_older = true;
  down.left = {workspace.activated, nullptr, 1, nullptr, nullptr};
  down.weight = buffers.down;
  down.bias_rows = h;
  down.parts = 1;
  down.k = i;
  down.columns = h;
  down.activate = false;
  down.output = {workspace.down, call.type, workspace.rows.slots};
  down.walk = MakeWalk(plan, down, workspace.starts[1], workspace.ready[1]);

  const int64_t weights = slots * shape.h * (shape.n1 + shape.i);
  const bool few = !call.weight_on_input && call.activation_scale == ActivationScale::kNone &&
                   FewSlotsFit(slots, top_k, h, weights) && FewSlotsFit(slots, 1, i, weights);
  NVFP4_RETURN_IF_CUDA_ERROR(few ? LaunchFewProducts(stream, expert_ids, slots, shape.e, up, down)
                                 : LaunchSortedProducts<T>(stream, call, workspace, plan,
                                                           expert_ids, expert_weights, slots, up,
                                                           down));
  return LaunchCombine(
      stream, call.type,
      {workspace.down, expert_ids, expert_weights, static_cast<T*>(buffers.y) + first * shape.h,
       tokens, h, top_k, e, !call.weight_on_input});
}

}  // namespace

int64_t MoEW4A16WorkspaceBytes(const MoEShape& shape) {
  return TakeWorkspace(nullptr, shape).bytes;
}

cudaError_t LaunchMoEW4A16(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers) {
  const MoEShape& shape = call.shape;
  const Workspace workspace = TakeWorkspace(buffers.workspace, shape);
  const int64_t chunk = ChunkTokens(shape);
  for (int64_t first = 0; first < shape.t; first += chunk) {
    const int64_t tokens = std::min(chunk, shape.t - first);
    NVFP4_RETURN_IF_CUDA_ERROR(
        call.type == DataType::kF16
            ? LaunchChunk<__half>(stream, call, buffers, workspace, first, tokens)
            : LaunchChunk<__nv_bfloat16>(stream, call, buffers, workspace, first, tokens));
  }
  return cudaSuccess;
}

}  // namespace nvfp4
