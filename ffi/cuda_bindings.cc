// The FFI targets of the CUDA kernels, and the handlers of experts, quantizers and routers. A
// handler decodes its operands and attributes, checks them, and launches kernels.
//
// The targets for sm_80 and sm_90a run their engines. Calls that an engine does not support run on
// the plain kernels, which are built for every architecture. The targets for compute capability
// 10.x and 12.x run nothing but their own engines. Those for 10.x exist only if the build had the
// headers of CUTLASS, or emulates their GEMM. cuda_mixer_bindings.cc has the handlers of the
// kernels around the experts.
#include "cuda_bindings.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "cuda_checks.h"
#include "cuda_forks.h"
#include "expert_operands.h"
#include "operands.h"
#include "quantize_operands.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

// The weight tile of the layout that an engine reads. kSm100 reads "fp4_128x64", and the others
// read "mma_64x64" or "fp4_64x64".
constexpr Tile TileOf(EngineKind engine) {
  return engine == EngineKind::kSm100 ? Tile{128, 64} : Tile{64, 64};
}

// Whether the targets for 10.x exist. Their GEMM is that of CUTLASS, or its emulation.
constexpr bool kHasSm100 = NVFP4_CUTLASS || NVFP4_EMULATE_BLACKWELL;

// Checks what the engine for 12.x needs. No other kernel reads its layout, so that a call that it
// does not support is an error.
ffi::Error CheckSm120(DataType type, ActivationScale scale, int64_t largest_extent) {
  if (type == DataType::kF32) return Expected("x", "bfloat16 or float16", "float32");
  if (scale == ActivationScale::kNone) {
    return Expected("activation_scale", "static or token", "none");
  }
  NVFP4_RETURN_IF_ERROR(
      Expect({AtMost("largest dimension of a weight", largest_extent, kMaxEngineExtent)}));
  if (HasSm120()) return ffi::Error::Success();
  return Expected("device", "compute capability 12.x, or a build that emulates it",
                  "a GPU that this build has no W4A4 kernels for");
}

// Checks what the kernels for 10.x need. They count the offsets of scales inside an expert in 32
// bits; `values` is the number of values of the largest operand.
ffi::Error CheckSm100(DataType type, ActivationScale scale, int64_t values) {
  if (type != DataType::kBF16) {
    return Expected("x", "bfloat16", type == DataType::kF16 ? "float16" : "float32");
  }
  if (scale == ActivationScale::kNone) {
    return Expected("activation_scale", "static or token", "none");
  }
  return Expect({AtMost("number of values of an operand", values, (int64_t{1} << 35) - 1)});
}

// The handler of an expert layer. It runs the engine kEngine, or the plain kernels for calls that
// the engine does not support.
template <EngineKind kEngine>
ffi::Error MoE(cudaStream_t stream, Call& operands, std::string_view activation, float alpha,
               float beta, float limit, std::string_view activation_scale, bool weight_on_input,
               int64_t intermediate) {
  MoEShape shape;
  MoEOptions options;
  NVFP4_RETURN_IF_ERROR(ReadMoE(
      operands, {activation, alpha, beta, limit, activation_scale, weight_on_input, intermediate},
      TileOf(kEngine), &shape, &options));
  NVFP4_RETURN_IF_ERROR(Expect({AtMost("e (gate_up_packed)", shape.e, kMaxExperts),
                                AtMost("k (expert_ids)", shape.top_k, kMaxTopK),
                                AtMost("n1 (gate_up_packed)", shape.n1, kMaxExtent),
                                AtMost("h (x)", shape.h, kMaxExtent)}));
  const bool x_is_unchanged =
      running_chain.IsUnchangedByWriterOf(RangeOf(operands["expert_ids"]), RangeOf(operands["x"]));
  const MoECall call = {shape,           options.type, options.activation, options.activation_scale,
                        weight_on_input, kEngine,      x_is_unchanged};
  MoEBuffers buffers = {
      operands.in<void>("x"),
      {operands.in<uint8_t>("gate_up_packed"), operands.in<uint8_t>("gate_up_block_scale"),
       operands.in("gate_up_global_scale"), operands.in_or_null("gate_up_input_scale"),
       operands.in_or_null("gate_up_bias")},
      {operands.in<uint8_t>("down_packed"), operands.in<uint8_t>("down_block_scale"),
       operands.in("down_global_scale"), operands.in_or_null("down_input_scale"),
       operands.in_or_null("down_bias")},
      operands.in<int32_t>("expert_ids"),
      operands.in("expert_weights"),
      operands.out("y"),
      operands.out("workspace")};
  if constexpr (kEngine == EngineKind::kSm120) {
    NVFP4_RETURN_IF_ERROR(
        CheckSm120(options.type, options.activation_scale, std::max(shape.h, shape.i)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, MoEW4A4WorkspaceBytes(shape)));
    return FromCuda(LaunchMoEW4A4(stream, call, buffers));
  }
  if constexpr (kEngine == EngineKind::kSm100) {
    const int64_t rows = std::max({std::min(shape.slots(), kChunkSlots), shape.n1, shape.h});
    NVFP4_RETURN_IF_ERROR(CheckSm100(options.type, options.activation_scale,
                                     RoundUp(rows, 128) * RoundUp(std::max(shape.h, shape.i), 64)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, MoEW4A4Sm100WorkspaceBytes(shape)));
    return FromCuda(LaunchMoEW4A4Sm100(stream, call, buffers));
  }
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, MoEW4A16WorkspaceBytes(shape, options.type)));
  const bool on_engine = RunsOnEngine(shape, options.type);
  InputCombine combine = {};
  if (running_chain.fuses) buffers.combine = &combine;
  NVFP4_RETURN_IF_ERROR(FromCuda(on_engine ? LaunchMoEW4A16(stream, call, buffers)
                                           : LaunchMoE(stream, call, buffers)));
  if (combine.outputs != nullptr) running_chain.LeaveRest(combine);
  return ffi::Error::Success();
}

