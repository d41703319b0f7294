// The operands of `prepare_heads`, whose cache has the type of the heads or E4M3. The handlers for
// CPUs and GPUs share them.
#pragma once

#include <cstdint>
#include <string_view>

#include "checks.h"
#include "operands.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

constexpr Operand kHeadsOperands[] = {
    {"qkv", kHalf, "[b, t, columns]"},  // (n + 2m) d, or (2n + 2m) d with gates
    {"positions", kS32, "[b, t]"},
    {"keys", Like("qkv"), "[b, m, s, d]", kGivesSizes},
    {"values", Like("qkv"), "[b, m, s, d]"},
    {"q_weight", kActivation, "[d] or [0]"},
    {"k_weight", Like("q_weight"), "[d] or [0]"},
    {"frequencies", kF32, "[half]"},
    {"q", Like("qkv"), "[b, t, n, d]", kResult | kGivesSizes},
    {"new_keys", Like("qkv"), "[b, m, s, d]", kResult},
    {"new_values", Like("qkv"), "[b, m, s, d]", kResult},
};

constexpr Operand kHeadsFp8Operands[] = {
    {"qkv", kHalf, "[b, t, columns]"},
    {"positions", kS32, "[b, t]"},
    {"keys", kE4M3, "[b, m, s, d]", kGivesSizes},
    {"values", kE4M3, "[b, m, s, d]"},
    {"q_weight", kActivation, "[d] or [0]"},
    {"k_weight", Like("q_weight"), "[d] or [0]"},
    {"frequencies", kF32, "[half]"},
    {"k_scale", kF32, "[m]"},
    {"v_scale", kF32, "[m]"},
    {"q", Like("qkv"), "[b, t, n, d]", kResult | kGivesSizes},
    {"new_keys", kE4M3, "[b, m, s, d]", kResult},
    {"new_values", kE4M3, "[b, m, s, d]", kResult},
};

// Checks the operands, and reads their sizes. The width of a head and the number of channels that
// rotate are multiples of `factor`.
inline ffi::Error ReadHeadsShape(const Call& operands, bool gated, int64_t factor,
                                 HeadsShape* shape) {
  const DataType type = operands.type("qkv"), weight_type = operands.type("q_weight");
  if (weight_type != type && weight_type != DataType::kF32) {
    return Expected("q_weight", "float32 or the type of qkv",
                    TypeText(operands["q_weight"].element_type()));
  }
  const int64_t b = operands.size("b"), t = operands.size("t"), n = operands.size("n");
  const int64_t m = operands.size("m"), d = operands.size("d"), half = operands.size("half");
  *shape = {b, t, operands.size("s"), n, m, d, half};
  // First, so that keys of a wrong width do not show as wrong values.
  NVFP4_RETURN_IF_ERROR(ExpectDims("q [b, t, n, d]", operands["q"].dimensions(), {b, t, n, d}));
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtMost("d (keys)", d, kMaxPreparedWidth), AtMost("r (frequencies)", 2 * half, d)}));
  const int64_t queries = gated ? 2 * n : n;  // with the gates beside them
  NVFP4_RETURN_IF_ERROR(ExpectDims(gated ? "qkv [b, t, (2n + 2m) d]" : "qkv [b, t, (n + 2m) d]",
                                   operands["qkv"].dimensions(), {b, t, (queries + 2 * m) * d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("k_weight [d]", operands["k_weight"].dimensions(),
                                   {operands["q_weight"].dimensions()[0]}));
  NVFP4_RETURN_IF_ERROR(Expect({MultipleOf("d (keys)", d, factor)}));
  return half == 0 ? ffi::Error::Success()
                   : Expect({MultipleOf("r (frequencies)", 2 * half, factor)});
}

}  // namespace nvfp4
