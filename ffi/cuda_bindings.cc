// The module _nvfp4_cuda: the CUDA kernels as XLA FFI targets. A handler decodes its operands and
// attributes, checks them, and launches kernels.
//
// The targets for sm_80 and sm_90a run their engines. Calls that an engine does not support run on
// the plain kernels, which are built for every architecture. The targets for compute capability
// 10.x and 12.x run nothing but their own engines. Those for 10.x exist only if the build had the
// headers of CUTLASS, or emulates their GEMM.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "checks.h"
#include "cuda/launch.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace nvfp4 {
namespace {

constexpr WeightTile kTile = {64, 64};  // in the layouts "mma_64x64" and "fp4_64x64"

// The weight tile of the layout that an engine reads. kSm100 reads "fp4_128x64".
constexpr WeightTile TileOf(EngineKind engine) {
  return engine == EngineKind::kSm100 ? WeightTile{128, 64} : kTile;
}

// Kernels copy 16 bytes at a time; see launch.h.
constexpr size_t kAlignment = 16;

constexpr OperandRules RulesOf(EngineKind engine) { return {TileOf(engine), kAlignment}; }

// Whether the targets for 10.x exist. Their GEMM is that of CUTLASS, or its emulation.
constexpr bool kHasSm100 = NVFP4_CUTLASS || NVFP4_EMULATE_BLACKWELL;

ffi::Error FromCuda(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // otherwise the next call would report this error as its own
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(status));
}

ffi::Error ExpectAtMost(std::string_view what, int64_t got, int64_t most) {
  if (got <= most) return ffi::Error::Success();
  return Expected(what, "at most " + std::to_string(most), std::to_string(got));
}

ffi::Error ExpectWorkspace(ffi::AnyBuffer workspace, int64_t bytes) {
  NVFP4_RETURN_IF_ERROR(ExpectType("workspace", workspace.element_type(), ffi::U8));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"workspace", workspace}}, kAlignment));
  return ExpectAtLeast("workspace, bytes", static_cast<int64_t>(workspace.element_count()), bytes);
}

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

template <typename T>
const T* Data(ffi::AnyBuffer buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Null if the operand was left out.
template <typename T = float>
const T* DataOrNull(ffi::AnyBuffer buffer) {
  return buffer.element_count() == 0 ? nullptr : Data<T>(buffer);
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
  const MoECall call = {shape,           options.type, options.activation, options.activation_scale,
                        weight_on_input, kEngine};
  const MoEBuffers buffers = {
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
    const int64_t rows = std::max({std::min(shape.slots(), kMaxChunkSlots), shape.n1, shape.h});
    NVFP4_RETURN_IF_ERROR(CheckSm100(options.type, options.activation_scale,
                                     RoundUp(rows, 128) * RoundUp(std::max(shape.h, shape.i), 64)));
    NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, MoEW4A4Sm100WorkspaceBytes(shape)));
    return FromCuda(LaunchMoEW4A4Sm100(stream, call, buffers), "nvfp4_moe");
  }
  const bool on_engine =
      options.type != DataType::kF32 && std::max(shape.h, shape.i) <= kMaxEngineExtent;
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, on_engine
                                                        ? MoEW4A16WorkspaceBytes(shape)
                                                        : MoEWorkspaceBytes(shape, options.type)));
  return FromCuda(
      on_engine ? LaunchMoEW4A16(stream, call, buffers) : LaunchMoE(stream, call, buffers),
      "nvfp4_moe");
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
  const GroupedGemmBuffers buffers = {
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
  const bool on_engine =
      call.type != DataType::kF32 && std::max({shape.n, shape.k, shape.parts}) <= kMaxEngineExtent;
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, on_engine
                                                        ? GroupedGemmW4A16WorkspaceBytes(shape)
                                                        : GroupedGemmWorkspaceBytes(shape)));
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

