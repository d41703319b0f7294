// The FFI targets of the kernels around the experts: attention, heads, norms, plain linear
// layers, recurrent mixers.

#pragma once

#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

struct MixerTarget {
  std::string_view name;
  XLA_FFI_Handler* handler;
};

std::vector<MixerTarget> MixerTargets();

}  // namespace nvfp4
