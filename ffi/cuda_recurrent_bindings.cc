// The FFI targets of recurrent mixers: their operands are checked here, and their kernels launched.
#include "cuda_bindings.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "cuda_checks.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

// The operands of a step of a recurrent mixer that both mixers have.
struct StepOperands {
  ffi::AnyBuffer projected, positions, conv_weight, A_log, dt_bias, norm, inputs, state;
  ffi::AnyBuffer y, new_inputs, new_state;
};

// Whether all that a step reads besides what its projection has written is unchanged since the
// previous kernel. The inputs and the state must be in place, so that no copy writes them first.
bool StateIsUnchanged(const StepOperands& o, const std::vector<ffi::AnyBuffer>& more) {
  const auto is_unchanged = [](const ffi::AnyBuffer& operand) {
    return operand.element_count() == 0 || running_chain.IsUnchanged(RangeOf(operand));
  };
  const ffi::AnyBuffer operands[] = {o.positions, o.conv_weight, o.A_log, o.dt_bias,
                                     o.norm,      o.inputs,      o.state};
  return o.inputs.untyped_data() == o.new_inputs.untyped_data() &&
         o.state.untyped_data() == o.new_state.untyped_data() &&
         std::all_of(std::begin(operands), std::end(operands), is_unchanged) &&
         std::all_of(more.begin(), more.end(), is_unchanged);
}

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

// `biases` is the number of elements of dt_bias, `channels` that of channels of the convolution,
// `numbers` that of a row of `projected`, and `outputs` that of a row of y.
ffi::Error CheckStepDims(const StepOperands& o, int64_t heads, int64_t biases, int64_t channels,
                         int64_t numbers, int64_t outputs) {
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
  NVFP4_RETURN_IF_ERROR(ExpectDims("dt_bias [biases]", o.dt_bias.dimensions(), {biases}));
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
                     ffi::AnyBuffer norm, ffi::AnyBuffer rates, ffi::AnyBuffer inputs,
                     ffi::AnyBuffer state, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::AnyBuffer> new_inputs, ffi::Result<ffi::AnyBuffer> new_state,
                     bool interleaved, float eps) {
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
  NVFP4_RETURN_IF_ERROR(ExpectType("rates", rates.element_type(), projected.element_type()));
  const bool apart = rates.dimensions().size() != 1;
  if (apart) {
    NVFP4_RETURN_IF_ERROR(ExpectDims("rates [b, 1, 2 m r]", rates.dimensions(), {b, 1, 2 * m * r}));
    NVFP4_RETURN_IF_ERROR(ExpectAligned({{"rates", rates}}, kAlignment));
  } else {
    NVFP4_RETURN_IF_ERROR(ExpectDims("rates [0]", rates.dimensions(), {0}));
  }
  const int64_t last = apart ? 0 : 2 * m * r;
  NVFP4_RETURN_IF_ERROR(
      CheckStepDims(operands, m * r, m * r, channels, channels + m * r * e + last, m * r * e));
  const DeltaStepCall call = {b,
                              static_cast<int32_t>(m),
                              static_cast<int32_t>(r),
                              static_cast<int32_t>(d),
                              static_cast<int32_t>(e),
                              static_cast<int32_t>(conv_weight.dimensions()[1]),
                              type,
                              interleaved,
                              1.0f / std::sqrt(static_cast<float>(d)),
                              eps,
                              /*channel_decays=*/false,
                              /*lower_bound=*/0.0f,
                              StateIsUnchanged(operands, {})};
  const DeltaStepBuffers buffers = {projected.untyped_data(),
                                    Data<int32_t>(positions),
                                    Data<float>(conv_weight),
                                    Data<float>(A_log),
                                    Data<float>(dt_bias),
                                    Data<float>(norm),
                                    apart ? rates.untyped_data() : nullptr,
                                    /*decays=*/nullptr,
                                    /*gates=*/nullptr,
                                    new_inputs->untyped_data(),
                                    static_cast<float*>(new_state->untyped_data()),
                                    y->untyped_data()};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_inputs", inputs, *new_inputs));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_state", state, *new_state));
  return FromCuda(LaunchDeltaStep(stream, call, buffers), "nvfp4_delta_step_cuda");
}

