// The forks of a chain (call_chain.h) on a second stream, the side stream. Events order it:
//
//   main stream   ... norm | record forked | scope ...         | wait for ended | sum ...
//   side stream       wait for forked | forked calls | record ended
//
// While XLA captures the main stream for a CUDA graph, the side stream joins the capture at its
// first wait, and the fork becomes a branch of the graph.
#include "cuda_forks.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/kernel_overlap.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

// A stream and the events that order it. A wait is for the latest record of its event when the wait
// is enqueued, so that only one run of a chain may use them at a time.
struct SideStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr, ended = nullptr;
};

cudaError_t Create(SideStream* side) {
  // Non-blocking: otherwise the stream would wait for the default stream, which is no part of a
  // capture.
  cudaError_t status = cudaStreamCreateWithFlags(&side->stream, cudaStreamNonBlocking);
  for (cudaEvent_t* event : {&side->forked, &side->ended}) {
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  }
  return status;
}

// The side streams that no run uses, for each device. They are never destroyed: work may still be
// on them, and at the end of the process CUDA may be gone before this is.
class SideStreamPool {
 public:
  cudaError_t Take(int device, SideStream* side) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<SideStream>& idle = idle_[device];
    for (auto it = idle.begin(); it != idle.end(); ++it) {
      if (!IsFree(*it)) continue;
      *side = *it;
      idle.erase(it);
      return cudaSuccess;
    }
    // This thread may capture the main stream. Calls that are unsafe in a capture are allowed in
    // the relaxed mode.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t status = cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != cudaSuccess) return status;
    status = Create(side);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return status;
  }

  void Return(int device, const SideStream& side) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_[device].push_back(side);
  }

 private:
  // A stream remains part of a capture until the capture ends, which is after the run.
  static bool IsFree(const SideStream& side) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(side.stream, &capture) == cudaSuccess &&
           capture == cudaStreamCaptureStatusNone;
  }

  std::mutex mutex_;
  std::map<int, std::vector<SideStream>> idle_;
};

SideStreamPool& Pool() {
  static auto* const pool = new SideStreamPool;
  return *pool;
}

// The side stream of the chain that this thread runs.
thread_local cudaStream_t side_stream = nullptr;

XLA_FFI_Error* GetSideStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = side_stream;
  return nullptr;
}

// The forks of one run of a chain. Handlers get their stream from the API of their frame and by
// no other way, so that an API with another stream moves a call.
class CudaForks final : public ChainForks {
 public:
  explicit CudaForks(const XLA_FFI_CallFrame& frame) : frame_(frame) {}
  CudaForks(const CudaForks&) = delete;
  CudaForks& operator=(const CudaForks&) = delete;
  ~CudaForks() {
    side_stream = nullptr;
    if (side_.ended != nullptr) Pool().Return(device_, side_);
  }

  XLA_FFI_Error* Fork() override {
    if (side_.ended == nullptr) {
      if (XLA_FFI_Error* error = Prepare()) return error;
    }
    return ErrorOf(cudaEventRecord(side_.forked, main_), "fork");
  }

  XLA_FFI_Error* Begin() override {
    next_kernel_starts_last = true;
    return ErrorOf(cudaStreamWaitEvent(side_.stream, side_.forked, 0), "begin");
  }

  XLA_FFI_Error* Join() override {
    next_kernel_starts_last = true;
    cudaError_t status = cudaEventRecord(side_.ended, side_.stream);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(main_, side_.ended, 0);
    return ErrorOf(status, "join");
  }

  const XLA_FFI_Api* api() const override { return &api_; }

 private:
  // Finds the main stream, and takes a side stream.
  XLA_FFI_Error* Prepare() {
    // The API of a newer XLA has more functions, but no handler here knows them.
    const size_t bytes = std::min(frame_.api->struct_size, sizeof(XLA_FFI_Api));
    std::copy_n(reinterpret_cast<const char*>(frame_.api), bytes, reinterpret_cast<char*>(&api_));
    api_.struct_size = bytes;
    api_.XLA_FFI_Stream_Get = GetSideStream;
    XLA_FFI_Stream_Get_Args args = {};
    args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
    args.ctx = frame_.ctx;
    if (XLA_FFI_Error* error = frame_.api->XLA_FFI_Stream_Get(&args)) return error;
    main_ = static_cast<cudaStream_t>(args.stream);
    cudaError_t status = cudaGetDevice(&device_);
    if (status == cudaSuccess) status = Pool().Take(device_, &side_);
    side_stream = side_.stream;
    return ErrorOf(status, "side stream");
  }

  XLA_FFI_Error* ErrorOf(cudaError_t status, const std::string& what) const {
    if (status == cudaSuccess) return nullptr;
    cudaGetLastError();  // otherwise the next call would report this error as its own
    return ChainError(frame_.api, XLA_FFI_Error_Code_INTERNAL,
                      what + ": " + cudaGetErrorString(status));
  }

  const XLA_FFI_CallFrame& frame_;
  XLA_FFI_Api api_ = {};
  cudaStream_t main_ = nullptr;
  int device_ = 0;
  SideStream side_;
};

}  // namespace

XLA_FFI_Error* RunForkedChain(XLA_FFI_CallFrame* frame, const std::vector<NamedHandler>& handlers) {
  CudaForks forks(*frame);
  return RunCallChain(frame, handlers, &forks);
}

}  // namespace nvfp4
