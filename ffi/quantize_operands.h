// The operands of the quantizer. The handlers for CPUs and GPUs share them.
#pragma once

#include <string>
#include <string_view>

#include "checks.h"
#include "operands.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

constexpr Operand kQuantizeOperands[] = {
    {"x", kActivation, "[m, k]"},
    {"global_scale", kF32, "[] or [0]"},  // if it is left out, the quantizer computes it from x
    {"packed", kU8, "[m, k/2]", kResult},
    {"block_scale", kE4M3, "[m, k/16]", kResult | kInTiles},
    {"used_scale", kF32, "[]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

// Checks the operands. Swizzled scales are padded to whole tiles.
inline ffi::Error ReadQuantize(Call& operands, std::string_view scale_layout, bool* swizzled) {
  *swizzled = scale_layout == "swizzle_128x4";
  if (!*swizzled && scale_layout != "linear") {
    return Expected("scale_layout", "one of linear, swizzle_128x4", std::string(scale_layout));
  }
  if (*swizzled) operands.SetTile({128, 64});
  return operands.Check({MultipleOf("k (x)", operands.size("k"), 16)});
}

}  // namespace nvfp4