ffi::Error KimiDeltaStep(cudaStream_t stream, ffi::AnyBuffer projected, ffi::AnyBuffer positions,
                         ffi::AnyBuffer conv_weight, ffi::AnyBuffer A_log, ffi::AnyBuffer dt_bias,
                         ffi::AnyBuffer norm, ffi::AnyBuffer rates, ffi::AnyBuffer decays,
                         ffi::AnyBuffer gates, ffi::AnyBuffer inputs, ffi::AnyBuffer state,
                         ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> new_inputs,
                         ffi::Result<ffi::AnyBuffer> new_state, float lower_bound, float eps) {
  const StepOperands operands = {projected, positions, conv_weight, A_log,       dt_bias,   norm,
                                 inputs,    state,     *y,          *new_inputs, *new_state};
  DataType type;
  NVFP4_RETURN_IF_ERROR(CheckStepTypes(operands, &type));
  NVFP4_RETURN_IF_ERROR(ExpectRank("state [b, n, d, e]", state.dimensions(), 4));
  const int64_t b = state.dimensions()[0], n = state.dimensions()[1];
  const int64_t d = state.dimensions()[2], e = state.dimensions()[3];
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("n (state)", n, 1));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("d (state)", d, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("e (state)", e, kStateWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (state)", d, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (state)", e, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (state)", n, kMaxExtent));
  const NamedOperand more[] = {{"rates", rates}, {"decays", decays}, {"gates", gates}};
  for (const NamedOperand& array : more) {
    NVFP4_RETURN_IF_ERROR(
        ExpectType(array.name, array.buffer.element_type(), projected.element_type()));
    NVFP4_RETURN_IF_ERROR(ExpectAligned({array}, kAlignment));
  }
  const bool apart = rates.dimensions().size() != 1;
  if (apart) {
    NVFP4_RETURN_IF_ERROR(ExpectDims("rates [b, 1, n]", rates.dimensions(), {b, 1, n}));
  } else {
    NVFP4_RETURN_IF_ERROR(ExpectDims("rates [0]", rates.dimensions(), {0}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectDims("decays [b, 1, n d]", decays.dimensions(), {b, 1, n * d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("gates [b, 1, n e]", gates.dimensions(), {b, 1, n * e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("norm [e]", norm.dimensions(), {e}));
  if (!(lower_bound <= 0.0f)) {
    return Expected("lower_bound", "at most 0", std::to_string(lower_bound));
  }
  const int64_t channels = n * (2 * d + e);
  NVFP4_RETURN_IF_ERROR(
      CheckStepDims(operands, n, n * d, channels, channels + (apart ? 0 : n), n * e));
  const DeltaStepCall call = {b,
                              static_cast<int32_t>(n),
                              /*shared=*/1,
                              static_cast<int32_t>(d),
                              static_cast<int32_t>(e),
                              static_cast<int32_t>(conv_weight.dimensions()[1]),
                              type,
                              /*interleaved=*/false,
                              1.0f / std::sqrt(static_cast<float>(d)),
                              eps,
                              /*channel_decays=*/true,
                              lower_bound,
                              StateIsUnchanged(operands, {})};
  const DeltaStepBuffers buffers = {projected.untyped_data(),
                                    Data<int32_t>(positions),
                                    Data<float>(conv_weight),
                                    Data<float>(A_log),
                                    Data<float>(dt_bias),
                                    Data<float>(norm),
                                    apart ? rates.untyped_data() : nullptr,
                                    decays.untyped_data(),
                                    gates.untyped_data(),
                                    new_inputs->untyped_data(),
                                    static_cast<float*>(new_state->untyped_data()),
                                    y->untyped_data()};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_inputs", inputs, *new_inputs));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_state", state, *new_state));
  return FromCuda(LaunchDeltaStep(stream, call, buffers), "nvfp4_kimi_delta_step_cuda");
}

ffi::Error DeltaRule(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::AnyBuffer g, ffi::AnyBuffer beta, ffi::AnyBuffer lengths,
                     ffi::AnyBuffer state, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::AnyBuffer> new_state, ffi::Result<ffi::AnyBuffer> workspace,
                     bool normalize) {
  const NamedOperand arrays[] = {{"q", q},       {"k", k},         {"v", v}, {"g", g},
                                 {"beta", beta}, {"state", state}, {"y", *y}};
  for (const NamedOperand& array : arrays) {
    NVFP4_RETURN_IF_ERROR(ExpectType(array.name, array.buffer.element_type(), ffi::F32));
    NVFP4_RETURN_IF_ERROR(ExpectAligned({array}, kAlignment));
  }
  NVFP4_RETURN_IF_ERROR(ExpectRank("v [b, t, m, r, e]", v.dimensions(), 5));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, m, d]", q.dimensions(), 4));
  const int64_t b = v.dimensions()[0], t = v.dimensions()[1], m = v.dimensions()[2];
  const int64_t r = v.dimensions()[3], e = v.dimensions()[4], d = q.dimensions()[3];
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("m (v)", m, 1));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("r (v)", r, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (q)", d, kStateWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("e (v)", e, kStateWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (q)", d, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (v)", e, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("m r (v)", m * r, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b t m r (v)", b * t * m * r, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectDims("q [b, t, m, d]", q.dimensions(), {b, t, m, d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("k [b, t, m, d]", k.dimensions(), {b, t, m, d}));
  const bool channel_decays = g.dimensions().size() == 5;
  if (channel_decays) {
    NVFP4_RETURN_IF_ERROR(ExpectDims("g [b, t, m, 1, d]", g.dimensions(), {b, t, m, 1, d}));
    NVFP4_RETURN_IF_ERROR(ExpectAtMost("r (v), with a decay for each channel", r, 1));
    NVFP4_RETURN_IF_ERROR(
        ExpectAtMost("m d (q), with a decay for each channel", m * d, kMaxExtent));
  } else {
    NVFP4_RETURN_IF_ERROR(ExpectDims("g [b, t, m, r]", g.dimensions(), {b, t, m, r}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectDims("beta [b, t, m, r]", beta.dimensions(), {b, t, m, r}));
  NVFP4_RETURN_IF_ERROR(ExpectType("lengths", lengths.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("lengths [b]", lengths.dimensions(), {b}));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"lengths", lengths}}, kAlignment));
  NVFP4_RETURN_IF_ERROR(ExpectDims("state [b, m, r, d, e]", state.dimensions(), {b, m, r, d, e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, t, m, r, e]", y->dimensions(), {b, t, m, r, e}));
  const DeltaRuleCall call = {b,
                              t,
                              static_cast<int32_t>(m),
                              static_cast<int32_t>(r),
                              static_cast<int32_t>(d),
                              static_cast<int32_t>(e),
                              normalize,
                              1.0f / std::sqrt(static_cast<float>(d)),
                              channel_decays};
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, DeltaRuleWorkspaceBytes(call)));
  const DeltaRuleBuffers buffers = {Data<float>(q),
                                    Data<float>(k),
                                    Data<float>(v),
                                    Data<float>(g),
                                    Data<float>(beta),
                                    DataOrNull<int32_t>(lengths),
                                    static_cast<float*>(new_state->untyped_data()),
                                    static_cast<float*>(y->untyped_data()),
                                    workspace->untyped_data()};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_state", state, *new_state));
  return FromCuda(LaunchDeltaRule(stream, call, buffers), "nvfp4_delta_rule_cuda");
}

ffi::Error CausalConvolution(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer positions,
                             ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::AnyBuffer inputs,
                             ffi::Result<ffi::AnyBuffer> y0, ffi::Result<ffi::AnyBuffer> y1,
                             ffi::Result<ffi::AnyBuffer> y2, ffi::Result<ffi::AnyBuffer> new_inputs,
                             ffi::Span<const int64_t> widths, int64_t first, int64_t heads,
                             int64_t stride) {
  DataType type;
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &type));
  if (type == DataType::kF32) return Expected("x", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectType("inputs", inputs.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("weight", weight.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("bias", bias.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [b, t, n]", x.dimensions(), 3));
  NVFP4_RETURN_IF_ERROR(ExpectRank("weight [c, taps]", weight.dimensions(), 2));
  const int64_t b = x.dimensions()[0], t = x.dimensions()[1], n = x.dimensions()[2];
  const int64_t channels = weight.dimensions()[0], taps = weight.dimensions()[1];
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("taps (weight)", taps, kMinConvolutionTaps));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("taps (weight)", taps, kMaxConvolutionTaps));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (x)", n, kConvolutionFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (x)", n, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("c (weight)", channels, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b t (x)", b * t, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("heads", heads, 1));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("heads", heads, channels));
  NVFP4_RETURN_IF_ERROR(
      ExpectAtMost("number of widths", static_cast<int64_t>(widths.size()), kConvolutionParts));
  ConvolutionCall call = {b,
                          t,
                          n,
                          static_cast<int32_t>(channels),
                          static_cast<int32_t>(first),
                          static_cast<int32_t>(heads),
                          static_cast<int32_t>(stride),
                          {},
                          static_cast<int32_t>(taps),
                          type};
  const ffi::AnyBuffer parts[] = {*y0, *y1, *y2};
  ConvolutionBuffers buffers = {x.untyped_data(), Data<int32_t>(positions),   Data<float>(weight),
                                DataOrNull(bias), new_inputs->untyped_data(), {}};
  int64_t width = 0;  // of a head
  for (size_t i = 0; i < widths.size(); ++i) {
    NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("a width", widths[i], kConvolutionFactor));
    NVFP4_RETURN_IF_ERROR(ExpectAtMost("a width", widths[i], channels));
    width += widths[i];
    call.widths[i] = static_cast<int32_t>(widths[i]);
    const std::string name = "y" + std::to_string(i);
    NVFP4_RETURN_IF_ERROR(ExpectType(name, parts[i].element_type(), ffi::F32));
    NVFP4_RETURN_IF_ERROR(ExpectDims(name, parts[i].dimensions(), {b, t, heads * widths[i]}));
    NVFP4_RETURN_IF_ERROR(ExpectAligned({{name, parts[i]}}, kAlignment));
    buffers.y[i] = static_cast<float*>(parts[i].untyped_data());
  }
  NVFP4_RETURN_IF_ERROR(ExpectDims("weight [c, taps]", weight.dimensions(), {heads * width, taps}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("bias [c]", bias.dimensions(), {channels}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("inputs [b, taps - 1, c]", inputs.dimensions(), {b, taps - 1, channels}));
  if (first < 0 || first % kConvolutionFactor != 0) {
    return Expected("first", "0 or a positive multiple of 4", std::to_string(first));
  }
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("first", first, n));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("stride", stride, kConvolutionFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("stride", stride, width));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("stride", stride, n));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("first + heads * stride", first + heads * stride, n));
  NVFP4_RETURN_IF_ERROR(ExpectAligned(
      {{"x", x}, {"positions", positions}, {"weight", weight}, {"bias", bias}, {"inputs", inputs}},
      kAlignment));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_inputs", inputs, *new_inputs));
  return FromCuda(LaunchConvolution(stream, call, buffers), "nvfp4_causal_convolution_cuda");
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
  NVFP4_RETURN_IF_ERROR(
      CheckStepDims(operands, heads, heads, channels, inner + channels + heads, inner));
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
                               eps,
                               StateIsUnchanged(operands, {conv_bias, D})};
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

ffi::Error Mamba2Scan(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dt, ffi::AnyBuffer a,
                      ffi::AnyBuffer B, ffi::AnyBuffer C, ffi::AnyBuffer D, ffi::AnyBuffer lengths,
                      ffi::AnyBuffer state, ffi::Result<ffi::AnyBuffer> y,
                      ffi::Result<ffi::AnyBuffer> new_state,
                      ffi::Result<ffi::AnyBuffer> workspace) {
  const NamedOperand arrays[] = {{"x", x}, {"dt", dt}, {"a", a},         {"B", B},
                                 {"C", C}, {"D", D},   {"state", state}, {"y", *y}};
  for (const NamedOperand& array : arrays) {
    NVFP4_RETURN_IF_ERROR(ExpectType(array.name, array.buffer.element_type(), ffi::F32));
    NVFP4_RETURN_IF_ERROR(ExpectAligned({array}, kAlignment));
  }
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [b, t, h, p]", x.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("B [b, t, g, n]", B.dimensions(), 4));
  const int64_t b = x.dimensions()[0], t = x.dimensions()[1], heads = x.dimensions()[2];
  const int64_t p = x.dimensions()[3], groups = B.dimensions()[2], n = B.dimensions()[3];
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("g (B)", groups, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("h (x)", heads, groups));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("p (x)", p, kStateWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (B)", n, kStateWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("p (x)", p, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (B)", n, kMaxStateWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("h (x)", heads, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b t h (x)", b * t * heads, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectDims("dt [b, t, h]", dt.dimensions(), {b, t, heads}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("a [h]", a.dimensions(), {heads}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("B [b, t, g, n]", B.dimensions(), {b, t, groups, n}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("C [b, t, g, n]", C.dimensions(), {b, t, groups, n}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("D [h]", D.dimensions(), {heads}));
  NVFP4_RETURN_IF_ERROR(ExpectType("lengths", lengths.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("lengths [b]", lengths.dimensions(), {b}));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"lengths", lengths}}, kAlignment));
  NVFP4_RETURN_IF_ERROR(ExpectDims("state [b, h, p, n]", state.dimensions(), {b, heads, p, n}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, t, h, p]", y->dimensions(), {b, t, heads, p}));
  const Mamba2ScanCall call = {b,
                               t,
                               static_cast<int32_t>(heads),
                               static_cast<int32_t>(groups),
                               static_cast<int32_t>(p),
                               static_cast<int32_t>(n)};
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, Mamba2ScanWorkspaceBytes(call)));
  const Mamba2ScanBuffers buffers = {Data<float>(x),
                                     Data<float>(dt),
                                     Data<float>(a),
                                     Data<float>(B),
                                     Data<float>(C),
                                     Data<float>(D),
                                     DataOrNull<int32_t>(lengths),
                                     static_cast<float*>(new_state->untyped_data()),
                                     static_cast<float*>(y->untyped_data()),
                                     workspace->untyped_data()};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_state", state, *new_state));
  return FromCuda(LaunchMamba2Scan(stream, call, buffers), "nvfp4_mamba2_scan_cuda");
}

// kCmdBufferCompatible: see cuda_mixer_bindings.cc.
XLA_FFI_DEFINE_HANDLER(kDeltaStep, DeltaStep,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // projected    [b, 1, n]
                           .Arg<ffi::AnyBuffer>()  // positions    [b, 1]
                           .Arg<ffi::AnyBuffer>()  // conv_weight  [c, taps]
                           .Arg<ffi::AnyBuffer>()  // A_log        [m r]
                           .Arg<ffi::AnyBuffer>()  // dt_bias      [m r]
                           .Arg<ffi::AnyBuffer>()  // norm         [e]
                           .Arg<ffi::AnyBuffer>()  // rates        [b, 1, 2 m r] or [0]
                           .Arg<ffi::AnyBuffer>()  // inputs       [b, taps - 1, c]
                           .Arg<ffi::AnyBuffer>()  // state        [b, m, r, d, e]
                           .Ret<ffi::AnyBuffer>()  // y            [b, 1, m r e]
                           .Ret<ffi::AnyBuffer>()  // new_inputs, in the memory of inputs
                           .Ret<ffi::AnyBuffer>()  // new_state, in the memory of state
                           .Attr<bool>("interleaved")
                           .Attr<float>("eps"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kKimiDeltaStep, KimiDeltaStep,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // projected    [b, 1, m]
                           .Arg<ffi::AnyBuffer>()  // positions    [b, 1]
                           .Arg<ffi::AnyBuffer>()  // conv_weight  [c, taps]
                           .Arg<ffi::AnyBuffer>()  // A_log        [n]
                           .Arg<ffi::AnyBuffer>()  // dt_bias      [n d]
                           .Arg<ffi::AnyBuffer>()  // norm         [e]
                           .Arg<ffi::AnyBuffer>()  // rates        [b, 1, n] or [0]
                           .Arg<ffi::AnyBuffer>()  // decays       [b, 1, n d]
                           .Arg<ffi::AnyBuffer>()  // gates        [b, 1, n e]
                           .Arg<ffi::AnyBuffer>()  // inputs       [b, taps - 1, c]
                           .Arg<ffi::AnyBuffer>()  // state        [b, n, d, e]
                           .Ret<ffi::AnyBuffer>()  // y            [b, 1, n e]
                           .Ret<ffi::AnyBuffer>()  // new_inputs, in the memory of inputs
                           .Ret<ffi::AnyBuffer>()  // new_state, in the memory of state
                           .Attr<float>("lower_bound")
                           .Attr<float>("eps"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kDeltaRule, DeltaRule,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q          [b, t, m, d]
                           .Arg<ffi::AnyBuffer>()  // k          [b, t, m, d]
                           .Arg<ffi::AnyBuffer>()  // v          [b, t, m, r, e]
                           .Arg<ffi::AnyBuffer>()  // g          [b, t, m, r]
                           .Arg<ffi::AnyBuffer>()  // beta       [b, t, m, r]
                           .Arg<ffi::AnyBuffer>()  // lengths    [b] or [0]
                           .Arg<ffi::AnyBuffer>()  // state      [b, m, r, d, e]
                           .Ret<ffi::AnyBuffer>()  // y          [b, t, m, r, e]
                           .Ret<ffi::AnyBuffer>()  // new_state, in the memory of state
                           .Ret<ffi::AnyBuffer>()  // workspace  U8 [bytes]
                           .Attr<bool>("normalize"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kCausalConvolution, CausalConvolution,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x           [b, t, n]
                           .Arg<ffi::AnyBuffer>()  // positions   [b, t]
                           .Arg<ffi::AnyBuffer>()  // weight      [c, taps]
                           .Arg<ffi::AnyBuffer>()  // bias        [c] or [0]
                           .Arg<ffi::AnyBuffer>()  // inputs      [b, taps - 1, c]
                           .Ret<ffi::AnyBuffer>()  // y0          [b, t, heads * widths[0]]
                           .Ret<ffi::AnyBuffer>()  // y1, or [0] if there is no such part
                           .Ret<ffi::AnyBuffer>()  // y2, likewise
                           .Ret<ffi::AnyBuffer>()  // new_inputs, in the memory of inputs
                           .Attr<ffi::Span<const int64_t>>("widths")
                           .Attr<int64_t>("first")
                           .Attr<int64_t>("heads")
                           .Attr<int64_t>("stride"),
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

XLA_FFI_DEFINE_HANDLER(kMamba2Scan, Mamba2Scan,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x          [b, t, h, p]
                           .Arg<ffi::AnyBuffer>()   // dt         [b, t, h]
                           .Arg<ffi::AnyBuffer>()   // a          [h]
                           .Arg<ffi::AnyBuffer>()   // B          [b, t, g, n]
                           .Arg<ffi::AnyBuffer>()   // C          [b, t, g, n]
                           .Arg<ffi::AnyBuffer>()   // D          [h]
                           .Arg<ffi::AnyBuffer>()   // lengths    [b] or [0]
                           .Arg<ffi::AnyBuffer>()   // state      [b, h, p, n]
                           .Ret<ffi::AnyBuffer>()   // y          [b, t, h, p]
                           .Ret<ffi::AnyBuffer>()   // new_state, in the memory of state
                           .Ret<ffi::AnyBuffer>(),  // workspace  U8 [bytes]
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<NamedHandler> RecurrentHandlers() {
  return {
      {"nvfp4_delta_step_cuda", kDeltaStep},
      {"nvfp4_kimi_delta_step_cuda", kKimiDeltaStep},
      {"nvfp4_mamba2_step_cuda", kMamba2Step},
      {"nvfp4_delta_rule_cuda", kDeltaRule},
      {"nvfp4_mamba2_scan_cuda", kMamba2Scan},
      {"nvfp4_causal_convolution_cuda", kCausalConvolution},
  };
}

}  // namespace nvfp4
