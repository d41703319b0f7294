// The targets of recurrent mixers: their operands (operands.h), and the handlers, which fill the
// structures of launch.h and launch kernels.
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "cuda_bindings.h"
#include "cuda_checks.h"
#include "operands.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

// Whether all that a step reads besides what its projection has written is unchanged since the
// previous kernel: the inputs, the state and the operands `others`. The inputs and the state must
// be in place, so that no copy writes them first.
bool StateIsUnchanged(const Call& operands, std::initializer_list<std::string_view> others) {
  return operands.in<void>("inputs") == operands.in<void>("new_inputs") &&
         operands.in<void>("state") == operands.in<void>("new_state") &&
         AreUnchanged(operands, {"inputs", "state"}) && AreUnchanged(operands, others);
}

// Checks what all steps have. A token of `projected` has `numbers` numbers.
ffi::Error CheckStep(const Call& operands, int64_t numbers) {
  const int64_t b = operands.size("b"), taps = operands.size("taps");
  const int64_t t = operands.size("t"), w = operands.size("w");
  NVFP4_RETURN_IF_ERROR(Expect({AtLeast("taps (conv_weight)", taps, 1)}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("projected [b, t, n]", operands["projected"].dimensions(), {b, t, numbers}));
  const bool many = operands.in_or_null<int32_t>("kept") != nullptr;
  return Expect({AtLeast("t (projected)", t, 1), AtMost("t (projected), the tokens of a row", t, w),
                 AtMost("w (state), the states of a row", w, many ? kMaxStates : 1),
                 AtMost("taps (conv_weight)", taps, kMaxRows),
                 AtMost("b t n (projected)", b * t * numbers, kMaxRows)});
}

ffi::Error PutStateInPlace(cudaStream_t stream, const Call& operands) {
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, operands, "inputs", "new_inputs"));
  return PutInPlace(stream, operands, "state", "new_state");
}

// Fills what both steps of a delta net have, from the sizes of the state.
DeltaStepCall StartDeltaStep(const Call& operands, int32_t key_heads, int32_t shared, float eps) {
  DeltaStepCall call = {};
  call.b = operands.size("b");
  call.t = operands.size32("t");
  call.w = operands.size32("w");
  call.key_heads = key_heads;
  call.shared = shared;
  call.d = operands.size32("d");
  call.e = operands.size32("e");
  call.taps = operands.size32("taps");
  call.type = operands.type("projected");
  call.scale = 1.0f / std::sqrt(static_cast<float>(call.d));
  call.eps = eps;
  call.state_is_unchanged =
      StateIsUnchanged(operands, {"positions", "kept", "conv_weight", "A_log", "dt_bias", "norm"});
  return call;
}

DeltaStepBuffers DeltaBuffersOf(const Call& operands) {
  DeltaStepBuffers buffers = {};
  buffers.projected = operands.in<void>("projected");
  buffers.positions = operands.in<int32_t>("positions");
  buffers.kept = operands.in_or_null<int32_t>("kept");
  buffers.conv_weight = operands.in("conv_weight");
  buffers.A_log = operands.in("A_log");
  buffers.dt_bias = operands.in("dt_bias");
  buffers.norm = operands.in("norm");
  buffers.rates = operands.in_or_null<void>("rates");
  buffers.inputs = operands.out("new_inputs");
  buffers.state = operands.out<float>("new_state");
  buffers.y = operands.out("y");
  return buffers;
}

constexpr Operand kDeltaStepOperands[] = {
    {"projected", kActivation, "[b, t, n]"},
    {"positions", kS32, "[b, t]"},
    {"c", kAnyType, "2 m d + m r e", kLetter},
    {"conv_weight", kF32, "[c, taps]"},
    {"A_log", kF32, "[m r]"},
    {"dt_bias", kF32, "[m r]"},
    {"norm", kF32, "[e]"},
    {"rates", Like("projected"), "[b, t, 2 m r] or [0]"},
    {"kept", kS32, "[b] or [0]"},
    {"inputs", Like("projected"), "[b, w, taps - 1, c]"},
    {"state", kF32, "[b, w, m, r, d, e]", kGivesSizes},
    {"y", Like("projected"), "[b, t, m r e]", kResult},
    {"new_inputs", Like("projected"), "[b, w, taps - 1, c]", kResult},
    {"new_state", kF32, "[b, w, m, r, d, e]", kResult},
};