template <EngineKind kEngine>
ffi::Error GroupedGemm(cudaStream_t stream, Call& operands, std::string_view activation_scale) {
  GroupedGemmCall call;
  NVFP4_RETURN_IF_ERROR(ReadGroupedGemm(operands, activation_scale, TileOf(kEngine), &call.shape,
                                        &call.type, &call.activation_scale));
  const GroupedGemmShape& shape = call.shape;
  NVFP4_RETURN_IF_ERROR(Expect(
      {AtMost("e (packed)", shape.e, kMaxExperts), AtMost("m (x)", shape.m, kMaxRows),
       AtMost("n (packed)", shape.n_pad, kMaxExtent), AtMost("k (x)", shape.k, kMaxExtent)}));
  call.engine = kEngine;
  call.weight_is_unchanged =
      AreUnchanged(operands, {"packed", "block_scale", "global_scale", "bias"}) &&
      running_chain.Follows();
  call.starts_next = shape.m == 1 && running_chain.StartsNext();
  GroupedGemmBuffers buffers = {operands.in<void>("x"),
                                {operands.in<uint8_t>("packed"),
                                 operands.in<uint8_t>("block_scale"), operands.in("global_scale"),
                                 operands.in_or_null("input_scale"), operands.in_or_null("bias")},
                                operands.in_or_null<int32_t>("group_sizes"),
                                operands.out("y"),
                                operands.out("workspace")};
  if constexpr (kEngine == EngineKind::kSm120) {
    NVFP4_RETURN_IF_ERROR(CheckSm120(call.type, call.activation_scale, std::max(shape.n, shape.k)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, GroupedGemmW4A4WorkspaceBytes(shape)));
    return FromCuda(LaunchGroupedGemmW4A4(stream, call, buffers));
  }
  if constexpr (kEngine == EngineKind::kSm100) {
    const int64_t rows = std::max(shape.m, shape.n);
    NVFP4_RETURN_IF_ERROR(
        CheckSm100(call.type, call.activation_scale, RoundUp(rows, 128) * RoundUp(shape.k, 64)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, GroupedGemmW4A4Sm100WorkspaceBytes(shape)));
    return FromCuda(LaunchGroupedGemmW4A4Sm100(stream, call, buffers));
  }
  NVFP4_RETURN_IF_ERROR(
      ExpectWorkspace(operands, GroupedGemmW4A16WorkspaceBytes(shape, call.type)));
  const bool on_engine = RunsOnEngine(shape, call.type);
  const std::optional<InputNorm> norm = running_chain.TakeWork<InputNorm>();
  if (norm) {
    NVFP4_RETURN_IF_ERROR(CheckInputNorm(*norm, operands["x"]));
    if (on_engine) {
      buffers.norm = &*norm;
    } else {
      NVFP4_RETURN_IF_ERROR(FromCuda(LaunchAddRmsNorm(stream, norm->call, norm->buffers)));
    }
  }
  return FromCuda(on_engine ? LaunchGroupedGemmW4A16(stream, call, buffers)
                            : LaunchGroupedGemm(stream, call, buffers));
}

