// The targets of norms, plain linear layers and gates: their operands (operands.h), and the
// handlers, which fill the structures of launch.h and launch kernels.

#include <cstdint>
#include <optional>
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

constexpr Operand kNormOperands[] = {
    {"x", kActivation, "[rows, h]"},
    {"added", Like("x"), "[rows, h] or [0, 0]"},
    {"weight", kActivation, "[h]"},
    {"sum", Like("x"), "[rows, h] or [0, 0]", kResult},  // has the dimensions of `added`
    {"y", Like("x"), "[rows, h]", kResult},
};

ffi::Error AddRmsNorm(cudaStream_t stream, const Call& operands, float eps) {
  NormCall call = {operands.size("rows"), operands.size("h"), operands.type("x"),
                   operands.type("weight"), eps};
  const ffi::AnyBuffer added = operands["added"];
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtMost("rows (x)", call.rows, kMaxRows), AtMost("h (x)", call.h, kMaxExtent)}));
  const int64_t rows = added.dimensions()[0], columns = added.dimensions()[1];
  NVFP4_RETURN_IF_ERROR(ExpectDims("sum [rows, h]", operands["sum"].dimensions(), {rows, columns}));
  const NormBuffers buffers = {operands.in<void>("x"), operands.in_or_null<void>("added"),
                               operands.in<void>("weight"), operands.out("sum"), operands.out("y")};
  const std::optional<InputCombine> combine = running_chain.TakeWork<InputCombine>();
  if (combine) NVFP4_RETURN_IF_ERROR(CheckInputCombine(*combine, call, added));
  const std::optional<AddGatedCall> gated = running_chain.TakeWork<AddGatedCall>();
  if (gated) NVFP4_RETURN_IF_ERROR(CheckInputGated(*gated, call, added));
  const auto linear_gated = running_chain.TakeWork<AddLinearGatedCall>();
  if (linear_gated) NVFP4_RETURN_IF_ERROR(CheckInputGated(*linear_gated, call, added));
  const auto reduced = running_chain.TakeWork<AllReduceCall>();
  if (reduced) NVFP4_RETURN_IF_ERROR(CheckInputSum(*reduced, call, added));
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
                             : reduced ? LaunchAllReduceRmsNorm(stream, call, buffers, *reduced)
                                       : LaunchAddRmsNorm(stream, call, buffers);
  return FromCuda(status);
}

constexpr Operand kDenseOperands[] = {
    {"x", kHalf, "[rows, k]"},
    {"weight", kActivation, "[n, k]"},
    {"bias", F32OrLike("x"), "[n] or [0]"},
    {"y", F32OrLike("x"), "[rows, n]", kResult},
};

constexpr Operand kDenseFp8Operands[] = {
    {"x", kHalf, "[rows, k]"},
    {"weight", kE4M3, "[n, k]"},
    {"weight_scale", kF32, ""},  // [n] or [n, k/128]
    {"row_scale", kF32, "[scales]"},
    {"bias", F32OrLike("x"), "[n] or [0]"},
    {"y", F32OrLike("x"), "[rows, n]", kResult},
};

// Reads what both forms of a linear layer have. k is a multiple of `factor`.
ffi::Error ReadDense(const Call& operands, int64_t factor, DenseFewCall* call) {
  call->rows = operands.size("rows");
  call->n = operands.size("n");
  call->k = operands.size("k");
  call->type = operands.type("x");
  call->weight_type = operands.type("weight");
  call->output_type = operands.type("y");
  const bool wide = operands.type("bias") == DataType::kF32;
  call->bias_size = !operands.has("bias") ? 0 : wide ? 4 : 2;
  return operands.Check({AtMost("rows (x)", call->rows, kMostDenseRows),
                         MultipleOf("k (x)", call->k, factor), AtMost("k (x)", call->k, kMaxExtent),
                         AtMost("n (weight)", call->n, kMaxExtent)});
}

