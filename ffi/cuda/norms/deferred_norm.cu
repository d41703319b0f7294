// See deferred_norm.h.
#include "cuda/norms/deferred_norm.h"

#include "cuda/launch_kernel.cuh"
#include "cuda/norms/norm_prologue.cuh"

namespace nvfp4 {
namespace {

thread_local NormDeferral* current = nullptr;

// Whether a prologue computes the norm with the bits of AddRmsNorm. There, each thread must have at
// most one piece of 16 bytes of a row.
bool FitsPrologue(const NormCall& call) {
  constexpr int64_t kMaxRuns = 512 / 32;
  return call.type != DataType::kF32 &&
         (call.weight_type == call.type || call.weight_type == DataType::kF32) && call.h % 8 == 0 &&
         call.h > 0 && call.rows > 0 && NormRuns(call.h) <= kMaxRuns &&
         call.rows * NormRuns(call.h) <= kMaxPrologueRuns;
}

}  // namespace

NormDeferral::NormDeferral() { current = this; }
NormDeferral::~NormDeferral() { current = nullptr; }

cudaError_t LaunchOrDeferNorm(cudaStream_t stream, const NormCall& call,
                              const NormBuffers& buffers) {
  if (current == nullptr) return LaunchAddRmsNorm(stream, call, buffers);
  current->stream_ = stream;
  current->call_ = call;
  current->buffers_ = buffers;
  current->waits_ = true;
  return cudaSuccess;
}

cudaError_t LaunchDeferredNorm() {
  if (current == nullptr || !current->waits_) return cudaSuccess;
  current->waits_ = false;
  return LaunchAddRmsNorm(current->stream_, current->call_, current->buffers_);
}

bool TakeDeferredNorm(const void* x, NormPrologue* prologue) {
  if (current == nullptr || !current->waits_ || current->buffers_.y != x ||
      !FitsPrologue(current->call_)) {
    return false;
  }
  current->waits_ = false;
  *prologue = {current->buffers_, static_cast<int32_t>(current->call_.rows),
               static_cast<int32_t>(current->call_.h), current->call_.eps,
               current->call_.weight_type == DataType::kF32};
  return true;
}

}  // namespace nvfp4
