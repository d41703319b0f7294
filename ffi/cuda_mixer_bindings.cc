// The handlers of attention, heads, norms, plain linear layers and recurrent mixers. As in
// cuda_bindings.cc, each one decodes its operands and attributes, checks them, and launches
// kernels.

#include "cuda_mixer_bindings.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "cuda_checks.h"
#include "heads_checks.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

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

// Reads the attributes that the two forms of attention share.
ffi::Error ReadVisibility(float scale, int32_t window, int32_t chunk, AttentionCall* call) {
  if (!(scale > 0.0f)) return Expected("scale", "a number above 0", std::to_string(scale));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("window", window, 0));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("chunk", chunk, 0));
  call->scale = scale;
  call->window = window;
  call->chunk = chunk;
  return ffi::Error::Success();
}

ffi::Error Attention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::AnyBuffer positions, ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::AnyBuffer> workspace, float scale, int32_t window,
                     int32_t chunk) {
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(CheckAttention(q, k, v, positions, sinks, *y, &call.shape, &call.type));
  NVFP4_RETURN_IF_ERROR(ReadVisibility(scale, window, chunk, &call));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, AttentionWorkspaceBytes(call.shape)));
  call.positions_are_older = running_chain.IsOlder(positions.untyped_data());
  const AttentionBuffers buffers = {q.untyped_data(),         k.untyped_data(),  v.untyped_data(),
                                    Data<int32_t>(positions), DataOrNull(sinks), y->untyped_data(),
                                    workspace->untyped_data()};
  return FromCuda(LaunchAttention(stream, call, buffers), "nvfp4_attention_cuda");
}

ffi::Error CheckLatentAttention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer positions,
                                ffi::AnyBuffer sinks, ffi::AnyBuffer y, AttentionCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("q [b, t, n, d]", q.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("q", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectType("k", k.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("sinks", sinks.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, n, d]", q.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("k [b, m, s, d]", k.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("y [b, t, n, dv]", y.dimensions(), 4));
  const int64_t b = q.dimensions()[0], t = q.dimensions()[1];
  const int64_t n = q.dimensions()[2], d = q.dimensions()[3];
  const int64_t m = k.dimensions()[1], s = k.dimensions()[2], dv = y.dimensions()[3];
  call->shape = {b, t, n, m, s, d, dv};
  NVFP4_RETURN_IF_ERROR(ExpectDims("k [b, m, s, d]", k.dimensions(), {b, m, s, d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("sinks [n]", sinks.dimensions(), {n}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, t, n, dv]", y.dimensions(), {b, t, n, dv}));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("m (k)", m, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (q)", n, m));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (q)", d, kHeadWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("dv (y)", dv, kHeadWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (q)", d, kMaxLatentWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("dv (y)", dv, std::min(d, kMaxLatentValueWidth)));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (k)", s, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (q)", b, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (q)", n, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b t n (q)", b * t * n, kMaxRows));
  return ExpectAligned({{"q", q}, {"k", k}, {"positions", positions}, {"sinks", sinks}, {"y", y}},
                       kAlignment);
}

ffi::Error LatentAttention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                           ffi::AnyBuffer positions, ffi::AnyBuffer sinks,
                           ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                           float scale, int32_t window, int32_t chunk) {
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(CheckLatentAttention(q, k, positions, sinks, *y, &call));
  NVFP4_RETURN_IF_ERROR(ReadVisibility(scale, window, chunk, &call));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, LatentAttentionWorkspaceBytes(call.shape)));
  const AttentionBuffers buffers = {q.untyped_data(),         k.untyped_data(),  nullptr,
                                    Data<int32_t>(positions), DataOrNull(sinks), y->untyped_data(),
                                    workspace->untyped_data()};
  return FromCuda(LaunchLatentAttention(stream, call, buffers), "nvfp4_latent_attention_cuda");
}