ffi::Error DenseFew(cudaStream_t stream, const Call& operands) {
  DenseFewCall call = {};
  NVFP4_RETURN_IF_ERROR(ReadDense(operands, kDenseFactor, &call));
  const bool wide = call.type == DataType::kBF16 && call.weight_type == DataType::kF32;
  if (call.weight_type != call.type && !wide) {
    return Expected("weight", "the type of x, or float32 if x is bfloat16",
                    TypeText(operands["weight"].element_type()));
  }
  call.weight_is_unchanged = running_chain.IsUnchanged(RangeOf(operands["weight"]));
  DenseFewBuffers buffers = {operands.in<void>("x"),
                             operands.in<void>("weight"),
                             operands.out("y"),
                             nullptr,
                             nullptr,
                             operands.in_or_null<void>("bias")};
  const std::optional<InputNorm> norm = running_chain.TakeWork<InputNorm>();
  if (norm) {
    NVFP4_RETURN_IF_ERROR(CheckInputNorm(*norm, operands["x"]));
    buffers.norm = &*norm;
  }
  return FromCuda(LaunchDenseFew(stream, call, buffers));
}

ffi::Error DenseFp8Few(cudaStream_t stream, const Call& operands) {
  DenseFewCall call = {};
  NVFP4_RETURN_IF_ERROR(ReadDense(operands, kDenseE4M3Factor, &call));
  const ffi::AnyBuffer weight_scale = operands["weight_scale"];
  if (weight_scale.dimensions().size() == 2) {
    call.scale_groups = (call.k + kDenseGroup - 1) / kDenseGroup;
    NVFP4_RETURN_IF_ERROR(ExpectDims("weight_scale [n, k/128]", weight_scale.dimensions(),
                                     {call.n, call.scale_groups}));
  } else {
    NVFP4_RETURN_IF_ERROR(ExpectDims("weight_scale [n]", weight_scale.dimensions(), {call.n}));
  }
  call.row_scales = operands.size("scales");
  if (call.row_scales > 1 && call.row_scales != call.rows) {
    return Expected("row_scale [rows]", "0, 1 or " + std::to_string(call.rows) + " scales",
                    std::to_string(call.row_scales));
  }
  call.weight_is_unchanged = running_chain.IsUnchanged(RangeOf(operands["weight"])) &&
                             running_chain.IsUnchanged(RangeOf(weight_scale));
  const DenseFewBuffers buffers = {operands.in<void>("x"),
                                   operands.in<void>("weight"),
                                   operands.out("y"),
                                   operands.in("weight_scale"),
                                   operands.in_or_null("row_scale"),
                                   operands.in_or_null<void>("bias")};
  return FromCuda(LaunchDenseFew(stream, call, buffers));
}

constexpr Operand kActivateOperands[] = {
    {"gate_up", kActivation, "[rows, 2 i]"},
    {"y", Like("gate_up"), "[rows, i]", kResult},
};

ffi::Error Activate(cudaStream_t stream, const Call& operands, std::string_view activation,
                    float alpha, float beta, float limit) {
  ActivateCall call = {};
  call.rows = operands.size("rows");
  call.columns = operands.size("i");
  call.type = operands.type("y");
  call.starts_next = running_chain.StartsNext();
  NVFP4_RETURN_IF_ERROR(ReadActivation(activation, alpha, beta, limit, &call.activation));
  if (!call.activation.gated) {
    return Expected("activation", "a gated activation", std::string(activation));
  }
  NVFP4_RETURN_IF_ERROR(operands.Check({AtMost("rows (gate_up)", call.rows, kMaxRows),
                                        AtMost("i (y)", call.columns, kMaxExtent),
                                        AtMost("rows i (y)", call.rows * call.columns, kMaxRows)}));
  call.gate_up = operands.in<void>("gate_up");
  call.y = operands.out("y");
  return FromCuda(LaunchActivate(stream, call));
}

constexpr Operand kGatedOperands[] = {
    {"x", kActivation, "[rows, h]"},
    {"gate", Like("x"), "[rows] or [0]"},
    {"z", Like("x"), "[rows, h]"},
    {"y", Like("x"), "[rows, h]", kResult},
};

constexpr Operand kLinearGatedOperands[] = {
    {"x", kActivation, "[rows, h]"},
    {"gate_input", Like("x"), "[rows, k]"},
    {"gate_weight", Like("x"), "[k]", kGivesSizes},
    {"z", Like("x"), "[rows, h]"},
    {"y", Like("x"), "[rows, h]", kResult},
};