ffi::Error CheckAttention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer positions, ffi::AnyBuffer sinks, ffi::AnyBuffer y,
                          AttentionShape* shape, DataType* type) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("q [b, t, n, d]", q.element_type(), type));
  if (*type == DataType::kF32) return Expected("q", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectType("k", k.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("v", v.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("sinks", sinks.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, n, d]", q.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("k [b, m, s, d]", k.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("v [b, m, s, dv]", v.dimensions(), 4));
  const int64_t b = q.dimensions()[0], t = q.dimensions()[1];
  const int64_t n = q.dimensions()[2], d = q.dimensions()[3];
  const int64_t m = k.dimensions()[1], s = k.dimensions()[2], dv = v.dimensions()[3];
  *shape = {b, t, n, m, s, d, dv};
  NVFP4_RETURN_IF_ERROR(ExpectDims("k [b, m, s, d]", k.dimensions(), {b, m, s, d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("v [b, m, s, dv]", v.dimensions(), {b, m, s, dv}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("sinks [n]", sinks.dimensions(), {n}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, t, n, dv]", y.dimensions(), {b, t, n, dv}));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("m (k)", m, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (q)", n, m));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (q)", d, kHeadWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("dv (v)", dv, kHeadWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (q)", d, kMaxHeadWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("dv (v)", dv, kMaxHeadWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (k)", s, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (q)", b, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (q)", n, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b t n (q)", b * t * n, kMaxRows));
  return ExpectAligned(
      {{"q", q}, {"k", k}, {"v", v}, {"positions", positions}, {"sinks", sinks}, {"y", y}},
      kAlignment);
}

ffi::Error Attention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::AnyBuffer positions, ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::AnyBuffer> workspace, float scale, int32_t window,
                     int32_t chunk) {
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(CheckAttention(q, k, v, positions, sinks, *y, &call.shape, &call.type));
  if (!(scale > 0.0f)) return Expected("scale", "a number above 0", std::to_string(scale));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("window", window, 0));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("chunk", chunk, 0));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, AttentionWorkspaceBytes(call.shape)));
  call.scale = scale;
  call.window = window;
  call.chunk = chunk;
  const AttentionBuffers buffers = {q.untyped_data(),         k.untyped_data(),  v.untyped_data(),
                                    Data<int32_t>(positions), DataOrNull(sinks), y->untyped_data(),
                                    workspace->untyped_data()};
  return FromCuda(LaunchAttention(stream, call, buffers), "nvfp4_attention_cuda");
}