ffi::Error AddRmsNorm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer added,
                      ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> sum,
                      ffi::Result<ffi::AnyBuffer> y, float eps) {
  NormCall call = {};
  call.starts_next = running_chain.Follows();
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

// Reads the sizes and types of x, weight and y, except for the type of the weight. k is a multiple
// of `factor`.
ffi::Error CheckDense(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias,
                      ffi::AnyBuffer y, int64_t factor, DenseFewCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("x", "bfloat16 or float16", "float32");
  call->output_type = y.element_type() == ffi::F32 ? DataType::kF32 : call->type;
  if (call->output_type != DataType::kF32) {
    NVFP4_RETURN_IF_ERROR(ExpectType("y", y.element_type(), x.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [rows, k]", x.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("weight [n, k]", weight.dimensions(), 2));
  call->rows = x.dimensions()[0];
  call->k = x.dimensions()[1];
  call->n = weight.dimensions()[0];
  NVFP4_RETURN_IF_ERROR(ExpectDims("weight [n, k]", weight.dimensions(), {call->n, call->k}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [rows, n]", y.dimensions(), {call->rows, call->n}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (x)", call->rows, kMostDenseRows));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("k (x)", call->k, factor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (x)", call->k, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (weight)", call->n, kMaxExtent));
  if (bias.element_type() != ffi::F32) {
    NVFP4_RETURN_IF_ERROR(ExpectType("bias", bias.element_type(), x.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("bias [n]", bias.dimensions(), {call->n}));
  call->bias_size = bias.element_count() == 0 ? 0 : bias.element_type() == ffi::F32 ? 4 : 2;
  return ExpectAligned({{"x", x}, {"weight", weight}, {"bias", bias}, {"y", y}}, kAlignment);
}

ffi::Error DenseFew(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                    ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y) {
  DenseFewCall call = {};
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("weight", weight.element_type(), &call.weight_type));
  NVFP4_RETURN_IF_ERROR(CheckDense(x, weight, bias, *y, kDenseFactor, &call));
  const bool wide = call.type == DataType::kBF16 && call.weight_type == DataType::kF32;
  if (call.weight_type != call.type && !wide) {
    return Expected("weight", "the type of x, or float32 if x is bfloat16",
                    TypeText(weight.element_type()));
  }
  call.weight_is_older = running_chain.IsOlder(weight.untyped_data());
  const DenseFewBuffers buffers = {x.untyped_data(),  weight.untyped_data(),
                                   y->untyped_data(), nullptr,
                                   nullptr,           DataOrNull<void>(bias)};
  return FromCuda(LaunchDenseFew(stream, call, buffers), "nvfp4_dense_few_cuda");
}

ffi::Error DenseFp8Few(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                       ffi::AnyBuffer weight_scale, ffi::AnyBuffer row_scale, ffi::AnyBuffer bias,
                       ffi::Result<ffi::AnyBuffer> y) {
  DenseFewCall call = {};
  call.weight_type = DataType::kE4M3;
  NVFP4_RETURN_IF_ERROR(ExpectType("weight", weight.element_type(), ffi::F8E4M3FN));
  NVFP4_RETURN_IF_ERROR(CheckDense(x, weight, bias, *y, kDenseE4M3Factor, &call));
  NVFP4_RETURN_IF_ERROR(ExpectType("weight_scale", weight_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("row_scale", row_scale.element_type(), ffi::F32));
  if (weight_scale.dimensions().size() == 2) {
    call.scale_groups = (call.k + kDenseGroup - 1) / kDenseGroup;
    NVFP4_RETURN_IF_ERROR(ExpectDims("weight_scale [n, k/128]", weight_scale.dimensions(),
                                     {call.n, call.scale_groups}));
  } else {
    NVFP4_RETURN_IF_ERROR(ExpectDims("weight_scale [n]", weight_scale.dimensions(), {call.n}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectRank("row_scale [rows]", row_scale.dimensions(), 1));
  NVFP4_RETURN_IF_ERROR(
      ExpectAligned({{"weight_scale", weight_scale}, {"row_scale", row_scale}}, kAlignment));
  call.row_scales = row_scale.dimensions()[0];
  if (call.row_scales > 1 && call.row_scales != call.rows) {
    return Expected("row_scale [rows]", "0, 1 or " + std::to_string(call.rows) + " scales",
                    std::to_string(call.row_scales));
  }
  call.weight_is_older = running_chain.IsOlder(weight.untyped_data());
  const DenseFewBuffers buffers = {
      x.untyped_data(),          weight.untyped_data(),        y->untyped_data(),
      Data<float>(weight_scale), DataOrNull<float>(row_scale), DataOrNull<void>(bias)};
  return FromCuda(LaunchDenseFew(stream, call, buffers), "nvfp4_dense_fp8_few_cuda");
}

ffi::Error Activate(cudaStream_t stream, ffi::AnyBuffer gate_up, ffi::Result<ffi::AnyBuffer> y,
                    std::string_view activation, float alpha, float beta, float limit) {
  ActivateCall call = {};
  call.starts_next = running_chain.Follows();
  NVFP4_RETURN_IF_ERROR(ReadActivation(activation, alpha, beta, limit, &call.activation));
  if (!call.activation.gated) {
    return Expected("activation", "a gated activation", std::string(activation));
  }
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("gate_up", gate_up.element_type(), &call.type));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y->element_type(), gate_up.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectRank("y [rows, i]", y->dimensions(), 2));
  call.rows = y->dimensions()[0];
  call.columns = y->dimensions()[1];
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("gate_up [rows, 2 i]", gate_up.dimensions(), {call.rows, 2 * call.columns}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (gate_up)", call.rows, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("i (y)", call.columns, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows i (y)", call.rows * call.columns, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"gate_up", gate_up}, {"y", *y}}, kAlignment));
  call.gate_up = gate_up.untyped_data();
  call.y = y->untyped_data();
  return FromCuda(LaunchActivate(stream, call), "nvfp4_activate_cuda");
}

ffi::Error AddGated(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gate, ffi::AnyBuffer z,
                    ffi::Result<ffi::AnyBuffer> y) {
  AddGatedCall call = {};
  call.starts_next = running_chain.Follows();
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &call.type));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [rows, h]", x.dimensions(), 2));
  call.rows = x.dimensions()[0];
  call.columns = x.dimensions()[1];
  for (const NamedOperand& operand : {NamedOperand{"z", z}, NamedOperand{"y", *y}}) {
    NVFP4_RETURN_IF_ERROR(
        ExpectType(operand.name, operand.buffer.element_type(), x.element_type()));
    NVFP4_RETURN_IF_ERROR(
        ExpectDims(operand.name, operand.buffer.dimensions(), {call.rows, call.columns}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectType("gate", gate.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("gate [rows]", gate.dimensions(), {call.rows}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (x)", call.rows, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("h (x)", call.columns, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows h (x)", call.rows * call.columns, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"x", x}, {"gate", gate}, {"z", z}, {"y", *y}}, kAlignment));
  call.x = x.untyped_data();
  call.gate = DataOrNull<void>(gate);
  call.z = z.untyped_data();
  call.y = y->untyped_data();
  return FromCuda(LaunchAddGated(stream, call), "nvfp4_add_gated_cuda");
}

ffi::Error AddLinearGated(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gate_input,
                          ffi::AnyBuffer gate_weight, ffi::AnyBuffer z,
                          ffi::Result<ffi::AnyBuffer> y) {
  AddLinearGatedCall call = {};
  call.starts_next = running_chain.Follows();
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &call.type));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [rows, h]", x.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("gate_weight [k]", gate_weight.dimensions(), 1));
  call.rows = x.dimensions()[0];
  call.columns = x.dimensions()[1];
  call.k = gate_weight.dimensions()[0];
  for (const NamedOperand& operand : {NamedOperand{"z", z}, NamedOperand{"y", *y}}) {
    NVFP4_RETURN_IF_ERROR(
        ExpectType(operand.name, operand.buffer.element_type(), x.element_type()));
    NVFP4_RETURN_IF_ERROR(
        ExpectDims(operand.name, operand.buffer.dimensions(), {call.rows, call.columns}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectType("gate_input", gate_input.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("gate_weight", gate_weight.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("gate_input [rows, k]", gate_input.dimensions(), {call.rows, call.k}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (x)", call.rows, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("h (x)", call.columns, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (gate_weight)", call.k, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows h (x)", call.rows * call.columns, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAligned(
      {{"x", x}, {"gate_input", gate_input}, {"gate_weight", gate_weight}, {"z", z}, {"y", *y}},
      kAlignment));
  call.x = x.untyped_data();
  call.gate_input = gate_input.untyped_data();
  call.gate_weight = gate_weight.untyped_data();
  call.z = z.untyped_data();
  call.y = y->untyped_data();
  return FromCuda(LaunchAddLinearGated(stream, call), "nvfp4_add_linear_gated_cuda");
}

ffi::Error GateHeads(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gates,
                     ffi::Result<ffi::AnyBuffer> y) {
  GateHeadsCall call = {};
  call.starts_next = running_chain.Follows();
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &call.type));
  NVFP4_RETURN_IF_ERROR(ExpectType("gates", gates.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y->element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [rows, n, d]", x.dimensions(), 3));
  NVFP4_RETURN_IF_ERROR(ExpectRank("gates [rows, w]", gates.dimensions(), 2));
  const int64_t n = x.dimensions()[1], d = x.dimensions()[2];
  call.rows = x.dimensions()[0];
  call.gate_columns = gates.dimensions()[1];
  call.one_gate = call.gate_columns == n;
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [rows, n, d]", y->dimensions(), {call.rows, n, d}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("gates [rows, w]", gates.dimensions(), {call.rows, call.gate_columns}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (x)", call.rows, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (x)", n, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (x)", d, kMaxExtent));
  if (!call.one_gate) {
    NVFP4_RETURN_IF_ERROR(ExpectAtLeast("w (gates)", call.gate_columns, 2 * n * d));
  }
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows n (x)", call.rows * n, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"x", x}, {"gates", gates}, {"y", *y}}, kAlignment));
  call.heads = static_cast<uint32_t>(n);
  call.d = static_cast<uint32_t>(d);
  call.x = x.untyped_data();
  call.gates = gates.untyped_data();
  call.y = y->untyped_data();
  return FromCuda(LaunchGateHeads(stream, call), "nvfp4_gate_heads_cuda");
}

// Checks what both products of heads share, and reads their sizes from the matrices [n, a, b].
ffi::Error CheckHeadProduct(ffi::AnyBuffer x, std::string_view name, ffi::AnyBuffer matrices,
                            ffi::AnyBuffer y, HeadProductCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("x", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectType(name, matrices.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [rows, n, k + e]", x.dimensions(), 3));
  NVFP4_RETURN_IF_ERROR(ExpectRank(name, matrices.dimensions(), 3));
  const int64_t rows = x.dimensions()[0], n = x.dimensions()[1];
  const int64_t k = matrices.dimensions()[call->expands ? 2 : 1];
  const int64_t outputs = matrices.dimensions()[call->expands ? 1 : 2];
  const int64_t e = x.dimensions()[2] - k;
  NVFP4_RETURN_IF_ERROR(ExpectDims(name, matrices.dimensions(),
                                   {n, matrices.dimensions()[1], matrices.dimensions()[2]}));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("x [rows, n, k + e], e", e, 0));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("y [rows, n, outputs + e]", y.dimensions(), {rows, n, outputs + e}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (x)", rows, kMaxHeadProductRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (x)", n, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf(call->expands ? "k (values)" : "k (keys)",
                                         call->expands ? k : outputs, kHeadProductFactor));
  NVFP4_RETURN_IF_ERROR(
      ExpectAtMost(name, k, call->expands ? kMaxHeadProductLatent : kMaxHeadProductQuery));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost(name, outputs, kMaxExtent / 64));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast(name, std::min(k, outputs), 1));
  call->rows = static_cast<int32_t>(rows);
  call->n = static_cast<int32_t>(n);
  call->k = static_cast<int32_t>(k);
  call->outputs = static_cast<int32_t>(outputs);
  call->e = static_cast<int32_t>(e);
  return ExpectAligned({{"x", x}, {name, matrices}, {"y", y}}, kAlignment);
}

