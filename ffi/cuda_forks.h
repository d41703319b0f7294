// Runs chains of calls whose forks have a CUDA stream of their own.
#pragma once

#include <vector>

#include "call_chain.h"

namespace nvfp4 {

// As RunCallChain.
XLA_FFI_Error* RunForkedChain(XLA_FFI_CallFrame* frame, const std::vector<NamedHandler>& handlers);

}  // namespace nvfp4