ffi::Error TransposedGemm(cudaStream_t stream, Call& operands) {
  GroupedGemmCall call;
  const int64_t n = operands.size("k"), k = operands.size("n"), e = operands.size("e");
  call.shape = {operands.size("m"), n, n, k, e, 1};
  call.type = operands.type("x");
  call.activation_scale = ActivationScale::kNone;
  call.engine = EngineKind::kSm90;
  call.transposed = true;
  operands.SetTile(TileOf(call.engine));
  NVFP4_RETURN_IF_ERROR(
      operands.Check({MultipleOf("n (x)", k, 16), MultipleOf("k (y)", n, 16),
                      AtMost("e (packed)", e, kMaxExperts), AtMost("m (x)", call.shape.m, kMaxRows),
                      AtMost("n (x)", k, kMaxEngineExtent), AtMost("k (y)", n, kMaxEngineExtent)}));
  if (e != 1) NVFP4_RETURN_IF_ERROR(operands.ExpectGiven("group_sizes"));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, TransposedGemmWorkspaceBytes(call.shape)));
  const GroupedGemmBuffers buffers = {
      operands.in<void>("x"),
      {operands.in<uint8_t>("packed"), operands.in<uint8_t>("block_scale"),
       operands.in("global_scale"), nullptr, nullptr},
      operands.in_or_null<int32_t>("group_sizes"),
      operands.out("y"),
      operands.out("workspace")};
  return FromCuda(LaunchGroupedGemmW4A16(stream, call, buffers));
}

ffi::Error Quantize(cudaStream_t stream, Call& operands, std::string_view scale_layout) {
  QuantizeCall call = {operands.size("m"), operands.size("k"), operands.type("x"), false};
  NVFP4_RETURN_IF_ERROR(ReadQuantize(operands, scale_layout, &call.swizzle_128x4));
  NVFP4_RETURN_IF_ERROR(
      Expect({AtMost("m (x)", call.m, kMaxRows), AtMost("k (x)", call.k, kMaxExtent)}));
  if (!operands.has("global_scale")) {
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, kAmaxPartials * sizeof(uint32_t)));
  }
  const QuantizeBuffers buffers = {operands.in<void>("x"),
                                   operands.in_or_null("global_scale"),
                                   operands.out<uint8_t>("packed"),
                                   operands.out<uint8_t>("block_scale"),
                                   operands.out<float>("used_scale"),
                                   operands.out<uint32_t>("workspace")};
  return FromCuda(LaunchQuantize(stream, call, buffers));
}

struct RouterScoreRecord {
  std::string_view name;
  RouterScore kind;
};

constexpr RouterScoreRecord kRouterScores[] = {
    {"softmax", RouterScore::kSoftmax},
    {"sigmoid", RouterScore::kSigmoid},
    {"sqrt_softplus", RouterScore::kSqrtSoftplus},
};

constexpr Operand kRouteOperands[] = {
    {"logits", kF32, "[t, e]"},
    {"bias", kF32, "[e] or [0]"},
    {"expert_ids", kS32, "[t, k]", kResult},
    {"expert_weights", kF32, "[t, k]", kResult},
};

ffi::Error Route(cudaStream_t stream, const Call& operands, std::string_view score,
                 bool select_logits, bool renormalize, int32_t num_groups, int32_t groups_kept,
                 float scaling) {
  const RouterScoreRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(ExpectName("score", score, kRouterScores, &record));
  const int64_t t = operands.size("t"), e = operands.size("e"), top_k = operands.size("k");
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtMost("t (logits)", t, kMaxRows), AtMost("e (logits)", e, kMaxExperts),
       AtMost("k (expert_ids)", top_k, kMaxTopK), AtLeast("num_groups", num_groups, 1),
       MultipleOf("e (logits)", e, num_groups), AtLeast("groups_kept", groups_kept, 1),
       AtMost("groups_kept", groups_kept, num_groups)}));
  NVFP4_RETURN_IF_ERROR(Expect({AtMost("k (expert_ids)", top_k, e / num_groups * groups_kept)}));
  const RouterCall call = {t,
                           static_cast<int32_t>(e),
                           static_cast<int32_t>(top_k),
                           num_groups,
                           groups_kept,
                           record->kind,
                           select_logits,
                           renormalize,
                           scaling};
  const RouterBuffers buffers = {operands.in("logits"), operands.in_or_null("bias"),
                                 operands.out<int32_t>("expert_ids"),
                                 operands.out<float>("expert_weights")};
  if (running_chain.fuses) {
    running_chain.work = InputRoute{call, buffers};
    return ffi::Error::Success();
  }
  return FromCuda(LaunchRoute(stream, call, buffers));
}

constexpr Operand kShiftIdsOperands[] = {
    {"ids", kS32, "[t, k]"},
    {"first", kS32, "[]"},
    {"shifted", kS32, "[t, k]", kResult},
};