ffi::Error AbsorbQueries(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer keys,
                         ffi::AnyBuffer positions, ffi::AnyBuffer frequencies,
                         ffi::Result<ffi::AnyBuffer> y, float rotation_scale, bool interleaved) {
  HeadProductCall call = {};
  NVFP4_RETURN_IF_ERROR(CheckHeadProduct(q, "keys [n, p, k]", keys, *y, &call));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("frequencies", frequencies.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [rows]", positions.dimensions(), {call.rows}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDimsOrEmpty("frequencies [e/2]", frequencies.dimensions(), {call.e / 2}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (q)", call.e, kMaxPreparedWidth));
  if (call.e % 2 != 0) return Expected("e (q)", "an even number", std::to_string(call.e));
  NVFP4_RETURN_IF_ERROR(
      ExpectAligned({{"positions", positions}, {"frequencies", frequencies}}, kAlignment));
  call.half = static_cast<int32_t>(frequencies.dimensions()[0]);
  call.rotation_scale = rotation_scale;
  call.interleaved = interleaved;
  const HeadProductBuffers buffers = {q.untyped_data(), keys.untyped_data(),
                                      Data<int32_t>(positions), DataOrNull(frequencies),
                                      y->untyped_data()};
  return FromCuda(LaunchHeadProduct(stream, call, buffers), "nvfp4_absorb_queries_cuda");
}