// Reads what both forms of a gated sum have.
template <typename GatedCall>
ffi::Error ReadGated(const Call& operands, GatedCall* call) {
  // If the work is left to a norm that has no kernel for both, the kernel of the sum need not wait:
  // that of the norm does.
  call->starts_next = running_chain.fuses ? running_chain.Follows() : running_chain.StartsNext();
  call->rows = operands.size("rows");
  call->columns = operands.size("h");
  call->type = operands.type("x");
  call->x = operands.in<void>("x");
  call->z = operands.in<void>("z");
  call->y = operands.out("y");
  return operands.Check({AtMost("rows (x)", call->rows, kMaxRows),
                         AtMost("h (x)", call->columns, kMaxExtent),
                         AtMost("rows h (x)", call->rows * call->columns, kMaxRows)});
}

ffi::Error AddGated(cudaStream_t stream, const Call& operands) {
  AddGatedCall call = {};
  NVFP4_RETURN_IF_ERROR(ReadGated(operands, &call));
  call.gate = operands.in_or_null<void>("gate");
  if (running_chain.fuses) {
    running_chain.work = call;
    return ffi::Error::Success();
  }
  return FromCuda(LaunchAddGated(stream, call));
}

ffi::Error AddLinearGated(cudaStream_t stream, const Call& operands) {
  AddLinearGatedCall call = {};
  NVFP4_RETURN_IF_ERROR(ReadGated(operands, &call));
  call.k = operands.size("k");
  NVFP4_RETURN_IF_ERROR(Expect({AtMost("k (gate_weight)", call.k, kMaxExtent)}));
  call.gate_input = operands.in<void>("gate_input");
  call.gate_weight = operands.in<void>("gate_weight");
  if (running_chain.fuses) {
    running_chain.work = call;
    return ffi::Error::Success();
  }
  return FromCuda(LaunchAddLinearGated(stream, call));
}

constexpr Operand kGateHeadsOperands[] = {
    {"x", kActivation, "[rows, n, d]"},
    {"gates", Like("x"), "[rows, w]"},  // w is n, n d, or 2 n d or more
    {"y", Like("x"), "[rows, n, d]", kResult},
};

ffi::Error GateHeads(cudaStream_t stream, const Call& operands) {
  const int64_t rows = operands.size("rows"), n = operands.size("n"), d = operands.size("d");
  const int64_t columns = operands.size("w");
  const bool apart = columns == n || columns == n * d;  // from the channels of the queries
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtMost("rows (x)", rows, kMaxRows), AtMost("n (x)", n, kMaxExtent),
       AtMost("d (x)", d, kMaxExtent), AtLeast("w (gates)", columns, apart ? columns : 2 * n * d),
       AtMost("rows n (x)", rows * n, kMaxRows)}));
  GateHeadsCall call = {};
  call.starts_next = running_chain.StartsNext();
  call.rows = rows;
  call.heads = static_cast<uint32_t>(n);
  call.d = static_cast<uint32_t>(d);
  call.gate_columns = columns;
  call.one_gate = columns == n;
  call.first_gate = static_cast<uint32_t>(apart ? 0 : d);
  call.gate_step = static_cast<uint32_t>(apart ? (call.one_gate ? 1 : d) : 2 * d);
  call.type = operands.type("x");
  call.x = operands.in<void>("x");
  call.gates = operands.in<void>("gates");
  call.y = operands.out("y");
  return FromCuda(LaunchGateHeads(stream, call));
}

}  // namespace

std::vector<NamedHandler> MixerHandlers() {
  return {
      NVFP4_CUDA_TARGET("nvfp4_add_rms_norm_cuda", kNormOperands, AddRmsNorm, .Attr<float>("eps")),
      NVFP4_CUDA_TARGET("nvfp4_dense_few_cuda", kDenseOperands, DenseFew, ),
      NVFP4_CUDA_TARGET("nvfp4_dense_fp8_few_cuda", kDenseFp8Operands, DenseFp8Few, ),
      NVFP4_CUDA_TARGET("nvfp4_activate_cuda", kActivateOperands, Activate,
                        .Attr<std::string_view>("activation")
                            .Attr<float>("alpha")
                            .Attr<float>("beta")
                            .Attr<float>("limit")),
      NVFP4_CUDA_TARGET("nvfp4_add_gated_cuda", kGatedOperands, AddGated, ),
      NVFP4_CUDA_TARGET("nvfp4_add_linear_gated_cuda", kLinearGatedOperands, AddLinearGated, ),
      NVFP4_CUDA_TARGET("nvfp4_gate_heads_cuda", kGateHeadsOperands, GateHeads, ),
  };
}

}  // namespace nvfp4
