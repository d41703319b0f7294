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
#include <string>
#include <string_view>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "cuda_checks.h"
#include "cuda_forks.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

constexpr WeightTile kTile = {64, 64};  // in the layouts "mma_64x64" and "fp4_64x64"

// The weight tile of the layout that an engine reads. kSm100 reads "fp4_128x64".
constexpr WeightTile TileOf(EngineKind engine) {
  return engine == EngineKind::kSm100 ? WeightTile{128, 64} : kTile;
}

constexpr OperandRules RulesOf(EngineKind engine) { return {TileOf(engine), kAlignment}; }

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
      ExpectAtMost("largest dimension of a weight", largest_extent, kMaxEngineExtent));
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
  return ExpectAtMost("number of values of an operand", values, (int64_t{1} << 35) - 1);
}

ExpertWeights WeightsOf(ffi::AnyBuffer packed, ffi::AnyBuffer block_scale,
                        ffi::AnyBuffer global_scale, ffi::AnyBuffer input_scale,
                        ffi::AnyBuffer bias) {
  return {Data<uint8_t>(packed), Data<uint8_t>(block_scale), Data<float>(global_scale),
          DataOrNull(input_scale), DataOrNull(bias)};
}

// The handler of an expert layer. It runs the engine kEngine, or the plain kernels for calls that
// the engine does not support.
template <EngineKind kEngine>
ffi::Error MoE(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gate_up_packed,
               ffi::AnyBuffer gate_up_block_scale, ffi::AnyBuffer gate_up_global_scale,
               ffi::AnyBuffer gate_up_input_scale, ffi::AnyBuffer gate_up_bias,
               ffi::AnyBuffer down_packed, ffi::AnyBuffer down_block_scale,
               ffi::AnyBuffer down_global_scale, ffi::AnyBuffer down_input_scale,
               ffi::AnyBuffer down_bias, ffi::AnyBuffer expert_ids, ffi::AnyBuffer expert_weights,
               ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
               std::string_view activation, float alpha, float beta, float limit,
               std::string_view activation_scale, bool weight_on_input, int64_t intermediate) {
  const MoEOperands operands = {x,
                                gate_up_packed,
                                gate_up_block_scale,
                                gate_up_global_scale,
                                gate_up_input_scale,
                                gate_up_bias,
                                down_packed,
                                down_block_scale,
                                down_global_scale,
                                down_input_scale,
                                down_bias,
                                expert_ids,
                                expert_weights,
                                *y};
  MoEShape shape;
  MoEOptions options;
  NVFP4_RETURN_IF_ERROR(CheckMoE(operands, activation, alpha, beta, limit, activation_scale,
                                 intermediate, RulesOf(kEngine), &shape, &options));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (gate_up_packed)", shape.e, kMaxExperts));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (expert_ids)", shape.top_k, kMaxTopK));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n1 (gate_up_packed)", shape.n1, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("h (x)", shape.h, kMaxExtent));
  const bool x_is_unchanged = running_chain.IsUnchangedByWriterOf(RangeOf(expert_ids), RangeOf(x));
  const MoECall call = {shape,           options.type, options.activation, options.activation_scale,
                        weight_on_input, kEngine,      x_is_unchanged};
  MoEBuffers buffers = {
      x.untyped_data(),
      WeightsOf(gate_up_packed, gate_up_block_scale, gate_up_global_scale, gate_up_input_scale,
                gate_up_bias),
      WeightsOf(down_packed, down_block_scale, down_global_scale, down_input_scale, down_bias),
      Data<int32_t>(expert_ids),
      Data<float>(expert_weights),
      y->untyped_data(),
      workspace->untyped_data()};
  if constexpr (kEngine == EngineKind::kSm120) {
    NVFP4_RETURN_IF_ERROR(
        CheckSm120(options.type, options.activation_scale, std::max(shape.h, shape.i)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, MoEW4A4WorkspaceBytes(shape)));
    return FromCuda(LaunchMoEW4A4(stream, call, buffers), "nvfp4_moe");
  }
  if constexpr (kEngine == EngineKind::kSm100) {
    const int64_t rows = std::max({std::min(shape.slots(), kChunkSlots), shape.n1, shape.h});
    NVFP4_RETURN_IF_ERROR(CheckSm100(options.type, options.activation_scale,
                                     RoundUp(rows, 128) * RoundUp(std::max(shape.h, shape.i), 64)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, MoEW4A4Sm100WorkspaceBytes(shape)));
    return FromCuda(LaunchMoEW4A4Sm100(stream, call, buffers), "nvfp4_moe");
  }
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, MoEW4A16WorkspaceBytes(shape, options.type)));
  const bool on_engine = RunsOnEngine(shape, options.type);
  InputCombine combine = {};
  if (running_chain.fuses) buffers.combine = &combine;
  NVFP4_RETURN_IF_ERROR(
      FromCuda(on_engine ? LaunchMoEW4A16(stream, call, buffers) : LaunchMoE(stream, call, buffers),
               "nvfp4_moe"));
  if (combine.outputs != nullptr) running_chain.LeaveRest(combine);
  return ffi::Error::Success();
}