ffi::Error ExpandValues(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                        ffi::Result<ffi::AnyBuffer> y) {
  HeadProductCall call = {};
  call.expands = true;
  NVFP4_RETURN_IF_ERROR(CheckHeadProduct(x, "values [n, d, k]", values, *y, &call));
  NVFP4_RETURN_IF_ERROR(ExpectDims("x [rows, n, k]", x.dimensions(), {call.rows, call.n, call.k}));
  const HeadProductBuffers buffers = {x.untyped_data(), values.untyped_data(), nullptr, nullptr,
                                      y->untyped_data()};
  return FromCuda(LaunchHeadProduct(stream, call, buffers), "nvfp4_expand_values_cuda");
}

ffi::Error ReadHeads(const HeadsOperands& operands, HeadsCall* call) {
  HeadsShape shape;
  NVFP4_RETURN_IF_ERROR(
      CheckHeads(operands, call->gated, kAlignment, &shape, &call->type, &call->weight_type));
  const auto [b, t, s, n, m, d, half] = shape;
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (keys)", d, kPreparedWidthFactor));
  if (half != 0) {
    NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("r (frequencies)", 2 * half, kPreparedWidthFactor));
  }
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (keys)", b, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n + 2m (qkv)", n + 2 * m, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows / std::max(b * (n + 2 * m), int64_t{1})));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (keys)", s, kMaxRows));
  call->b = static_cast<int32_t>(b);
  call->t = static_cast<int32_t>(t);
  call->s = static_cast<int32_t>(s);
  call->n = static_cast<int32_t>(n);
  call->m = static_cast<int32_t>(m);
  call->d = static_cast<int32_t>(d);
  call->half = static_cast<int32_t>(half);
  return ffi::Error::Success();
}

