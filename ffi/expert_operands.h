// The operands of an expert layer and of a grouped GEMM, which are the same for each backend, and
// what the handlers of all backends read from them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "checks.h"
#include "operands.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

constexpr Operand kMoEOperands[] = {
    {"x", kActivation, "[t, h]"},
    {"gate_up_packed", kU8, "[e, n1, h/2]", kInTiles},
    {"gate_up_block_scale", kE4M3, "[e, n1, h/16]", kInTiles},
    {"gate_up_global_scale", kF32, "[e, parts]"},
    {"gate_up_input_scale", kF32, "[e] or [0]"},
    {"gate_up_bias", kF32, "[e, n1] or [0, 0]"},
    {"down_packed", kU8, "[e, h, i/2]", kInTiles},
    {"down_block_scale", kE4M3, "[e, h, i/16]", kInTiles},
    {"down_global_scale", kF32, "[e, 1]"},
    {"down_input_scale", kF32, "[e] or [0]"},
    {"down_bias", kF32, "[e, h] or [0, 0]"},
    {"expert_ids", kS32, "[t, k]"},
    {"expert_weights", kF32, "[t, k]"},
    {"y", Like("x"), "[t, h]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

struct MoEAttributes {
  std::string_view activation;
  float alpha, beta, limit;
  std::string_view activation_scale;
  bool weight_on_input;
  int64_t intermediate;
};

struct MoEOptions {
  DataType type;
  ActivationParameters activation;
  ActivationScale activation_scale;
};

// Fills `kind` from the attribute `activation_scale`.
inline ffi::Error ReadActivationScale(std::string_view activation_scale, ActivationScale* kind) {
  const ActivationScaleRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(
      ExpectName("activation_scale", activation_scale, kActivationScales, &record));
  *kind = record->kind;
  return ffi::Error::Success();
}

// Checks everything about the call of an expert layer that does not depend on the backend. `tile`
// is that of the backend's layout.
inline ffi::Error ReadMoE(Call& operands, const MoEAttributes& attributes, Tile tile,
                          MoEShape* shape, MoEOptions* options) {
  NVFP4_RETURN_IF_ERROR(ReadActivation(attributes.activation, attributes.alpha, attributes.beta,
                                       attributes.limit, &options->activation));
  NVFP4_RETURN_IF_ERROR(
      ReadActivationScale(attributes.activation_scale, &options->activation_scale));
  options->type = operands.type("x");
  const int64_t i = attributes.intermediate, parts = options->activation.gated ? 2 : 1;
  operands.SetTile(tile);
  operands.Set("i", i);
  operands.Set("n1", parts * i);
  operands.Set("parts", parts);
  *shape = {operands.size("t"), operands.size("k"), operands.size("e"), operands.size("h"), i,
            parts * i};
  NVFP4_RETURN_IF_ERROR(
      operands.Check({MultipleOf("h (x)", shape->h, 16), MultipleOf("i (intermediate)", i, 16)}));
  if (options->activation_scale != ActivationScale::kStatic) return ffi::Error::Success();
  NVFP4_RETURN_IF_ERROR(operands.ExpectGiven("gate_up_input_scale"));
  return operands.ExpectGiven("down_input_scale");
}

constexpr Operand kGroupedGemmOperands[] = {
    {"x", kActivation, "[m, k]"},
    {"packed", kU8, "[e, n, k/2]", kInTiles},
    {"block_scale", kE4M3, "[e, n, k/16]", kInTiles},
    {"global_scale", kF32, "[e, parts]"},
    {"input_scale", kF32, "[e] or [0]"},
    {"bias", kF32, "[e, n] or [0, 0]"},
    {"group_sizes", kS32, "[e] or [0]"},  // may be left out if e is 1
    {"y", Like("x"), "[m, n]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

// A grouped GEMM with transposed weights, which have k outputs. If gate and up rows of the weights
// share tiles, columns of x take turns in eights, as the rows of a tile do.
constexpr Operand kTransposedGemmOperands[] = {
    {"x", kHalf, "[m, n]"},
    {"packed", kU8, "[e, n, k/2]", kInTiles},
    {"block_scale", kE4M3, "[e, n, k/16]", kInTiles},
    {"global_scale", kF32, "[e, 1]"},
    {"group_sizes", kS32, "[e] or [0]"},  // may be left out if e is 1
    {"y", Like("x"), "[m, k]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

// As ReadMoE, for a grouped GEMM.
inline ffi::Error ReadGroupedGemm(Call& operands, std::string_view activation_scale, Tile tile,
                                  GroupedGemmShape* shape, DataType* type, ActivationScale* scale) {
  NVFP4_RETURN_IF_ERROR(ReadActivationScale(activation_scale, scale));
  *type = operands.type("x");
  const int64_t n = operands.size("n"), e = operands.size("e"), parts = operands.size("parts");
  *shape = {operands.size("m"), n, RoundUp(n, tile.rows), operands.size("k"), e, parts};
  operands.SetTile(tile);
  NVFP4_RETURN_IF_ERROR(operands.Check({MultipleOf("k (x)", shape->k, 16)}));
  if (parts != 1 && parts != 2 && parts != n) {
    return Expected("parts (global_scale)", "1, 2 or n, which is " + std::to_string(n),
                    std::to_string(parts));
  }
  if (e != 1) NVFP4_RETURN_IF_ERROR(operands.ExpectGiven("group_sizes"));
  if (*scale != ActivationScale::kStatic) return ffi::Error::Success();
  return operands.ExpectGiven("input_scale");
}

}  // namespace nvfp4
