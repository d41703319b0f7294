// The FFI targets of the kernels around the experts: attention, heads, norms, plain linear
// layers, recurrent mixers.

#pragma once

#include <vector>

#include "call_chain.h"

namespace nvfp4 {

std::vector<NamedHandler> AttentionHandlers();
std::vector<NamedHandler> MixerHandlers();
std::vector<NamedHandler> RecurrentHandlers();

}  // namespace nvfp4
