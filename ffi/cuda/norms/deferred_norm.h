// In a chain of calls (call_chain.h), a norm for few rows can run inside of the kernel that reads
// its result. The chain opens a NormDeferral around two such calls. The call of the norm then hands
// its arguments over instead of launching a kernel. The call after it takes them, or launches the
// norm first if its own kernel has no prologue for them (norm_prologue.cuh).
//
// The memory of the norm's operands must not be used again for a result of the call after it.
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace nvfp4 {

struct NormPrologue;

// While an object of this class exists, it catches the norms that its thread launches by
// LaunchOrDeferNorm.
class NormDeferral {
 public:
  NormDeferral();
  ~NormDeferral();
  NormDeferral(const NormDeferral&) = delete;
  NormDeferral& operator=(const NormDeferral&) = delete;

 private:
  friend cudaError_t LaunchOrDeferNorm(cudaStream_t, const NormCall&, const NormBuffers&);
  friend cudaError_t LaunchDeferredNorm();
  friend bool TakeDeferredNorm(const void*, NormPrologue*);

  cudaStream_t stream_ = nullptr;
  NormCall call_ = {};
  NormBuffers buffers_ = {};
  bool waits_ = false;  // whether a norm has been caught and not launched
};

// Launches a norm, or leaves that to the next call if a NormDeferral exists.
cudaError_t LaunchOrDeferNorm(cudaStream_t stream, const NormCall& call,
                              const NormBuffers& buffers);

// Launches the norm that waits, if there is one.
cudaError_t LaunchDeferredNorm();

// Returns whether a norm waits whose result is `x` and which a prologue can compute. It then no
// longer waits: the kernel that gets *prologue has to compute it.
bool TakeDeferredNorm(const void* x, NormPrologue* prologue);

}  // namespace nvfp4