template <EngineKind kEngine>
ffi::Error GroupedGemm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer packed,
                       ffi::AnyBuffer block_scale, ffi::AnyBuffer global_scale,
                       ffi::AnyBuffer input_scale, ffi::AnyBuffer bias, ffi::AnyBuffer group_sizes,
                       ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                       std::string_view activation_scale) {
  GroupedGemmCall call;
  NVFP4_RETURN_IF_ERROR(CheckGroupedGemm(
      {x, packed, block_scale, global_scale, input_scale, bias, group_sizes, *y}, activation_scale,
      RulesOf(kEngine), &call.shape, &call.type, &call.activation_scale));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (packed)", call.shape.e, kMaxExperts));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("m (x)", call.shape.m, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (packed)", call.shape.n_pad, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (x)", call.shape.k, kMaxExtent));
  const GroupedGemmShape& shape = call.shape;
  call.engine = kEngine;
  const auto is_unchanged = [](const ffi::AnyBuffer& operand) {
    return operand.size_bytes() == 0 || running_chain.IsUnchanged(RangeOf(operand));
  };
  call.weight_is_unchanged = is_unchanged(packed) && is_unchanged(block_scale) &&
                             is_unchanged(global_scale) && is_unchanged(bias) &&
                             running_chain.Follows();
  call.starts_next = shape.m == 1 && running_chain.StartsNext();
  GroupedGemmBuffers buffers = {
      x.untyped_data(), WeightsOf(packed, block_scale, global_scale, input_scale, bias),
      DataOrNull<int32_t>(group_sizes), y->untyped_data(), workspace->untyped_data()};
  if constexpr (kEngine == EngineKind::kSm120) {
    NVFP4_RETURN_IF_ERROR(CheckSm120(call.type, call.activation_scale, std::max(shape.n, shape.k)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, GroupedGemmW4A4WorkspaceBytes(shape)));
    return FromCuda(LaunchGroupedGemmW4A4(stream, call, buffers), "nvfp4_grouped_gemm");
  }
  if constexpr (kEngine == EngineKind::kSm100) {
    const int64_t rows = std::max(shape.m, shape.n);
    NVFP4_RETURN_IF_ERROR(
        CheckSm100(call.type, call.activation_scale, RoundUp(rows, 128) * RoundUp(shape.k, 64)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, GroupedGemmW4A4Sm100WorkspaceBytes(shape)));
    return FromCuda(LaunchGroupedGemmW4A4Sm100(stream, call, buffers), "nvfp4_grouped_gemm");
  }
  NVFP4_RETURN_IF_ERROR(
      ExpectWorkspace(*workspace, GroupedGemmW4A16WorkspaceBytes(shape, call.type)));
  const bool on_engine = RunsOnEngine(shape, call.type);
  const std::optional<InputNorm> norm = running_chain.TakeWork<InputNorm>();
  if (norm) {
    NVFP4_RETURN_IF_ERROR(CheckInputNorm(*norm, x));
    if (on_engine) {
      buffers.norm = &*norm;
    } else {
      NVFP4_RETURN_IF_ERROR(
          FromCuda(LaunchAddRmsNorm(stream, norm->call, norm->buffers), "nvfp4_add_rms_norm_cuda"));
    }
  }
  return FromCuda(on_engine ? LaunchGroupedGemmW4A16(stream, call, buffers)
                            : LaunchGroupedGemm(stream, call, buffers),
                  "nvfp4_grouped_gemm");
}