ffi::Error DeltaStep(cudaStream_t stream, const Call& operands, bool interleaved, float eps) {
  const int64_t m = operands.size("m"), r = operands.size("r");
  const int64_t d = operands.size("d"), e = operands.size("e");
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtLeast("m (state)", m, 1), AtLeast("r (state)", r, 1), AtLeast("d (state)", d, 1),
       MultipleOf("e (state)", e, kStateWidthFactor), AtMost("d (state)", d, kMaxStateWidth),
       AtMost("e (state)", e, kMaxStateWidth), AtMost("m r (state)", m * r, kMaxExtent)}));
  const bool apart = operands["rates"].dimensions().size() != 1;
  NVFP4_RETURN_IF_ERROR(CheckStep(operands, 2 * m * d + 2 * m * r * e + (apart ? 0 : 2 * m * r)));
  DeltaStepCall call =
      StartDeltaStep(operands, static_cast<int32_t>(m), static_cast<int32_t>(r), eps);
  call.interleaved = interleaved;
  const DeltaStepBuffers buffers = DeltaBuffersOf(operands);
  NVFP4_RETURN_IF_ERROR(PutStateInPlace(stream, operands));
  return FromCuda(LaunchDeltaStep(stream, call, buffers));
}

constexpr Operand kKimiStepOperands[] = {
    {"projected", kActivation, "[b, t, columns]"},
    {"positions", kS32, "[b, t]"},
    {"c", kAnyType, "2 n d + n e", kLetter},
    {"conv_weight", kF32, "[c, taps]"},
    {"A_log", kF32, "[n]"},
    {"dt_bias", kF32, "[n d]"},
    {"norm", kF32, "[e]"},
    {"rates", Like("projected"), "[b, t, n] or [0]"},
    {"decays", Like("projected"), "[b, t, n d]"},
    {"gates", Like("projected"), "[b, t, n e]"},
    {"kept", kS32, "[b] or [0]"},
    {"inputs", Like("projected"), "[b, w, taps - 1, c]"},
    {"state", kF32, "[b, w, n, d, e]", kGivesSizes},
    {"y", Like("projected"), "[b, t, n e]", kResult},
    {"new_inputs", Like("projected"), "[b, w, taps - 1, c]", kResult},
    {"new_state", kF32, "[b, w, n, d, e]", kResult},
};

ffi::Error KimiDeltaStep(cudaStream_t stream, const Call& operands, float lower_bound, float eps) {
  const int64_t n = operands.size("n"), d = operands.size("d"), e = operands.size("e");
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtLeast("n (state)", n, 1), AtLeast("d (state)", d, 1),
       MultipleOf("e (state)", e, kStateWidthFactor), AtMost("d (state)", d, kMaxStateWidth),
       AtMost("e (state)", e, kMaxStateWidth), AtMost("n (state)", n, kMaxExtent)}));
  if (!(lower_bound <= 0.0f)) {
    return Expected("lower_bound", "at most 0", std::to_string(lower_bound));
  }
  const bool apart = operands["rates"].dimensions().size() != 1;
  NVFP4_RETURN_IF_ERROR(CheckStep(operands, n * (2 * d + e) + (apart ? 0 : n)));
  DeltaStepCall call = StartDeltaStep(operands, static_cast<int32_t>(n), /*shared=*/1, eps);
  call.channel_decays = true;
  call.lower_bound = lower_bound;
  DeltaStepBuffers buffers = DeltaBuffersOf(operands);
  buffers.decays = operands.in<void>("decays");
  buffers.gates = operands.in<void>("gates");
  NVFP4_RETURN_IF_ERROR(PutStateInPlace(stream, operands));
  return FromCuda(LaunchDeltaStep(stream, call, buffers));
}