ffi::Error AddRmsNorm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer added,
                      ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> sum,
                      ffi::Result<ffi::AnyBuffer> y, float eps) {
  NormCall call = {};
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &call.type));
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("weight", weight.element_type(), &call.weight_type));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [rows, h]", x.dimensions(), 2));
  call.rows = x.dimensions()[0];
  call.h = x.dimensions()[1];
  call.eps = eps;
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (x)", call.rows, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("h (x)", call.h, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectDims("weight [h]", weight.dimensions(), {call.h}));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y->element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [rows, h]", y->dimensions(), {call.rows, call.h}));
  NVFP4_RETURN_IF_ERROR(ExpectType("added", added.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("sum", sum->element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(
      ExpectDimsOrEmpty("added [rows, h]", added.dimensions(), {call.rows, call.h}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("sum [rows, h]", sum->dimensions(),
                                   {added.dimensions()[0], added.dimensions()[1]}));
  NVFP4_RETURN_IF_ERROR(ExpectAligned(
      {{"x", x}, {"added", added}, {"weight", weight}, {"sum", *sum}, {"y", *y}}, kAlignment));
  const NormBuffers buffers = {x.untyped_data(), DataOrNull<void>(added), weight.untyped_data(),
                               sum->untyped_data(), y->untyped_data()};
  return FromCuda(LaunchAddRmsNorm(stream, call, buffers), "nvfp4_add_rms_norm_cuda");
}

ffi::Error CheckHeads(ffi::AnyBuffer qkv, ffi::AnyBuffer positions, ffi::AnyBuffer keys,
                      ffi::AnyBuffer values, ffi::AnyBuffer q_weight, ffi::AnyBuffer k_weight,
                      ffi::AnyBuffer frequencies, ffi::AnyBuffer q, ffi::AnyBuffer new_keys,
                      ffi::AnyBuffer new_values, HeadsCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("qkv", qkv.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("qkv", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(
      ExpectActivationType("q_weight", q_weight.element_type(), &call->weight_type));
  if (call->weight_type != call->type && call->weight_type != DataType::kF32) {
    return Expected("q_weight", "float32 or the type of qkv", TypeText(q_weight.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectType("k_weight", k_weight.element_type(), q_weight.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("frequencies", frequencies.element_type(), ffi::F32));
  const NamedOperand heads[] = {{"keys", keys},
                                {"values", values},
                                {"q", q},
                                {"new_keys", new_keys},
                                {"new_values", new_values}};
  for (const NamedOperand& operand : heads) {
    NVFP4_RETURN_IF_ERROR(
        ExpectType(operand.name, operand.buffer.element_type(), qkv.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectRank("keys [b, m, s, d]", keys.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, n, d]", q.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("frequencies [r/2]", frequencies.dimensions(), 1));
  const int64_t b = keys.dimensions()[0], m = keys.dimensions()[1], s = keys.dimensions()[2];
  const int64_t d = keys.dimensions()[3], t = q.dimensions()[1], n = q.dimensions()[2];
  const int64_t half = frequencies.dimensions()[0];
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (keys)", d, kPreparedWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (keys)", d, kMaxPreparedWidth));
  if (half != 0) {
    NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("r (frequencies)", 2 * half, kPreparedWidthFactor));
    NVFP4_RETURN_IF_ERROR(ExpectAtMost("r (frequencies)", 2 * half, d));
  }
  NVFP4_RETURN_IF_ERROR(ExpectDims("q [b, t, n, d]", q.dimensions(), {b, t, n, d}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("qkv [b, t, (n + 2m) d]", qkv.dimensions(), {b, t, (n + 2 * m) * d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  for (const NamedOperand& operand : {heads[1], heads[3], heads[4]}) {
    NVFP4_RETURN_IF_ERROR(ExpectDims(operand.name, operand.buffer.dimensions(), {b, m, s, d}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("q_weight [d]", q_weight.dimensions(), {d}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("k_weight [d]", k_weight.dimensions(), {q_weight.dimensions()[0]}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (keys)", b, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n + 2m (qkv)", n + 2 * m, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows / std::max(b * (n + 2 * m), int64_t{1})));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (keys)", s, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAligned(
      {{"qkv", qkv}, {"positions", positions}, heads[0], heads[1], heads[2]}, kAlignment));
  call->b = static_cast<int32_t>(b);
  call->t = static_cast<int32_t>(t);
  call->s = static_cast<int32_t>(s);
  call->n = static_cast<int32_t>(n);
  call->m = static_cast<int32_t>(m);
  call->d = static_cast<int32_t>(d);
  call->half = static_cast<int32_t>(half);
  return ffi::Error::Success();
}

// Puts `operand` where a kernel updates it in place. With input_output_aliases, XLA gives both the
// same memory, and nothing is copied. Under jax.vmap, JAX runs the call in a loop without aliases.
ffi::Error PutInPlace(cudaStream_t stream, std::string_view what, ffi::AnyBuffer operand,
                      ffi::AnyBuffer result) {
  NVFP4_RETURN_IF_ERROR(ExpectType(what, result.element_type(), operand.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost(what, operand.size_bytes(), result.size_bytes()));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost(what, result.size_bytes(), operand.size_bytes()));
  if (operand.untyped_data() == result.untyped_data()) return ffi::Error::Success();
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{what, result}}, kAlignment));
  return FromCuda(cudaMemcpyAsync(result.untyped_data(), operand.untyped_data(),
                                  operand.size_bytes(), cudaMemcpyDeviceToDevice, stream),
                  "cudaMemcpyAsync");
}

ffi::Error PrepareHeads(cudaStream_t stream, ffi::AnyBuffer qkv, ffi::AnyBuffer positions,
                        ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer q_weight,
                        ffi::AnyBuffer k_weight, ffi::AnyBuffer frequencies,
                        ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> new_keys,
                        ffi::Result<ffi::AnyBuffer> new_values, float eps, float rotation_scale,
                        bool rotates_first) {
  HeadsCall call = {};
  NVFP4_RETURN_IF_ERROR(CheckHeads(qkv, positions, keys, values, q_weight, k_weight, frequencies,
                                   *q, *new_keys, *new_values, &call));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_keys", keys, *new_keys));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_values", values, *new_values));
  call.eps = eps;
  call.rotation_scale = rotation_scale;
  call.rotates_first = rotates_first;
  const HeadsBuffers buffers = {qkv.untyped_data(),         Data<int32_t>(positions),
                                DataOrNull<void>(q_weight), DataOrNull<void>(k_weight),
                                DataOrNull(frequencies),    q->untyped_data(),
                                new_keys->untyped_data(),   new_values->untyped_data()};
  return FromCuda(LaunchPrepareHeads(stream, call, buffers), "nvfp4_prepare_heads_cuda");
}

// The operands of a step of a recurrent mixer that both mixers have.
struct StepOperands {
  ffi::AnyBuffer projected, positions, conv_weight, A_log, dt_bias, norm, inputs, state;
  ffi::AnyBuffer y, new_inputs, new_state;
};

ffi::Error CheckStepTypes(const StepOperands& o, DataType* type) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("projected", o.projected.element_type(), type));
  const ffi::DataType same = o.projected.element_type();
  NVFP4_RETURN_IF_ERROR(ExpectType("inputs", o.inputs.element_type(), same));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", o.y.element_type(), same));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", o.positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("conv_weight", o.conv_weight.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("A_log", o.A_log.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("dt_bias", o.dt_bias.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("norm", o.norm.element_type(), ffi::F32));
  return ExpectType("state", o.state.element_type(), ffi::F32);
}

// `channels` is the number of channels of the convolution, `numbers` that of a row of `projected`,
// and `outputs` that of a row of y.
ffi::Error CheckStepDims(const StepOperands& o, int64_t heads, int64_t channels, int64_t numbers,
                         int64_t outputs) {
  const int64_t b = o.state.dimensions()[0];
  NVFP4_RETURN_IF_ERROR(ExpectRank("conv_weight [c, taps]", o.conv_weight.dimensions(), 2));
  const int64_t taps = o.conv_weight.dimensions()[1];
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("taps (conv_weight)", taps, 1));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("conv_weight [c, taps]", o.conv_weight.dimensions(), {channels, taps}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("projected [b, 1, n]", o.projected.dimensions(), {b, 1, numbers}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, 1]", o.positions.dimensions(), {b, 1}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("A_log [heads]", o.A_log.dimensions(), {heads}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("dt_bias [heads]", o.dt_bias.dimensions(), {heads}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("inputs [b, taps - 1, c]", o.inputs.dimensions(), {b, taps - 1, channels}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, 1, outputs]", o.y.dimensions(), {b, 1, outputs}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("taps (conv_weight)", taps, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b n (projected)", b * numbers, kMaxRows));
  return ExpectAligned({{"projected", o.projected},
                        {"positions", o.positions},
                        {"conv_weight", o.conv_weight},
                        {"A_log", o.A_log},
                        {"dt_bias", o.dt_bias},
                        {"norm", o.norm},
                        {"inputs", o.inputs},
                        {"state", o.state},
                        {"y", o.y}},
                       kAlignment);
}

ffi::Error DeltaStep(cudaStream_t stream, ffi::AnyBuffer projected, ffi::AnyBuffer positions,
                     ffi::AnyBuffer conv_weight, ffi::AnyBuffer A_log, ffi::AnyBuffer dt_bias,
                     ffi::AnyBuffer norm, ffi::AnyBuffer inputs, ffi::AnyBuffer state,
                     ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> new_inputs,
                     ffi::Result<ffi::AnyBuffer> new_state, bool interleaved, float eps) {
  const StepOperands operands = {projected, positions, conv_weight, A_log,       dt_bias,   norm,
                                 inputs,    state,     *y,          *new_inputs, *new_state};
  DataType type;
  NVFP4_RETURN_IF_ERROR(CheckStepTypes(operands, &type));
  NVFP4_RETURN_IF_ERROR(ExpectRank("state [b, m, r, d, e]", state.dimensions(), 5));
  const int64_t b = state.dimensions()[0], m = state.dimensions()[1], r = state.dimensions()[2];
  const int64_t d = state.dimensions()[3], e = state.dimensions()[4];
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("m (state)", m, 1));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("r (state)", r, 1));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("d (state)", d, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("e (state)", e, kStateWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (state)", d, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (state)", e, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("m r (state)", m * r, kMaxExtent));
  const int64_t channels = 2 * m * d + m * r * e;
  NVFP4_RETURN_IF_ERROR(ExpectDims("norm [e]", norm.dimensions(), {e}));
  NVFP4_RETURN_IF_ERROR(
      CheckStepDims(operands, m * r, channels, channels + m * r * (e + 2), m * r * e));
  const DeltaStepCall call = {b,
                              static_cast<int32_t>(m),
                              static_cast<int32_t>(r),
                              static_cast<int32_t>(d),
                              static_cast<int32_t>(e),
                              static_cast<int32_t>(conv_weight.dimensions()[1]),
                              type,
                              interleaved,
                              1.0f / std::sqrt(static_cast<float>(d)),
                              eps};
  const DeltaStepBuffers buffers = {
      projected.untyped_data(),   Data<int32_t>(positions),
      Data<float>(conv_weight),   Data<float>(A_log),
      Data<float>(dt_bias),       Data<float>(norm),
      new_inputs->untyped_data(), static_cast<float*>(new_state->untyped_data()),
      y->untyped_data()};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_inputs", inputs, *new_inputs));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_state", state, *new_state));
  return FromCuda(LaunchDeltaStep(stream, call, buffers), "nvfp4_delta_step_cuda");
}

ffi::Error Mamba2Step(cudaStream_t stream, ffi::AnyBuffer projected, ffi::AnyBuffer positions,
                      ffi::AnyBuffer conv_weight, ffi::AnyBuffer conv_bias, ffi::AnyBuffer A_log,
                      ffi::AnyBuffer dt_bias, ffi::AnyBuffer D, ffi::AnyBuffer norm,
                      ffi::AnyBuffer inputs, ffi::AnyBuffer state, ffi::Result<ffi::AnyBuffer> y,
                      ffi::Result<ffi::AnyBuffer> new_inputs, ffi::Result<ffi::AnyBuffer> new_state,
                      ffi::Result<ffi::AnyBuffer> workspace, std::string_view activation,
                      float alpha, float limit, int64_t groups, float smallest_step,
                      float largest_step, float eps) {
  const StepOperands operands = {projected, positions, conv_weight, A_log,       dt_bias,   norm,
                                 inputs,    state,     *y,          *new_inputs, *new_state};
  const ActivationRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(ExpectName("activation", activation, kActivations, &record));
  if (record->gated) {
    return Expected("activation", "one that is not gated", std::string(activation));
  }
  DataType type;
  NVFP4_RETURN_IF_ERROR(CheckStepTypes(operands, &type));
  NVFP4_RETURN_IF_ERROR(ExpectType("conv_bias", conv_bias.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("D", D.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("state [b, h, p, n]", state.dimensions(), 4));
  const int64_t b = state.dimensions()[0], heads = state.dimensions()[1];
  const int64_t p = state.dimensions()[2], n = state.dimensions()[3];
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("groups", groups, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("h (state)", heads, groups));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("p (state)", p, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (state)", n, kStateWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("p (state)", p, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (state)", n, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("h (state)", heads, kMaxExtent));
  const int64_t inner = heads * p, channels = inner + 2 * groups * n;
  NVFP4_RETURN_IF_ERROR(ExpectDims("norm [h p]", norm.dimensions(), {inner}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("D [h]", D.dimensions(), {heads}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("conv_bias [c]", conv_bias.dimensions(), {channels}));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"conv_bias", conv_bias}, {"D", D}}, kAlignment));
  NVFP4_RETURN_IF_ERROR(CheckStepDims(operands, heads, channels, inner + channels + heads, inner));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, 4 * b * inner));
  const Mamba2StepCall call = {b,
                               static_cast<int32_t>(heads),
                               static_cast<int32_t>(groups),
                               static_cast<int32_t>(p),
                               static_cast<int32_t>(n),
                               static_cast<int32_t>(conv_weight.dimensions()[1]),
                               type,
                               {record->kind, false, false, alpha, 0.0f, limit, limit},
                               smallest_step,
                               largest_step,
                               eps};
  const Mamba2StepBuffers buffers = {projected.untyped_data(),
                                     Data<int32_t>(positions),
                                     Data<float>(conv_weight),
                                     DataOrNull(conv_bias),
                                     Data<float>(A_log),
                                     Data<float>(dt_bias),
                                     Data<float>(D),
                                     Data<float>(norm),
                                     new_inputs->untyped_data(),
                                     static_cast<float*>(new_state->untyped_data()),
                                     y->untyped_data(),
                                     static_cast<float*>(workspace->untyped_data())};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_inputs", inputs, *new_inputs));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_state", state, *new_state));
  return FromCuda(LaunchMamba2Step(stream, call, buffers), "nvfp4_mamba2_step_cuda");
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

XLA_FFI_DEFINE_HANDLER(kAttention, Attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q          [b, t, n, d]
                           .Arg<ffi::AnyBuffer>()  // k          [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // v          [b, m, s, dv]
                           .Arg<ffi::AnyBuffer>()  // positions  [b, t]
                           .Arg<ffi::AnyBuffer>()  // sinks      [n] or [0]
                           .Ret<ffi::AnyBuffer>()  // y          [b, t, n, dv]
                           .Ret<ffi::AnyBuffer>()  // workspace  U8 [bytes]
                           .Attr<float>("scale")
                           .Attr<int32_t>("window")
                           .Attr<int32_t>("chunk"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAddRmsNorm, AddRmsNorm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x       [rows, h]
                           .Arg<ffi::AnyBuffer>()  // added   [rows, h] or [0, 0]
                           .Arg<ffi::AnyBuffer>()  // weight  [h]
                           .Ret<ffi::AnyBuffer>()  // sum     [rows, h], or [0, 0] without added
                           .Ret<ffi::AnyBuffer>()  // y       [rows, h]
                           .Attr<float>("eps"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPrepareHeads, PrepareHeads,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // qkv          [b, t, (n + 2m) d]
                           .Arg<ffi::AnyBuffer>()  // positions    [b, t]
                           .Arg<ffi::AnyBuffer>()  // keys         [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // values       [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // q_weight     [d] or [0]
                           .Arg<ffi::AnyBuffer>()  // k_weight     [d] or [0]
                           .Arg<ffi::AnyBuffer>()  // frequencies  [r/2]
                           .Ret<ffi::AnyBuffer>()  // q            [b, t, n, d]
                           .Ret<ffi::AnyBuffer>()  // new_keys     the memory of keys
                           .Ret<ffi::AnyBuffer>()  // new_values   the memory of values
                           .Attr<float>("eps")
                           .Attr<float>("rotation_scale")
                           .Attr<bool>("rotates_first"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kDeltaStep, DeltaStep,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // projected    [b, 1, n]
                           .Arg<ffi::AnyBuffer>()  // positions    [b, 1]
                           .Arg<ffi::AnyBuffer>()  // conv_weight  [c, taps]
                           .Arg<ffi::AnyBuffer>()  // A_log        [m r]
                           .Arg<ffi::AnyBuffer>()  // dt_bias      [m r]
                           .Arg<ffi::AnyBuffer>()  // norm         [e]
                           .Arg<ffi::AnyBuffer>()  // inputs       [b, taps - 1, c]
                           .Arg<ffi::AnyBuffer>()  // state        [b, m, r, d, e]
                           .Ret<ffi::AnyBuffer>()  // y            [b, 1, m r e]
                           .Ret<ffi::AnyBuffer>()  // new_inputs, in the memory of inputs
                           .Ret<ffi::AnyBuffer>()  // new_state, in the memory of state
                           .Attr<bool>("interleaved")
                           .Attr<float>("eps"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kMamba2Step, Mamba2Step,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // projected    [b, 1, z, x, B, C, dt]
                           .Arg<ffi::AnyBuffer>()  // positions    [b, 1]
                           .Arg<ffi::AnyBuffer>()  // conv_weight  [c, taps]
                           .Arg<ffi::AnyBuffer>()  // conv_bias    [c] or [0]
                           .Arg<ffi::AnyBuffer>()  // A_log        [h]
                           .Arg<ffi::AnyBuffer>()  // dt_bias      [h]
                           .Arg<ffi::AnyBuffer>()  // D            [h]
                           .Arg<ffi::AnyBuffer>()  // norm         [h p]
                           .Arg<ffi::AnyBuffer>()  // inputs       [b, taps - 1, c]
                           .Arg<ffi::AnyBuffer>()  // state        [b, h, p, n]
                           .Ret<ffi::AnyBuffer>()  // y            [b, 1, h p]
                           .Ret<ffi::AnyBuffer>()  // new_inputs, in the memory of inputs
                           .Ret<ffi::AnyBuffer>()  // new_state, in the memory of state
                           .Ret<ffi::AnyBuffer>()  // workspace    U8 [bytes]
                           .Attr<std::string_view>("activation")
                           .Attr<float>("alpha")
                           .Attr<float>("limit")
                           .Attr<int64_t>("groups")
                           .Attr<float>("smallest_step")
                           .Attr<float>("largest_step")
                           .Attr<float>("eps"),
                       {ffi::Traits::kCmdBufferCompatible});

template <typename Handler>
nb::capsule Capsule(Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict targets;
  targets["nvfp4_moe_w4a16_sm80"] = Capsule(kMoESm80);
  targets["nvfp4_moe_w4a16_sm90"] = Capsule(kMoESm90);
  targets["nvfp4_grouped_gemm_w4a16_sm80"] = Capsule(kGroupedGemmSm80);
  targets["nvfp4_grouped_gemm_w4a16_sm90"] = Capsule(kGroupedGemmSm90);
  if (kHasSm100) {
    targets["nvfp4_moe_w4a4_sm100"] = Capsule(kMoESm100);
    targets["nvfp4_grouped_gemm_w4a4_sm100"] = Capsule(kGroupedGemmSm100);
  }
  targets["nvfp4_moe_w4a4_sm120"] = Capsule(kMoESm120);
  targets["nvfp4_grouped_gemm_w4a4_sm120"] = Capsule(kGroupedGemmSm120);
  targets["nvfp4_quantize_cuda"] = Capsule(kQuantize);
  targets["nvfp4_route_cuda"] = Capsule(kRoute);
  targets["nvfp4_attention_cuda"] = Capsule(kAttention);
  targets["nvfp4_add_rms_norm_cuda"] = Capsule(kAddRmsNorm);
  targets["nvfp4_prepare_heads_cuda"] = Capsule(kPrepareHeads);
  targets["nvfp4_delta_step_cuda"] = Capsule(kDeltaStep);
  targets["nvfp4_mamba2_step_cuda"] = Capsule(kMamba2Step);
  return targets;
}

struct LayerWorkspace {
  const char* name;
  int64_t (*bytes)(const MoEShape& shape);
};

constexpr LayerWorkspace kLayerWorkspaces[] = {
    {"moe_workspace_bytes",
     [](const MoEShape& shape) { return MoEWorkspaceBytes(shape, DataType::kBF16); }},
    {"moe_f32_workspace_bytes",
     [](const MoEShape& shape) { return MoEWorkspaceBytes(shape, DataType::kF32); }},
    {"moe_w4a16_workspace_bytes", MoEW4A16WorkspaceBytes},
    {"moe_w4a4_workspace_bytes", MoEW4A4WorkspaceBytes},
    {"moe_w4a4_sm100_workspace_bytes", MoEW4A4Sm100WorkspaceBytes},
};

struct GroupedWorkspace {
  const char* name;
  int64_t (*bytes)(const GroupedGemmShape& shape);
};

constexpr GroupedWorkspace kGroupedWorkspaces[] = {
    {"grouped_gemm_workspace_bytes", GroupedGemmWorkspaceBytes},
    {"grouped_gemm_w4a16_workspace_bytes", GroupedGemmW4A16WorkspaceBytes},
    {"grouped_gemm_w4a4_workspace_bytes", GroupedGemmW4A4WorkspaceBytes},
    {"grouped_gemm_w4a4_sm100_workspace_bytes", GroupedGemmW4A4Sm100WorkspaceBytes},
};

}  // namespace
}  // namespace nvfp4

NB_MODULE(_nvfp4_cuda, m) {
  m.def("registrations", &nvfp4::Registrations, "Return {FFI target name: capsule}.");
  m.def(
      "ffi_api_version", [] { return std::pair<int, int>(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "Return the (major, minor) of the XLA FFI headers that this module was built with.");
  m.def(
      "emulates_blackwell", [] { return NVFP4_EMULATE_BLACKWELL != 0; },
      "Return whether GPUs of compute capability 9.0 can run the targets for 10.x and 12.x, by "
      "emulation.");
  // The following functions are for tests, which compare them with backends/cuda.py.
  m.def(
      "max_shared_bytes",
      [] {
        nb::dict bytes;
        bytes["moe_w4a16_sm80"] = nvfp4::MaxSharedBytesSm80();
        bytes["moe_w4a16_sm90"] = nvfp4::MaxSharedBytesSm90();
        bytes["moe_w4a4_sm120"] = nvfp4::MaxSharedBytesSm120();
        return bytes;
      },
      "Return {backend record: bytes of shared memory that a block of its largest kernel needs}.");
  m.def("few_slots_shared_bytes", &nvfp4::FewSlotsSharedBytes,
        "Return the bytes of shared memory that a block of GEMM 1 for few slots needs.");
  m.def("combined_few_shared_bytes", &nvfp4::CombinedFewSharedBytes,
        "Return the bytes of shared memory that a block of GEMM 2 for few slots needs.");
  m.def(
      "attention_workspace_bytes",
      [](int64_t b, int64_t t, int64_t n, int64_t m, int64_t s, int64_t dv) {
        return nvfp4::AttentionWorkspaceBytes({b, t, n, m, s, dv, dv});
      },
      "Return the bytes of workspace that the handler of attention expects.");
  for (const nvfp4::LayerWorkspace& record : nvfp4::kLayerWorkspaces) {
    m.def(
        record.name,
        [bytes = record.bytes](int64_t t, int64_t top_k, int64_t e, int64_t h, int64_t i) {
          return bytes({t, top_k, e, h, i, 2 * i});
        },
        "Return the bytes of workspace that the handler of an expert layer expects.");
  }
  for (const nvfp4::GroupedWorkspace& record : nvfp4::kGroupedWorkspaces) {
    m.def(
        record.name,
        [bytes = record.bytes](int64_t rows, int64_t e, int64_t n, int64_t k) {
          return bytes({rows, n, n, k, e, 1});
        },
        "Return the bytes of workspace that the handler of a grouped GEMM expects.");
  }
}