ffi::Error CheckLatents(ffi::AnyBuffer down, ffi::AnyBuffer positions, ffi::AnyBuffer cache,
                        ffi::AnyBuffer q_weight, ffi::AnyBuffer kv_weight,
                        ffi::AnyBuffer frequencies, ffi::AnyBuffer q, ffi::AnyBuffer new_cache,
                        LatentsCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("down", down.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("down", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(
      ExpectActivationType("kv_weight", kv_weight.element_type(), &call->weight_type));
  if (call->weight_type != call->type && call->weight_type != DataType::kF32) {
    return Expected("kv_weight", "float32 or the type of down", TypeText(kv_weight.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectType("q_weight", q_weight.element_type(), kv_weight.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("frequencies", frequencies.element_type(), ffi::F32));
  for (const NamedOperand& operand :
       {NamedOperand{"cache", cache}, NamedOperand{"q", q}, NamedOperand{"new_cache", new_cache}}) {
    NVFP4_RETURN_IF_ERROR(
        ExpectType(operand.name, operand.buffer.element_type(), down.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectRank("cache [b, 1, s, k + e]", cache.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, r]", q.dimensions(), 3));
  NVFP4_RETURN_IF_ERROR(ExpectRank("kv_weight [k]", kv_weight.dimensions(), 1));
  NVFP4_RETURN_IF_ERROR(ExpectRank("frequencies [e/2]", frequencies.dimensions(), 1));
  const int64_t b = cache.dimensions()[0], s = cache.dimensions()[2], width = cache.dimensions()[3];
  const int64_t t = q.dimensions()[1], r = q.dimensions()[2], k = kv_weight.dimensions()[0];
  const int64_t e = width - k;
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("r (q)", r, kPreparedWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("k (kv_weight)", k, kPreparedWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("e (cache)", e, kPreparedWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("r (q)", r, kMaxQueryLatent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (kv_weight)", k, kMaxKeyLatent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (cache)", e, kMaxPreparedWidth));
  NVFP4_RETURN_IF_ERROR(ExpectDims("cache [b, 1, s, k + e]", cache.dimensions(), {b, 1, s, k + e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("new_cache", new_cache.dimensions(), {b, 1, s, k + e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("q [b, t, r]", q.dimensions(), {b, t, r}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("down [b, t, r + k + e]", down.dimensions(), {b, t, r + width}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("q_weight [r]", q_weight.dimensions(), {r}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("frequencies [e/2]", frequencies.dimensions(), {e / 2}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (cache)", b, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows / std::max(2 * b, int64_t{1})));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (cache)", s, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"down", down},
                                       {"positions", positions},
                                       {"cache", cache},
                                       {"q_weight", q_weight},
                                       {"kv_weight", kv_weight},
                                       {"frequencies", frequencies},
                                       {"q", q}},
                                      kAlignment));
  call->b = static_cast<int32_t>(b);
  call->t = static_cast<int32_t>(t);
  call->s = static_cast<int32_t>(s);
  call->r = static_cast<int32_t>(r);
  call->k = static_cast<int32_t>(k);
  call->e = static_cast<int32_t>(e);
  call->half = static_cast<int32_t>(frequencies.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error PrepareLatents(cudaStream_t stream, ffi::AnyBuffer down, ffi::AnyBuffer positions,
                          ffi::AnyBuffer cache, ffi::AnyBuffer q_weight, ffi::AnyBuffer kv_weight,
                          ffi::AnyBuffer frequencies, ffi::Result<ffi::AnyBuffer> q,
                          ffi::Result<ffi::AnyBuffer> new_cache, float eps, float rotation_scale,
                          bool interleaved) {
  LatentsCall call = {};
  call.starts_next = running_chain.Follows();
  NVFP4_RETURN_IF_ERROR(CheckLatents(down, positions, cache, q_weight, kv_weight, frequencies, *q,
                                     *new_cache, &call));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_cache", cache, *new_cache));
  call.eps = eps;
  call.rotation_scale = rotation_scale;
  call.interleaved = interleaved;
  const LatentsBuffers buffers = {down.untyped_data(),        Data<int32_t>(positions),
                                  DataOrNull<void>(q_weight), kv_weight.untyped_data(),
                                  DataOrNull(frequencies),    q->untyped_data(),
                                  new_cache->untyped_data()};
  return FromCuda(LaunchPrepareLatents(stream, call, buffers), "nvfp4_prepare_latents_cuda");
}

ffi::Error PrepareHeads(cudaStream_t stream, ffi::AnyBuffer qkv, ffi::AnyBuffer positions,
                        ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer q_weight,
                        ffi::AnyBuffer k_weight, ffi::AnyBuffer frequencies,
                        ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> new_keys,
                        ffi::Result<ffi::AnyBuffer> new_values, float eps, float rotation_scale,
                        bool rotates_first, bool gated) {
  HeadsCall call = {};
  call.starts_next = running_chain.Follows();
  call.gated = gated;
  NVFP4_RETURN_IF_ERROR(ReadHeads(
      {qkv, positions, keys, values, q_weight, k_weight, frequencies, *q, *new_keys, *new_values},
      &call));
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

// kCmdBufferCompatible: the handlers only launch kernels and copies, so that a CUDA graph can
// capture them.
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

XLA_FFI_DEFINE_HANDLER(kLatentAttention, LatentAttention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q          [b, t, n, d]
                           .Arg<ffi::AnyBuffer>()  // k          [b, m, s, d]
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

XLA_FFI_DEFINE_HANDLER(kDenseFew, DenseFew,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x       [rows, k]
                           .Arg<ffi::AnyBuffer>()   // weight  [n, k]
                           .Arg<ffi::AnyBuffer>()   // bias    [n] or [0], F32 or as x
                           .Ret<ffi::AnyBuffer>(),  // y       [rows, n], F32 or as x
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kDenseFp8Few, DenseFp8Few,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x             [rows, k]
                           .Arg<ffi::AnyBuffer>()   // weight        F8E4M3FN [n, k]
                           .Arg<ffi::AnyBuffer>()   // weight_scale  F32 [n] or [n, k/128]
                           .Arg<ffi::AnyBuffer>()   // row_scale     F32 [0], [1] or [rows]
                           .Arg<ffi::AnyBuffer>()   // bias          [n] or [0], F32 or as x
                           .Ret<ffi::AnyBuffer>(),  // y             [rows, n], F32 or as x
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kActivate, Activate,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // gate_up  [rows, 2 i]
                           .Ret<ffi::AnyBuffer>()  // y        [rows, i]
                           .Attr<std::string_view>("activation")
                           .Attr<float>("alpha")
                           .Attr<float>("beta")
                           .Attr<float>("limit"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAddGated, AddGated,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x     [rows, h]
                           .Arg<ffi::AnyBuffer>()   // gate  [rows] or [0]
                           .Arg<ffi::AnyBuffer>()   // z     [rows, h]
                           .Ret<ffi::AnyBuffer>(),  // y     [rows, h]
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAddLinearGated, AddLinearGated,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x            [rows, h]
                           .Arg<ffi::AnyBuffer>()   // gate_input   [rows, k]
                           .Arg<ffi::AnyBuffer>()   // gate_weight  [k]
                           .Arg<ffi::AnyBuffer>()   // z            [rows, h]
                           .Ret<ffi::AnyBuffer>(),  // y            [rows, h]
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kGateHeads, GateHeads,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x      [rows, n, d]
                           .Arg<ffi::AnyBuffer>()   // gates  [rows, n] or [rows, 2 n d or more]
                           .Ret<ffi::AnyBuffer>(),  // y      [rows, n, d]
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPrepareHeads, PrepareHeads,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // qkv          [b, t, (n + 2m) d]; 2n if gated
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
                           .Attr<bool>("rotates_first")
                           .Attr<bool>("gated"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPrepareLatents, PrepareLatents,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // down         [b, t, r + k + e]
                           .Arg<ffi::AnyBuffer>()  // positions    [b, t]
                           .Arg<ffi::AnyBuffer>()  // cache        [b, 1, s, k + e]
                           .Arg<ffi::AnyBuffer>()  // q_weight     [r] or [0]
                           .Arg<ffi::AnyBuffer>()  // kv_weight    [k]
                           .Arg<ffi::AnyBuffer>()  // frequencies  [e/2] or [0]
                           .Ret<ffi::AnyBuffer>()  // q            [b, t, r]
                           .Ret<ffi::AnyBuffer>()  // new_cache, in the memory of cache
                           .Attr<float>("eps")
                           .Attr<float>("rotation_scale")
                           .Attr<bool>("interleaved"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAbsorbQueries, AbsorbQueries,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q            [rows, n, p + e]
                           .Arg<ffi::AnyBuffer>()  // keys         [n, p, k]
                           .Arg<ffi::AnyBuffer>()  // positions    [rows]
                           .Arg<ffi::AnyBuffer>()  // frequencies  [e/2] or [0]
                           .Ret<ffi::AnyBuffer>()  // y            [rows, n, k + e]
                           .Attr<float>("rotation_scale")
                           .Attr<bool>("interleaved"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kExpandValues, ExpandValues,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x       [rows, n, k]
                           .Arg<ffi::AnyBuffer>()   // values  [n, d, k]
                           .Ret<ffi::AnyBuffer>(),  // y       [rows, n, d]
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<NamedHandler> MixerHandlers() {
  return {
      {"nvfp4_attention_cuda", kAttention},
      {"nvfp4_add_rms_norm_cuda", kAddRmsNorm},
      {"nvfp4_prepare_heads_cuda", kPrepareHeads},
      {"nvfp4_dense_few_cuda", kDenseFew},
      {"nvfp4_dense_fp8_few_cuda", kDenseFp8Few},
      {"nvfp4_activate_cuda", kActivate},
      {"nvfp4_add_gated_cuda", kAddGated},
      {"nvfp4_add_linear_gated_cuda", kAddLinearGated},
      {"nvfp4_gate_heads_cuda", kGateHeads},
      {"nvfp4_latent_attention_cuda", kLatentAttention},
      {"nvfp4_prepare_latents_cuda", kPrepareLatents},
      {"nvfp4_absorb_queries_cuda", kAbsorbQueries},
      {"nvfp4_expand_values_cuda", kExpandValues},
  };
}

}  // namespace nvfp4