constexpr Operand kDeltaRuleOperands[] = {
    {"q", kF32, "[b, t, m, d]"},
    {"k", kF32, "[b, t, m, d]"},
    {"v", kF32, "[b, t, m, r, e]", kGivesSizes},
    {"g", kF32, ""},  // [b, t, m, r], or [b, t, m, 1, d] with a decay for each channel
    {"beta", kF32, "[b, t, m, r]"},
    {"lengths", kS32, "[b] or [0]"},
    {"state", kF32, "[b, m, r, d, e]"},
    {"y", kF32, "[b, t, m, r, e]", kResult},
    {"new_state", kF32, "[b, m, r, d, e]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

ffi::Error DeltaRule(cudaStream_t stream, const Call& operands, bool normalize) {
  const int64_t b = operands.size("b"), t = operands.size("t"), m = operands.size("m");
  const int64_t r = operands.size("r"), e = operands.size("e"), d = operands.size("d");
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtLeast("m (v)", m, 1), AtLeast("r (v)", r, 1), MultipleOf("d (q)", d, kStateWidthFactor),
       MultipleOf("e (v)", e, kStateWidthFactor), AtMost("d (q)", d, kMaxStateWidth),
       AtMost("e (v)", e, kMaxStateWidth), AtMost("m r (v)", m * r, kMaxExtent),
       AtMost("b t m r (v)", b * t * m * r, kMaxRows)}));
  const ffi::Span<const int64_t> decays = operands["g"].dimensions();
  const bool channel_decays = decays.size() == 5;
  if (channel_decays) {
    NVFP4_RETURN_IF_ERROR(ExpectDims("g [b, t, m, 1, d]", decays, {b, t, m, 1, d}));
    NVFP4_RETURN_IF_ERROR(
        Expect({AtMost("r (v), with a decay for each channel", r, 1),
                AtMost("m d (q), with a decay for each channel", m * d, kMaxExtent)}));
  } else {
    NVFP4_RETURN_IF_ERROR(ExpectDims("g [b, t, m, r]", decays, {b, t, m, r}));
  }
  const DeltaRuleCall call = {b,
                              t,
                              static_cast<int32_t>(m),
                              static_cast<int32_t>(r),
                              static_cast<int32_t>(d),
                              static_cast<int32_t>(e),
                              normalize,
                              1.0f / std::sqrt(static_cast<float>(d)),
                              channel_decays};
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, DeltaRuleWorkspaceBytes(call)));
  const DeltaRuleBuffers buffers = {operands.in("q"),
                                    operands.in("k"),
                                    operands.in("v"),
                                    operands.in("g"),
                                    operands.in("beta"),
                                    operands.in_or_null<int32_t>("lengths"),
                                    operands.out<float>("new_state"),
                                    operands.out<float>("y"),
                                    operands.out("workspace")};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, operands, "state", "new_state"));
  return FromCuda(LaunchDeltaRule(stream, call, buffers));
}

constexpr Operand kConvolutionOperands[] = {
    {"x", kHalf, "[b, t, n]"},
    {"positions", kS32, "[b, t]"},
    {"weight", kF32, "[c, taps]"},
    {"bias", kF32, "[c] or [0]"},
    {"inputs", Like("x"), "[b, taps - 1, c]"},
    {"y0", kF32, "", kResult},  // [b, t, heads * widths[0]]
    {"y1", kF32, "", kResult},  // likewise, or [0] if there is no such part
    {"y2", kF32, "", kResult},
    {"new_inputs", Like("x"), "[b, taps - 1, c]", kResult},
};

ffi::Error CausalConvolution(cudaStream_t stream, const Call& operands,
                             ffi::Span<const int64_t> widths, int64_t first, int64_t heads,
                             int64_t stride) {
  const int64_t b = operands.size("b"), t = operands.size("t"), n = operands.size("n");
  const int64_t channels = operands.size("c"), taps = operands.size("taps");
  NVFP4_RETURN_IF_ERROR(
      Expect({AtLeast("taps (weight)", taps, kMinConvolutionTaps),
              AtMost("taps (weight)", taps, kMaxConvolutionTaps),
              MultipleOf("n (x)", n, kConvolutionFactor), AtMost("n (x)", n, kMaxExtent),
              AtMost("c (weight)", channels, kMaxExtent), AtMost("b t (x)", b * t, kMaxRows),
              AtLeast("heads", heads, 1), AtMost("heads", heads, channels),
              AtMost("number of widths", static_cast<int64_t>(widths.size()), kConvolutionParts)}));
  ConvolutionCall call = {b,
                          t,
                          n,
                          static_cast<int32_t>(channels),
                          static_cast<int32_t>(first),
                          static_cast<int32_t>(heads),
                          static_cast<int32_t>(stride),
                          {},
                          static_cast<int32_t>(taps),
                          operands.type("x")};
  ConvolutionBuffers buffers = {operands.in<void>("x"),     operands.in<int32_t>("positions"),
                                operands.in("weight"),      operands.in_or_null("bias"),
                                operands.out("new_inputs"), {}};
  int64_t width = 0;  // of a head
  for (size_t i = 0; i < widths.size(); ++i) {
    NVFP4_RETURN_IF_ERROR(Expect({MultipleOf("a width", widths[i], kConvolutionFactor),
                                  AtMost("a width", widths[i], channels)}));
    width += widths[i];
    call.widths[i] = static_cast<int32_t>(widths[i]);
    const std::string name = "y" + std::to_string(i);
    NVFP4_RETURN_IF_ERROR(ExpectDims(name, operands[name].dimensions(), {b, t, heads * widths[i]}));
    buffers.y[i] = operands.out<float>(name);
  }
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("weight [c, taps]", operands["weight"].dimensions(), {heads * width, taps}));
  if (first < 0 || first % kConvolutionFactor != 0) {
    return Expected("first", "0 or a positive multiple of 4", std::to_string(first));
  }
  NVFP4_RETURN_IF_ERROR(
      operands.Check({AtMost("first", first, n), MultipleOf("stride", stride, kConvolutionFactor),
                      AtLeast("stride", stride, width), AtMost("stride", stride, n),
                      AtMost("first + heads * stride", first + heads * stride, n)}));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, operands, "inputs", "new_inputs"));
  return FromCuda(LaunchConvolution(stream, call, buffers));
}

