// The handlers of norms, plain linear layers and gates. As in cuda_bindings.cc, each one decodes
// its operands and attributes, checks them, and launches kernels.

#include "cuda_bindings.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
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
  const std::optional<InputCombine> combine = running_chain.TakeWork<InputCombine>();
  if (combine) NVFP4_RETURN_IF_ERROR(CheckInputCombine(*combine, call, added));
  const std::optional<AddGatedCall> gated = running_chain.TakeWork<AddGatedCall>();
  if (gated) NVFP4_RETURN_IF_ERROR(CheckInputGated(*gated, call, added));
  const auto linear_gated = running_chain.TakeWork<AddLinearGatedCall>();
  if (linear_gated) NVFP4_RETURN_IF_ERROR(CheckInputGated(*linear_gated, call, added));
  if (running_chain.fuses) {
    // The kernel that computes this norm waits before it starts the next one. If a kernel of its
    // own computes it, it need not wait: the one behind it does.
    call.starts_next = running_chain.Follows();
    running_chain.work = InputNorm{call, buffers};
    return ffi::Error::Success();
  }
  call.starts_next = running_chain.StartsNext();
  const cudaError_t status = combine ? LaunchCombineRmsNorm(stream, call, buffers, *combine)
                             : gated ? LaunchAddGatedRmsNorm(stream, call, buffers, *gated)
                             : linear_gated
                                 ? LaunchAddGatedRmsNorm(stream, call, buffers, *linear_gated)
                                 : LaunchAddRmsNorm(stream, call, buffers);
  return FromCuda(status, "nvfp4_add_rms_norm_cuda");
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
  call.weight_is_unchanged = running_chain.IsUnchanged(RangeOf(weight));
  DenseFewBuffers buffers = {x.untyped_data(), weight.untyped_data(), y->untyped_data(), nullptr,
                             nullptr,          DataOrNull<void>(bias)};
  const std::optional<InputNorm> norm = running_chain.TakeWork<InputNorm>();
  if (norm) {
    NVFP4_RETURN_IF_ERROR(CheckInputNorm(*norm, x));
    buffers.norm = &*norm;
  }
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
  call.weight_is_unchanged = running_chain.IsUnchanged(RangeOf(weight)) &&
                             running_chain.IsUnchanged(RangeOf(weight_scale));
  const DenseFewBuffers buffers = {
      x.untyped_data(),          weight.untyped_data(),        y->untyped_data(),
      Data<float>(weight_scale), DataOrNull<float>(row_scale), DataOrNull<void>(bias)};
  return FromCuda(LaunchDenseFew(stream, call, buffers), "nvfp4_dense_fp8_few_cuda");
}

ffi::Error Activate(cudaStream_t stream, ffi::AnyBuffer gate_up, ffi::Result<ffi::AnyBuffer> y,
                    std::string_view activation, float alpha, float beta, float limit) {
  ActivateCall call = {};
  call.starts_next = running_chain.StartsNext();
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

// Whether a gated sum may let the next kernel start. If its work is left to a norm that has no
// kernel for both, its own kernel need not wait: that of the norm does.
bool GatedStartsNext() {
  return running_chain.fuses ? running_chain.Follows() : running_chain.StartsNext();
}

ffi::Error AddGated(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gate, ffi::AnyBuffer z,
                    ffi::Result<ffi::AnyBuffer> y) {
  AddGatedCall call = {};
  call.starts_next = GatedStartsNext();
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
  if (running_chain.fuses) {
    running_chain.work = call;
    return ffi::Error::Success();
  }
  return FromCuda(LaunchAddGated(stream, call), "nvfp4_add_gated_cuda");
}

ffi::Error AddLinearGated(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gate_input,
                          ffi::AnyBuffer gate_weight, ffi::AnyBuffer z,
                          ffi::Result<ffi::AnyBuffer> y) {
  AddLinearGatedCall call = {};
  call.starts_next = GatedStartsNext();
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
  if (running_chain.fuses) {
    running_chain.work = call;
    return ffi::Error::Success();
  }
  return FromCuda(LaunchAddLinearGated(stream, call), "nvfp4_add_linear_gated_cuda");
}

ffi::Error GateHeads(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gates,
                     ffi::Result<ffi::AnyBuffer> y) {
  GateHeadsCall call = {};
  call.starts_next = running_chain.StartsNext();
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

// kCmdBufferCompatible: the handlers only launch kernels and copies, so that a CUDA graph can
// capture them.
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

}  // namespace

std::vector<NamedHandler> MixerHandlers() {
  return {
      {"nvfp4_add_rms_norm_cuda", kAddRmsNorm},   {"nvfp4_dense_few_cuda", kDenseFew},
      {"nvfp4_dense_fp8_few_cuda", kDenseFp8Few}, {"nvfp4_activate_cuda", kActivate},
      {"nvfp4_add_gated_cuda", kAddGated},        {"nvfp4_add_linear_gated_cuda", kAddLinearGated},
      {"nvfp4_gate_heads_cuda", kGateHeads},
  };
}

}  // namespace nvfp4