ffi::Error Quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer global_scale,
                    ffi::Result<ffi::AnyBuffer> packed, ffi::Result<ffi::AnyBuffer> block_scale,
                    ffi::Result<ffi::AnyBuffer> used_scale, ffi::Result<ffi::AnyBuffer> workspace,
                    std::string_view scale_layout) {
  QuantizeCall call;
  NVFP4_RETURN_IF_ERROR(CheckQuantize(x, global_scale, *packed, *block_scale, *used_scale,
                                      scale_layout, kAlignment, &call.type, &call.swizzle_128x4));
  call.m = x.dimensions()[0];
  call.k = x.dimensions()[1];
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("m (x)", call.m, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (x)", call.k, kMaxExtent));
  if (global_scale.element_count() == 0) {
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, kAmaxPartials * sizeof(uint32_t)));
  }
  const QuantizeBuffers buffers = {x.untyped_data(),
                                   DataOrNull(global_scale),
                                   static_cast<uint8_t*>(packed->untyped_data()),
                                   static_cast<uint8_t*>(block_scale->untyped_data()),
                                   static_cast<float*>(used_scale->untyped_data()),
                                   static_cast<uint32_t*>(workspace->untyped_data())};
  return FromCuda(LaunchQuantize(stream, call, buffers), "nvfp4_quantize_cuda");
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