constexpr Operand kMamba2StepOperands[] = {
    {"projected", kActivation, "[b, t, columns]"},  // z, x, B, C, dt
    {"positions", kS32, "[b, t]"},
    {"conv_weight", kF32, "[c, taps]"},
    {"conv_bias", kF32, "[c] or [0]"},
    {"A_log", kF32, "[h]"},
    {"dt_bias", kF32, "[h]"},
    {"D", kF32, "[h]"},
    {"norm", kF32, "[h p]"},
    {"kept", kS32, "[b] or [0]"},
    {"inputs", Like("projected"), "[b, w, taps - 1, c]"},
    {"state", kF32, "[b, w, h, p, n]", kGivesSizes},
    {"y", Like("projected"), "[b, t, h p]", kResult},
    {"new_inputs", Like("projected"), "[b, w, taps - 1, c]", kResult},
    {"new_state", kF32, "[b, w, h, p, n]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

ffi::Error Mamba2Step(cudaStream_t stream, const Call& operands, std::string_view activation,
                      float alpha, float limit, int64_t groups, float smallest_step,
                      float largest_step, float eps) {
  const ActivationRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(ExpectName("activation", activation, kActivations, &record));
  if (record->gated) {
    return Expected("activation", "one that is not gated", std::string(activation));
  }
  const int64_t heads = operands.size("h"), p = operands.size("p"), n = operands.size("n");
  NVFP4_RETURN_IF_ERROR(
      Expect({AtLeast("groups", groups, 1), MultipleOf("h (state)", heads, groups),
              AtLeast("p (state)", p, 1), MultipleOf("n (state)", n, kStateWidthFactor),
              AtMost("p (state)", p, kMaxStateWidth), AtMost("n (state)", n, kMaxStateWidth),
              AtMost("h (state)", heads, kMaxExtent)}));
  const int64_t inner = heads * p, channels = inner + 2 * groups * n;
  NVFP4_RETURN_IF_ERROR(ExpectDims("conv_weight [c, taps]", operands["conv_weight"].dimensions(),
                                   {channels, operands.size("taps")}));
  NVFP4_RETURN_IF_ERROR(operands.Check());
  NVFP4_RETURN_IF_ERROR(CheckStep(operands, inner + channels + heads));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(
      operands, operands.size("b") * operands.size("t") * Mamba2StepRowBytes(heads, p)));
  const Mamba2StepCall call = {
      operands.size("b"),
      operands.size32("t"),
      operands.size32("w"),
      static_cast<int32_t>(heads),
      static_cast<int32_t>(groups),
      static_cast<int32_t>(p),
      static_cast<int32_t>(n),
      operands.size32("taps"),
      operands.type("projected"),
      {record->kind, false, false, alpha, 0.0f, limit, limit},
      smallest_step,
      largest_step,
      eps,
      StateIsUnchanged(operands, {"positions", "kept", "conv_weight", "conv_bias", "A_log",
                                  "dt_bias", "D", "norm"})};
  const Mamba2StepBuffers buffers = {operands.in<void>("projected"),
                                     operands.in<int32_t>("positions"),
                                     operands.in_or_null<int32_t>("kept"),
                                     operands.in("conv_weight"),
                                     operands.in_or_null("conv_bias"),
                                     operands.in("A_log"),
                                     operands.in("dt_bias"),
                                     operands.in("D"),
                                     operands.in("norm"),
                                     operands.out("new_inputs"),
                                     operands.out<float>("new_state"),
                                     operands.out("y"),
                                     operands.out<float>("workspace")};
  NVFP4_RETURN_IF_ERROR(PutStateInPlace(stream, operands));
  return FromCuda(LaunchMamba2Step(stream, call, buffers));
}

constexpr Operand kMamba2ScanOperands[] = {
    {"x", kF32, "[b, t, h, p]"},
    {"dt", kF32, "[b, t, h]"},
    {"a", kF32, "[h]"},
    {"B", kF32, "[b, t, g, n]"},
    {"C", kF32, "[b, t, g, n]"},
    {"D", kF32, "[h]"},
    {"lengths", kS32, "[b] or [0]"},
    {"state", kF32, "[b, h, p, n]"},
    {"y", kF32, "[b, t, h, p]", kResult},
    {"new_state", kF32, "[b, h, p, n]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

ffi::Error Mamba2Scan(cudaStream_t stream, const Call& operands) {
  const int64_t b = operands.size("b"), t = operands.size("t"), heads = operands.size("h");
  const int64_t p = operands.size("p"), groups = operands.size("g"), n = operands.size("n");
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtLeast("g (B)", groups, 1), MultipleOf("h (x)", heads, groups),
       MultipleOf("p (x)", p, kStateWidthFactor), MultipleOf("n (B)", n, kStateWidthFactor),
       AtMost("p (x)", p, kMaxStateWidth), AtMost("n (B)", n, kMaxStateWidth),
       AtMost("h (x)", heads, kMaxExtent), AtMost("b t h (x)", b * t * heads, kMaxRows)}));
  const Mamba2ScanCall call = {b,
                               t,
                               static_cast<int32_t>(heads),
                               static_cast<int32_t>(groups),
                               static_cast<int32_t>(p),
                               static_cast<int32_t>(n)};
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, Mamba2ScanWorkspaceBytes(call)));
  const Mamba2ScanBuffers buffers = {operands.in("x"),
                                     operands.in("dt"),
                                     operands.in("a"),
                                     operands.in("B"),
                                     operands.in("C"),
                                     operands.in("D"),
                                     operands.in_or_null<int32_t>("lengths"),
                                     operands.out<float>("new_state"),
                                     operands.out<float>("y"),
                                     operands.out("workspace")};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, operands, "state", "new_state"));
  return FromCuda(LaunchMamba2Scan(stream, call, buffers));
}

}  // namespace