ffi::Error ShiftIds(cudaStream_t stream, const Call& operands) {
  const int64_t t = operands.size("t"), top_k = operands.size("k");
  NVFP4_RETURN_IF_ERROR(
      operands.Check({AtMost("t (ids)", t, kMaxRows), AtMost("k (ids)", top_k, kMaxTopK)}));
  const auto *ids = operands.in<int32_t>("ids"), *first = operands.in<int32_t>("first");
  std::optional<InputRoute> route = running_chain.TakeWork<InputRoute>();
  if (!route) {
    return FromCuda(LaunchShiftIds(stream, {ids, first, operands.out<int32_t>("shifted"), t * top_k,
                                            running_chain.StartsNext()}));
  }
  if (route->buffers.expert_ids != ids || route->call.t != t || route->call.top_k != top_k) {
    return Expected("ids", "those of the router that is left to this call", "another operand");
  }
  route->buffers.expert_ids = operands.out<int32_t>("shifted");
  route->buffers.first = first;
  return FromCuda(LaunchRoute(stream, route->call, route->buffers));
}

#define NVFP4_MOE_ATTRIBUTES                      \
  .Attr<std::string_view>("activation")           \
      .Attr<float>("alpha")                       \
      .Attr<float>("beta")                        \
      .Attr<float>("limit")                       \
      .Attr<std::string_view>("activation_scale") \
      .Attr<bool>("weight_on_input")              \
      .Attr<int64_t>("intermediate")
#define NVFP4_GROUPED_GEMM_ATTRIBUTES .Attr<std::string_view>("activation_scale")

}  // namespace

const std::vector<NamedHandler>& CudaHandlers() {
  static const std::vector<NamedHandler> handlers = [] {
    std::vector<NamedHandler> all = {
        NVFP4_CUDA_TARGET("nvfp4_moe_w4a16_sm80", kMoEOperands, MoE<EngineKind::kSm80>,
                          NVFP4_MOE_ATTRIBUTES),
        NVFP4_CUDA_TARGET("nvfp4_moe_w4a16_sm90", kMoEOperands, MoE<EngineKind::kSm90>,
                          NVFP4_MOE_ATTRIBUTES),
        NVFP4_CUDA_TARGET("nvfp4_grouped_gemm_w4a16_sm80", kGroupedGemmOperands,
                          GroupedGemm<EngineKind::kSm80>, NVFP4_GROUPED_GEMM_ATTRIBUTES),
        NVFP4_CUDA_TARGET("nvfp4_grouped_gemm_w4a16_sm90", kGroupedGemmOperands,
                          GroupedGemm<EngineKind::kSm90>, NVFP4_GROUPED_GEMM_ATTRIBUTES),
        NVFP4_CUDA_TARGET("nvfp4_transposed_gemm_w4a16_sm90", kTransposedGemmOperands,
                          TransposedGemm, ),
        NVFP4_CUDA_TARGET("nvfp4_moe_w4a4_sm120", kMoEOperands, MoE<EngineKind::kSm120>,
                          NVFP4_MOE_ATTRIBUTES),
        NVFP4_CUDA_TARGET("nvfp4_grouped_gemm_w4a4_sm120", kGroupedGemmOperands,
                          GroupedGemm<EngineKind::kSm120>, NVFP4_GROUPED_GEMM_ATTRIBUTES),
        NVFP4_CUDA_TARGET("nvfp4_quantize_cuda", kQuantizeOperands, Quantize,
                          .Attr<std::string_view>("scale_layout")),
        NVFP4_CUDA_TARGET("nvfp4_shift_ids_cuda", kShiftIdsOperands, ShiftIds, ),
        NVFP4_CUDA_TARGET("nvfp4_route_cuda", kRouteOperands, Route,
                          .Attr<std::string_view>("score")
                              .Attr<bool>("select_logits")
                              .Attr<bool>("renormalize")
                              .Attr<int32_t>("num_groups")
                              .Attr<int32_t>("groups_kept")
                              .Attr<float>("scaling")),
    };
    if (kHasSm100) {
      all.push_back(NVFP4_CUDA_TARGET("nvfp4_moe_w4a4_sm100", kMoEOperands, MoE<EngineKind::kSm100>,
                                      NVFP4_MOE_ATTRIBUTES));
      all.push_back(NVFP4_CUDA_TARGET("nvfp4_grouped_gemm_w4a4_sm100", kGroupedGemmOperands,
                                      GroupedGemm<EngineKind::kSm100>,
                                      NVFP4_GROUPED_GEMM_ATTRIBUTES));
    }
    for (const auto& others :
         {AttentionHandlers(), MixerHandlers(), RecurrentHandlers(), PeerHandlers()}) {
      all.insert(all.end(), others.begin(), others.end());
    }
    return all;
  }();
  return handlers;
}

XLA_FFI_Error* RunCudaChain(XLA_FFI_CallFrame* frame) {
  return RunForkedChain(frame, CudaHandlers());
}

}  // namespace nvfp4
