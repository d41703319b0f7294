// Checks of the operands of an FFI call. An error message names the operand, what was expected, and
// what came:
//
//   packed [e, n, k/2]: expected [3, 128, 32], got [3, 128, 16]
//
// The Python ops check their arguments before, and speak of those arguments. The checks in this
// file protect callers who call the FFI targets directly.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "shapes.h"
#include "xla/ffi/api/ffi.h"

#define NVFP4_RETURN_IF_ERROR(expression)          \
  do {                                             \
    ::xla::ffi::Error nvfp4_error = (expression);  \
    if (nvfp4_error.failure()) return nvfp4_error; \
  } while (false)

namespace nvfp4 {

namespace ffi = ::xla::ffi;

template <typename Dims>
std::string DimsText(const Dims& dims) {
  std::string text = "[";
  for (int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

inline std::string TypeText(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return "bfloat16";
    case ffi::F16:
      return "float16";
    case ffi::F32:
      return "float32";
    case ffi::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::U8:
      return "uint8";
    case ffi::S32:
      return "int32";
    default:
      return "type " + std::to_string(static_cast<int>(type));
  }
}

inline ffi::Error Expected(std::string_view what, const std::string& expected,
                           const std::string& got) {
  return ffi::Error::InvalidArgument(std::string(what) + ": expected " + expected + ", got " + got);
}

// `what` names the operand and the letters of its dimensions, as in "packed [e, n, k/2]".
inline ffi::Error ExpectDims(std::string_view what, ffi::Span<const int64_t> got,
                             std::initializer_list<int64_t> expected) {
  bool same = got.size() == expected.size();
  for (size_t d = 0; same && d < expected.size(); ++d) same = got[d] == expected.begin()[d];
  return same ? ffi::Error::Success() : Expected(what, DimsText(expected), DimsText(got));
}

inline ffi::Error ExpectRank(std::string_view what, ffi::Span<const int64_t> got, size_t rank) {
  if (got.size() == rank) return ffi::Error::Success();
  return Expected(what, std::to_string(rank) + " dimensions", DimsText(got));
}

inline ffi::Error ExpectType(std::string_view what, ffi::DataType got, ffi::DataType expected) {
  return got == expected ? ffi::Error::Success()
                         : Expected(what, TypeText(expected), TypeText(got));
}

inline ffi::Error ExpectMultipleOf(std::string_view what, int64_t got, int64_t factor) {
  if (got > 0 && got % factor == 0) return ffi::Error::Success();
  return Expected(what, "a positive multiple of " + std::to_string(factor), std::to_string(got));
}

inline ffi::Error ExpectAtLeast(std::string_view what, int64_t got, int64_t least) {
  if (got >= least) return ffi::Error::Success();
  return Expected(what, "at least " + std::to_string(least), std::to_string(got));
}

inline ffi::Error ExpectAtMost(std::string_view what, int64_t got, int64_t most) {
  if (got <= most) return ffi::Error::Success();
  return Expected(what, "at most " + std::to_string(most), std::to_string(got));
}

// An operand, and its name in error messages.
struct NamedOperand {
  std::string_view name;
  ffi::AnyBuffer buffer;
};

// Expects each operand to start at a multiple of `alignment` bytes, and at a multiple of the size
// of its elements. XLA aligns its buffers more strictly than any kernel needs. Without this check,
// a kernel would read wrong bytes from a misaligned buffer, or its instruction would fault and end
// the process.
inline ffi::Error ExpectAligned(std::initializer_list<NamedOperand> operands, size_t alignment) {
  for (const NamedOperand& operand : operands) {
    const ffi::AnyBuffer& buffer = operand.buffer;
    const size_t bytes = std::max(alignment, ffi::ByteWidth(buffer.element_type()));
    const size_t past = reinterpret_cast<uintptr_t>(buffer.untyped_data()) % bytes;
    if (buffer.element_count() == 0 || past == 0) continue;
    return Expected(operand.name,
                    "memory that starts at a multiple of " + std::to_string(bytes) + " bytes",
                    "memory that starts " + std::to_string(past) + " bytes past such a multiple");
  }
  return ffi::Error::Success();
}

// An optional operand has the dimensions `expected`. If it is left out, all of its dimensions are
// zero.
inline ffi::Error ExpectDimsOrEmpty(std::string_view what, ffi::Span<const int64_t> got,
                                    std::initializer_list<int64_t> expected) {
  bool empty = got.size() == expected.size();
  for (int64_t dim : got) empty = empty && dim == 0;
  return empty ? ffi::Error::Success() : ExpectDims(what, got, expected);
}

// Finds the record that has the name `got`. `table` is an array of records with a member `name`.
template <typename Record, size_t kSize>
ffi::Error ExpectName(std::string_view what, std::string_view got, const Record (&table)[kSize],
                      const Record** record) {
  std::string names;
  for (const Record& row : table) {
    if (row.name == got) {
      *record = &row;
      return ffi::Error::Success();
    }
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  return Expected(what, "one of " + names, std::string(got));
}

// Expects activations of bfloat16, float16 or float32.
inline ffi::Error ExpectActivationType(std::string_view what, ffi::DataType got, DataType* type) {
  switch (got) {
    case ffi::BF16:
      *type = DataType::kBF16;
      break;
    case ffi::F16:
      *type = DataType::kF16;
      break;
    case ffi::F32:
      *type = DataType::kF32;
      break;
    default:
      return Expected(what, "bfloat16, float16 or float32", TypeText(got));
  }
  return ffi::Error::Success();
}

// The operands of an expert layer, which are the same for each backend, in the order of the FFI
// call.
struct MoEOperands {
  ffi::AnyBuffer x;
  ffi::AnyBuffer gate_up_packed;
  ffi::AnyBuffer gate_up_block_scale;
  ffi::AnyBuffer gate_up_global_scale;
  ffi::AnyBuffer gate_up_input_scale;
  ffi::AnyBuffer gate_up_bias;
  ffi::AnyBuffer down_packed;
  ffi::AnyBuffer down_block_scale;
  ffi::AnyBuffer down_global_scale;
  ffi::AnyBuffer down_input_scale;
  ffi::AnyBuffer down_bias;
  ffi::AnyBuffer expert_ids;
  ffi::AnyBuffer expert_weights;
  ffi::AnyBuffer y;
};

struct MoEOptions {
  DataType type;
  ActivationParameters activation;
  ActivationScale activation_scale;
};

// The size of a weight tile. The layout of a backend pads each weight to whole tiles.
struct WeightTile {
  int64_t rows;
  int64_t columns;
};

// What the kernels of a backend assume about their operands.
struct OperandRules {
  WeightTile tile;
  size_t alignment;  // of the first byte of an operand; an element may need more
};

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Checks one weight [e, n, k]. `letters` are those of its dimensions, as in "e, n1, h".
inline ffi::Error ExpectWeight(const std::string& prefix, const std::string& letters,
                               ffi::AnyBuffer packed, ffi::AnyBuffer block_scale, int64_t e,
                               int64_t n, int64_t k, WeightTile tile) {
  const int64_t rows = RoundUp(n, tile.rows), columns = RoundUp(k, tile.columns);
  const std::string padded =
      " in tiles of " + std::to_string(tile.rows) + " x " + std::to_string(tile.columns);
  NVFP4_RETURN_IF_ERROR(ExpectDims(prefix + "packed [" + letters + "/2]" + padded,
                                   packed.dimensions(), {e, rows, columns / 2}));
  return ExpectDims(prefix + "block_scale [" + letters + "/16]" + padded, block_scale.dimensions(),
                    {e, rows, columns / 16});
}

inline ffi::Error CheckMoETypes(const MoEOperands& o, DataType* type) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x [t, h]", o.x.element_type(), type));
  NVFP4_RETURN_IF_ERROR(ExpectType("gate_up_packed", o.gate_up_packed.element_type(), ffi::U8));
  NVFP4_RETURN_IF_ERROR(
      ExpectType("gate_up_block_scale", o.gate_up_block_scale.element_type(), ffi::F8E4M3FN));
  NVFP4_RETURN_IF_ERROR(
      ExpectType("gate_up_global_scale", o.gate_up_global_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(
      ExpectType("gate_up_input_scale", o.gate_up_input_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("gate_up_bias", o.gate_up_bias.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("down_packed", o.down_packed.element_type(), ffi::U8));
  NVFP4_RETURN_IF_ERROR(
      ExpectType("down_block_scale", o.down_block_scale.element_type(), ffi::F8E4M3FN));
  NVFP4_RETURN_IF_ERROR(
      ExpectType("down_global_scale", o.down_global_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(
      ExpectType("down_input_scale", o.down_input_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("down_bias", o.down_bias.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("expert_ids", o.expert_ids.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("expert_weights", o.expert_weights.element_type(), ffi::F32));
  return ExpectType("y", o.y.element_type(), o.x.element_type());
}

// Fills `shape` from x, expert_ids, the number of experts in gate_up_packed and the attribute
// `intermediate`. Then checks the dimensions of each operand against it.
inline ffi::Error CheckMoEDims(const MoEOperands& o, const MoEOptions& options,
                               int64_t intermediate, WeightTile tile, MoEShape* shape) {
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [t, h]", o.x.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("expert_ids [t, k]", o.expert_ids.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(
      ExpectRank("gate_up_packed [e, n1, h/2]", o.gate_up_packed.dimensions(), 3));
  const int64_t t = o.x.dimensions()[0], h = o.x.dimensions()[1];
  const int64_t top_k = o.expert_ids.dimensions()[1];
  const int64_t e = o.gate_up_packed.dimensions()[0], i = intermediate;
  const int64_t parts = options.activation.gated ? 2 : 1, n1 = parts * i;
  const bool has_input_scale = options.activation_scale == ActivationScale::kStatic;
  *shape = {t, top_k, e, h, i, n1};

  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("h (x)", h, 16));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("i (intermediate)", i, 16));
  NVFP4_RETURN_IF_ERROR(ExpectWeight("gate_up_", "e, n1, h", o.gate_up_packed,
                                     o.gate_up_block_scale, e, n1, h, tile));
  NVFP4_RETURN_IF_ERROR(ExpectDims("gate_up_global_scale [e, parts]",
                                   o.gate_up_global_scale.dimensions(), {e, parts}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDimsOrEmpty("gate_up_bias [e, n1]", o.gate_up_bias.dimensions(), {e, n1}));
  NVFP4_RETURN_IF_ERROR(
      ExpectWeight("down_", "e, h, i", o.down_packed, o.down_block_scale, e, h, i, tile));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("down_global_scale [e, 1]", o.down_global_scale.dimensions(), {e, 1}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("down_bias [e, h]", o.down_bias.dimensions(), {e, h}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("expert_ids [t, k]", o.expert_ids.dimensions(), {t, top_k}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("expert_weights [t, k]", o.expert_weights.dimensions(), {t, top_k}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [t, h]", o.y.dimensions(), {t, h}));
  if (has_input_scale) {
    NVFP4_RETURN_IF_ERROR(
        ExpectDims("gate_up_input_scale [e]", o.gate_up_input_scale.dimensions(), {e}));
    return ExpectDims("down_input_scale [e]", o.down_input_scale.dimensions(), {e});
  }
  NVFP4_RETURN_IF_ERROR(
      ExpectDimsOrEmpty("gate_up_input_scale [e]", o.gate_up_input_scale.dimensions(), {e}));
  return ExpectDimsOrEmpty("down_input_scale [e]", o.down_input_scale.dimensions(), {e});
}

inline ffi::Error CheckMoEAlignment(const MoEOperands& o, size_t alignment) {
  return ExpectAligned({{"x", o.x},
                        {"gate_up_packed", o.gate_up_packed},
                        {"gate_up_block_scale", o.gate_up_block_scale},
                        {"gate_up_global_scale", o.gate_up_global_scale},
                        {"gate_up_input_scale", o.gate_up_input_scale},
                        {"gate_up_bias", o.gate_up_bias},
                        {"down_packed", o.down_packed},
                        {"down_block_scale", o.down_block_scale},
                        {"down_global_scale", o.down_global_scale},
                        {"down_input_scale", o.down_input_scale},
                        {"down_bias", o.down_bias},
                        {"expert_ids", o.expert_ids},
                        {"expert_weights", o.expert_weights},
                        {"y", o.y}},
                       alignment);
}

// Returns the gate whose silu is `limit`, a positive number. silu increases where it is positive,
// so that min(silu(g), limit) = silu(min(g, SiluGate(limit))).
inline float SiluGate(float limit) {
  double low = limit, high = limit + 0.28;  // x - silu(x) = x / (1 + e^x) is below 0.28
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (middle / (1.0 + std::exp(-middle)) < limit ? low : high) = middle;
  }
  return static_cast<float>(high);
}

// Fills `parameters` from the attributes of an activation.
inline ffi::Error ReadActivation(std::string_view activation, float alpha, float beta, float limit,
                                 ActivationParameters* parameters) {
  const ActivationRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(ExpectName("activation", activation, kActivations, &record));
  const float gate_limit = record->bounds_result ? SiluGate(limit) : limit;
  *parameters = {record->kind, record->gated, record->interleaved, alpha, beta, gate_limit, limit};
  return ffi::Error::Success();
}

// Checks everything about the call of an expert layer that does not depend on the backend.
inline ffi::Error CheckMoE(const MoEOperands& operands, std::string_view activation, float alpha,
                           float beta, float limit, std::string_view activation_scale,
                           int64_t intermediate, const OperandRules& rules, MoEShape* shape,
                           MoEOptions* options) {
  const ActivationScaleRecord* scale = nullptr;
  NVFP4_RETURN_IF_ERROR(ReadActivation(activation, alpha, beta, limit, &options->activation));
  NVFP4_RETURN_IF_ERROR(
      ExpectName("activation_scale", activation_scale, kActivationScales, &scale));
  options->activation_scale = scale->kind;
  NVFP4_RETURN_IF_ERROR(CheckMoETypes(operands, &options->type));
  NVFP4_RETURN_IF_ERROR(CheckMoEDims(operands, *options, intermediate, rules.tile, shape));
  return CheckMoEAlignment(operands, rules.alignment);
}

// The operands of a grouped GEMM, in the order of the FFI call.
struct GroupedGemmOperands {
  ffi::AnyBuffer x;
  ffi::AnyBuffer packed;
  ffi::AnyBuffer block_scale;
  ffi::AnyBuffer global_scale;
  ffi::AnyBuffer input_scale;
  ffi::AnyBuffer bias;
  ffi::AnyBuffer group_sizes;
  ffi::AnyBuffer y;
};

inline ffi::Error CheckGroupedGemmTypes(const GroupedGemmOperands& o, DataType* type) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x [m, k]", o.x.element_type(), type));
  NVFP4_RETURN_IF_ERROR(ExpectType("packed", o.packed.element_type(), ffi::U8));
  NVFP4_RETURN_IF_ERROR(ExpectType("block_scale", o.block_scale.element_type(), ffi::F8E4M3FN));
  NVFP4_RETURN_IF_ERROR(ExpectType("global_scale", o.global_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("input_scale", o.input_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("bias", o.bias.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("group_sizes", o.group_sizes.element_type(), ffi::S32));
  return ExpectType("y", o.y.element_type(), o.x.element_type());
}

// Fills `shape` from x, packed, global_scale and y. Then checks the dimensions of each operand
// against it.
inline ffi::Error CheckGroupedGemmDims(const GroupedGemmOperands& o, ActivationScale scale,
                                       WeightTile tile, GroupedGemmShape* shape) {
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [m, k]", o.x.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("packed [e, n, k/2]", o.packed.dimensions(), 3));
  NVFP4_RETURN_IF_ERROR(ExpectRank("global_scale [e, parts]", o.global_scale.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("y [m, n]", o.y.dimensions(), 2));
  const int64_t m = o.x.dimensions()[0], k = o.x.dimensions()[1], n = o.y.dimensions()[1];
  const int64_t e = o.packed.dimensions()[0], n_pad = RoundUp(n, tile.rows);
  const int64_t parts = o.global_scale.dimensions()[1];
  *shape = {m, n, n_pad, k, e, parts};

  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("k (x)", k, 16));
  NVFP4_RETURN_IF_ERROR(ExpectWeight("", "e, n, k", o.packed, o.block_scale, e, n, k, tile));
  NVFP4_RETURN_IF_ERROR(ExpectDims("global_scale [e, parts], parts 1, 2 or n",
                                   o.global_scale.dimensions(),
                                   {e, parts == 2 || parts == n ? parts : 1}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("bias [e, n]", o.bias.dimensions(), {e, n}));
  NVFP4_RETURN_IF_ERROR(
      e == 1 ? ExpectDimsOrEmpty("group_sizes [e] or [0]", o.group_sizes.dimensions(), {e})
             : ExpectDims("group_sizes [e]", o.group_sizes.dimensions(), {e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [m, n]", o.y.dimensions(), {m, n}));
  return scale == ActivationScale::kStatic
             ? ExpectDims("input_scale [e]", o.input_scale.dimensions(), {e})
             : ExpectDimsOrEmpty("input_scale [e]", o.input_scale.dimensions(), {e});
}

// Checks everything about the call of a grouped GEMM that does not depend on the backend.
inline ffi::Error CheckGroupedGemm(const GroupedGemmOperands& operands,
                                   std::string_view activation_scale, const OperandRules& rules,
                                   GroupedGemmShape* shape, DataType* type,
                                   ActivationScale* scale) {
  const ActivationScaleRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(
      ExpectName("activation_scale", activation_scale, kActivationScales, &record));
  *scale = record->kind;
  NVFP4_RETURN_IF_ERROR(CheckGroupedGemmTypes(operands, type));
  NVFP4_RETURN_IF_ERROR(CheckGroupedGemmDims(operands, *scale, rules.tile, shape));
  return ExpectAligned({{"x", operands.x},
                        {"packed", operands.packed},
                        {"block_scale", operands.block_scale},
                        {"global_scale", operands.global_scale},
                        {"input_scale", operands.input_scale},
                        {"bias", operands.bias},
                        {"group_sizes", operands.group_sizes},
                        {"y", operands.y}},
                       rules.alignment);
}

// Checks the operands of the quantizer. Swizzled scales are padded to whole tiles.
inline ffi::Error CheckQuantize(ffi::AnyBuffer x, ffi::AnyBuffer global_scale,
                                ffi::AnyBuffer packed, ffi::AnyBuffer block_scale,
                                ffi::AnyBuffer used_scale, std::string_view scale_layout,
                                size_t alignment, DataType* type, bool* swizzled) {
  *swizzled = scale_layout == "swizzle_128x4";
  if (!*swizzled && scale_layout != "linear") {
    return Expected("scale_layout", "one of linear, swizzle_128x4", std::string(scale_layout));
  }
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x [m, k]", x.element_type(), type));
  NVFP4_RETURN_IF_ERROR(ExpectType("global_scale", global_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("packed", packed.element_type(), ffi::U8));
  NVFP4_RETURN_IF_ERROR(ExpectType("block_scale", block_scale.element_type(), ffi::F8E4M3FN));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [m, k]", x.dimensions(), 2));
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1];
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("k (x)", k, 16));
  NVFP4_RETURN_IF_ERROR(ExpectType("used_scale", used_scale.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectDims("used_scale []", used_scale.dimensions(), {}));
  if (global_scale.element_count() > 0) {  // [0] means that the quantizer computes it from x
    NVFP4_RETURN_IF_ERROR(ExpectDims("global_scale []", global_scale.dimensions(), {}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectDims("packed [m, k/2]", packed.dimensions(), {m, k / 2}));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"x", x},
                                       {"global_scale", global_scale},
                                       {"packed", packed},
                                       {"block_scale", block_scale},
                                       {"used_scale", used_scale}},
                                      alignment));
  if (*swizzled) {
    return ExpectDims("block_scale [m up to 128, k/16 up to 4]", block_scale.dimensions(),
                      {RoundUp(m, 128), RoundUp(k, 64) / 16});
  }
  return ExpectDims("block_scale [m, k/16]", block_scale.dimensions(), {m, k / 16});
}

}  // namespace nvfp4