std::vector<NamedHandler> RecurrentHandlers() {
  return {
      NVFP4_CUDA_TARGET("nvfp4_delta_step_cuda", kDeltaStepOperands, DeltaStep,
                        .Attr<bool>("interleaved").Attr<float>("eps")),
      NVFP4_CUDA_TARGET("nvfp4_kimi_delta_step_cuda", kKimiStepOperands, KimiDeltaStep,
                        .Attr<float>("lower_bound").Attr<float>("eps")),
      NVFP4_CUDA_TARGET("nvfp4_mamba2_step_cuda", kMamba2StepOperands, Mamba2Step,
                        .Attr<std::string_view>("activation")
                            .Attr<float>("alpha")
                            .Attr<float>("limit")
                            .Attr<int64_t>("groups")
                            .Attr<float>("smallest_step")
                            .Attr<float>("largest_step")
                            .Attr<float>("eps")),
      NVFP4_CUDA_TARGET("nvfp4_delta_rule_cuda", kDeltaRuleOperands, DeltaRule,
                        .Attr<bool>("normalize")),
      NVFP4_CUDA_TARGET("nvfp4_mamba2_scan_cuda", kMamba2ScanOperands, Mamba2Scan, ),
      NVFP4_CUDA_TARGET("nvfp4_causal_convolution_cuda", kConvolutionOperands, CausalConvolution,
                        .Attr<ffi::Span<const int64_t>>("widths")
                            .Attr<int64_t>("first")
                            .Attr<int64_t>("heads")
                            .Attr<int64_t>("stride")),
  };
}

}  // namespace nvfp4
