// The FFI targets of the CUDA kernels. The extension registers them, and so does the emulation of
// the kernels on a CPU (tests/emulation).

#pragma once

#include <vector>

#include "call_chain.h"

namespace nvfp4 {

// All targets, with their names, but for that of chains.
const std::vector<NamedHandler>& CudaHandlers();

// The handler of "nvfp4_call_chain_cuda".
XLA_FFI_Error* RunCudaChain(XLA_FFI_CallFrame* frame);

// Those of the kernels around the experts: attention and heads; norms, plain linear layers and
// gates; recurrent mixers. And that of sums over GPUs.
std::vector<NamedHandler> AttentionHandlers();
std::vector<NamedHandler> MixerHandlers();
std::vector<NamedHandler> RecurrentHandlers();
std::vector<NamedHandler> PeerHandlers();

}  // namespace nvfp4