ffi::Error CheckRoute(ffi::AnyBuffer logits, ffi::AnyBuffer bias, ffi::AnyBuffer expert_ids,
                      ffi::AnyBuffer expert_weights, int64_t num_groups, int64_t groups_kept) {
  NVFP4_RETURN_IF_ERROR(ExpectType("logits", logits.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("bias", bias.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("expert_ids", expert_ids.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("expert_weights", expert_weights.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("logits [t, e]", logits.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("expert_ids [t, k]", expert_ids.dimensions(), 2));
  const int64_t t = logits.dimensions()[0], e = logits.dimensions()[1];
  const int64_t top_k = expert_ids.dimensions()[1];
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("bias [e]", bias.dimensions(), {e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("expert_ids [t, k]", expert_ids.dimensions(), {t, top_k}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("expert_weights [t, k]", expert_weights.dimensions(), {t, top_k}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (logits)", t, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (logits)", e, kMaxExperts));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (expert_ids)", top_k, kMaxTopK));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("num_groups", num_groups, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("e (logits)", e, num_groups));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("groups_kept", groups_kept, 1));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("groups_kept", groups_kept, num_groups));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"logits", logits},
                                       {"bias", bias},
                                       {"expert_ids", expert_ids},
                                       {"expert_weights", expert_weights}},
                                      kAlignment));
  return ExpectAtMost("k (expert_ids)", top_k, e / num_groups * groups_kept);
}

ffi::Error Route(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer bias,
                 ffi::Result<ffi::AnyBuffer> expert_ids, ffi::Result<ffi::AnyBuffer> expert_weights,
                 std::string_view score, bool select_logits, bool renormalize, int32_t num_groups,
                 int32_t groups_kept, float scaling) {
  const RouterScoreRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(ExpectName("score", score, kRouterScores, &record));
  NVFP4_RETURN_IF_ERROR(
      CheckRoute(logits, bias, *expert_ids, *expert_weights, num_groups, groups_kept));
  const RouterCall call = {logits.dimensions()[0],
                           static_cast<int32_t>(logits.dimensions()[1]),
                           static_cast<int32_t>(expert_ids->dimensions()[1]),
                           num_groups,
                           groups_kept,
                           record->kind,
                           select_logits,
                           renormalize,
                           scaling};
  const RouterBuffers buffers = {Data<float>(logits), DataOrNull(bias),
                                 static_cast<int32_t*>(expert_ids->untyped_data()),
                                 static_cast<float*>(expert_weights->untyped_data())};
  return FromCuda(LaunchRoute(stream, call, buffers), "nvfp4_route_cuda");
}

// kCmdBufferCompatible: the handlers only launch kernels and fills, so that a CUDA graph can
// capture them.
auto BindMoE() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()  // x                     [t, h]
      .Arg<ffi::AnyBuffer>()  // gate_up_packed        [e, n1, h/2] in tiles
      .Arg<ffi::AnyBuffer>()  // gate_up_block_scale   [e, n1, h/16] in tiles
      .Arg<ffi::AnyBuffer>()  // gate_up_global_scale  [e, parts]
      .Arg<ffi::AnyBuffer>()  // gate_up_input_scale   [e] or [0]
      .Arg<ffi::AnyBuffer>()  // gate_up_bias          [e, n1] or [0, 0]
      .Arg<ffi::AnyBuffer>()  // down_packed           [e, h, i/2] in tiles
      .Arg<ffi::AnyBuffer>()  // down_block_scale      [e, h, i/16] in tiles
      .Arg<ffi::AnyBuffer>()  // down_global_scale     [e, 1]
      .Arg<ffi::AnyBuffer>()  // down_input_scale      [e] or [0]
      .Arg<ffi::AnyBuffer>()  // down_bias             [e, h] or [0, 0]
      .Arg<ffi::AnyBuffer>()  // expert_ids            [t, k]
      .Arg<ffi::AnyBuffer>()  // expert_weights        [t, k]
      .Ret<ffi::AnyBuffer>()  // y                     [t, h]
      .Ret<ffi::AnyBuffer>()  // workspace             [bytes]
      .Attr<std::string_view>("activation")
      .Attr<float>("alpha")
      .Attr<float>("beta")
      .Attr<float>("limit")
      .Attr<std::string_view>("activation_scale")
      .Attr<bool>("weight_on_input")
      .Attr<int64_t>("intermediate");
}

XLA_FFI_DEFINE_HANDLER(kMoESm80, MoE<EngineKind::kSm80>, BindMoE(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMoESm90, MoE<EngineKind::kSm90>, BindMoE(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMoESm100, MoE<EngineKind::kSm100>, BindMoE(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMoESm120, MoE<EngineKind::kSm120>, BindMoE(),
                       {ffi::Traits::kCmdBufferCompatible});

auto BindGroupedGemm() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()  // x             [m, k]
      .Arg<ffi::AnyBuffer>()  // packed        [e, n, k/2] in tiles
      .Arg<ffi::AnyBuffer>()  // block_scale   [e, n, k/16] in tiles
      .Arg<ffi::AnyBuffer>()  // global_scale  [e, parts]
      .Arg<ffi::AnyBuffer>()  // input_scale   [e] or [0]
      .Arg<ffi::AnyBuffer>()  // bias          [e, n] or [0, 0]
      .Arg<ffi::AnyBuffer>()  // group_sizes   [e], or [0] if e is 1
      .Ret<ffi::AnyBuffer>()  // y             [m, n]
      .Ret<ffi::AnyBuffer>()  // workspace     [bytes]
      .Attr<std::string_view>("activation_scale");
}

XLA_FFI_DEFINE_HANDLER(kGroupedGemmSm80, GroupedGemm<EngineKind::kSm80>, BindGroupedGemm(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kGroupedGemmSm90, GroupedGemm<EngineKind::kSm90>, BindGroupedGemm(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kGroupedGemmSm100, GroupedGemm<EngineKind::kSm100>, BindGroupedGemm(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kGroupedGemmSm120, GroupedGemm<EngineKind::kSm120>, BindGroupedGemm(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    kQuantize, Quantize,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // x             [m, k]
        .Arg<ffi::AnyBuffer>()  // global_scale  []; [0] computes it from x
        .Ret<ffi::AnyBuffer>()  // packed        [m, k/2]
        .Ret<ffi::AnyBuffer>()  // block_scale   [m, k/16], or swizzled and padded
        .Ret<ffi::AnyBuffer>()  // used_scale    []
        .Ret<ffi::AnyBuffer>()  // workspace     U8 [bytes]
        .Attr<std::string_view>("scale_layout"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kRoute, Route,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // logits          [t, e]
                           .Arg<ffi::AnyBuffer>()  // bias            [e] or [0]
                           .Ret<ffi::AnyBuffer>()  // expert_ids      [t, k]
                           .Ret<ffi::AnyBuffer>()  // expert_weights  [t, k]
                           .Attr<std::string_view>("score")
                           .Attr<bool>("select_logits")
                           .Attr<bool>("renormalize")
                           .Attr<int32_t>("num_groups")
                           .Attr<int32_t>("groups_kept")
                           .Attr<float>("scaling"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const std::vector<NamedHandler>& CudaHandlers() {
  static const std::vector<NamedHandler> handlers = [] {
    std::vector<NamedHandler> all = {
        {"nvfp4_moe_w4a16_sm80", kMoESm80},
        {"nvfp4_moe_w4a16_sm90", kMoESm90},
        {"nvfp4_grouped_gemm_w4a16_sm80", kGroupedGemmSm80},
        {"nvfp4_grouped_gemm_w4a16_sm90", kGroupedGemmSm90},
        {"nvfp4_moe_w4a4_sm120", kMoESm120},
        {"nvfp4_grouped_gemm_w4a4_sm120", kGroupedGemmSm120},
        {"nvfp4_quantize_cuda", kQuantize},
        {"nvfp4_route_cuda", kRoute},
    };
    if (kHasSm100) {
      all.push_back({"nvfp4_moe_w4a4_sm100", kMoESm100});
      all.push_back({"nvfp4_grouped_gemm_w4a4_sm100", kGroupedGemmSm100});
    }
    for (const auto& others : {AttentionHandlers(), MixerHandlers(), RecurrentHandlers()}) {
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
