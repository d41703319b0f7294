// The FFI targets of the CUDA extension, on a CPU. The handlers are those of the extension. They
// get a stream that is null, and the functions of the CUDA runtime that they call stand below.
//
// A kernel must not depend on the order of its threads, so that each call runs twice, with the
// threads of a block in both orders. Each buffer of a call ends at a protected page, so that an
// access past its end fails.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_bindings.h"
#include "device_functions.h"
#include "xla/ffi/api/ffi.h"

namespace emulation {
extern bool backwards;
}

namespace nvfp4 {

int multiprocessors = 1;
int capability_major = 0;
int block_shared_bytes = 0;
int largest_shared_bytes = 0;
int largest_cluster = 0;
int launches = 0;
int calls = 0;

bool MayStartNext() { return running_chain.starts_next; }

namespace {

bool is_unchanged = false;

// Memory that ends at a protected page, except for alignment to 16 bytes.
class Guarded {
 public:
  explicit Guarded(int64_t size) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t whole = (std::max<int64_t>(size, 1) + page - 1) / page * page;
    bytes_ = whole + page;
    memory_ = static_cast<char*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + whole, page, PROT_NONE);
    data_ = memory_ + (whole - size) / 16 * 16;
  }
  Guarded(Guarded&& other) : size_(other.size_), bytes_(other.bytes_), data_(other.data_) {
    memory_ = std::exchange(other.memory_, nullptr);
  }
  ~Guarded() {
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }
  char* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  int64_t size_, bytes_;
  char* memory_;
  char* data_;
};

int64_t BytesOf(const XLA_FFI_Buffer& buffer) {
  int64_t bytes = xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(buffer.dtype));
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= buffer.dims[i];
  return bytes;
}

// The workspace is the only result that need not be the same in both orders.
bool IsWorkspace(const XLA_FFI_Buffer& buffer) {
  return buffer.dtype == XLA_FFI_DataType_U8 && buffer.rank == 1;
}

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

// One call of a handler on guarded copies of its buffers.
class EmulatedCall {
 public:
  explicit EmulatedCall(const XLA_FFI_CallFrame& frame) : frame_(frame), copy_(frame) {
    const size_t bytes = std::min(frame.api->struct_size, sizeof(XLA_FFI_Api));
    std::memcpy(&api_, frame.api, bytes);
    api_.struct_size = bytes;
    api_.XLA_FFI_Stream_Get = GetStream;
    copy_.api = &api_;
    for (int64_t i = 0; i < frame.args.size; ++i) Place(frame.args.args[i], &operands_);
    num_operand_places_ = places_.size();
    for (int64_t i = 0; i < frame.rets.size; ++i) Place(frame.rets.rets[i], &results_);
    for (XLA_FFI_Buffer& buffer : operands_) operand_addresses_.push_back(&buffer);
    for (XLA_FFI_Buffer& buffer : results_) result_addresses_.push_back(&buffer);
    copy_.args.args = operand_addresses_.data();
    copy_.rets.rets = result_addresses_.data();
  }

  XLA_FFI_Error* Run(XLA_FFI_Handler* handler) {
    std::vector<std::string> first;
    for (const bool backwards : {false, true}) {
      emulation::backwards = backwards;
      largest_shared_bytes = largest_cluster = launches = 0;
      Fill();
      if (XLA_FFI_Error* error = RunOnce(handler)) return error;
      if (WroteOperand()) return Internal("a kernel wrote to an operand");
      std::vector<std::string> found;
      for (const XLA_FFI_Buffer& buffer : results_) {
        if (IsWorkspace(buffer)) continue;
        found.emplace_back(static_cast<const char*>(buffer.data), BytesOf(buffer));
      }
      if (backwards && found != first) {
        return Internal("the result depends on the order of the threads");
      }
      first = std::move(found);
    }
    for (int64_t i = 0; i < frame_.rets.size; ++i) {
      const auto* result = static_cast<const XLA_FFI_Buffer*>(frame_.rets.rets[i]);
      if (BytesOf(*result) > 0) std::memcpy(result->data, results_[i].data, BytesOf(*result));
    }
    return nullptr;
  }

 private:
  // Appends a buffer of the same shape in guarded memory. A result in the memory of an operand
  // stays in its memory.
  void Place(const void* given, std::vector<XLA_FFI_Buffer>* buffers) {
    XLA_FFI_Buffer buffer = *static_cast<const XLA_FFI_Buffer*>(given);
    const int64_t bytes = BytesOf(buffer);
    const auto known = place_of_.find(buffer.data);
    const bool is_new = bytes == 0 || known == place_of_.end();
    const size_t place = is_new ? places_.size() : known->second;
    if (is_new) {
      places_.emplace_back(bytes);
      contents_.push_back(buffer.data);
      is_result_.push_back(false);
      if (bytes > 0) place_of_[buffer.data] = place;
    }
    if (buffers == &results_) is_result_[place] = true;
    buffer.data = places_[place].data();
    buffers->push_back(buffer);
  }

  void Fill() const {
    for (size_t i = 0; i < places_.size(); ++i) {
      std::memset(places_[i].data(), 0xff, places_[i].size());
      if (i < num_operand_places_ && places_[i].size() > 0) {
        std::memcpy(places_[i].data(), contents_[i], places_[i].size());
      }
    }
  }

  bool WroteOperand() const {
    for (size_t i = 0; i < num_operand_places_; ++i) {
      if (is_result_[i] || places_[i].size() == 0) continue;
      if (std::memcmp(places_[i].data(), contents_[i], places_[i].size()) != 0) return true;
    }
    return false;
  }

  // If nothing has changed since the previous kernel, the call runs as in a chain whose preceding
  // call has written all operands but the first one.
  XLA_FFI_Error* RunOnce(XLA_FFI_Handler* handler) {
    XLA_FFI_CallFrame call = copy_;
    const std::vector<ByteRange> earlier;
    if (is_unchanged) {
      running_chain.frame = &copy_;
      running_chain.earlier = &earlier;
      running_chain.is_first = false;
      for (size_t i = 1; i < operands_.size(); ++i) {
        const auto* data = static_cast<const char*>(operands_[i].data);
        running_chain.preceding.push_back({data, data + BytesOf(operands_[i])});
      }
    }
    XLA_FFI_Error* error = handler(&call);
    running_chain = {};
    return error;
  }

  XLA_FFI_Error* Internal(const char* what) const {
    XLA_FFI_Error_Create_Args args = {};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = what;
    args.errc = XLA_FFI_Error_Code_INTERNAL;
    return frame_.api->XLA_FFI_Error_Create(&args);
  }

  const XLA_FFI_CallFrame& frame_;
  XLA_FFI_CallFrame copy_;
  XLA_FFI_Api api_ = {};
  std::vector<Guarded> places_;
  std::vector<const void*> contents_;  // of the places of operands
  std::vector<bool> is_result_;
  std::map<const void*, size_t> place_of_;
  size_t num_operand_places_ = 0;
  std::vector<XLA_FFI_Buffer> operands_, results_;
  std::vector<void*> operand_addresses_, result_addresses_;
};

const std::vector<NamedHandler>& Targets() {
  static const std::vector<NamedHandler> targets = [] {
    std::vector<NamedHandler> all = CudaHandlers();
    all.push_back({"nvfp4_call_chain_cuda", RunCudaChain});
    for (const NamedHandler& other : FunctionHandlers()) all.push_back(other);
    return all;
  }();
  return targets;
}

// A handler has no argument that says which one it is, so that each target has a function.
template <size_t kIndex>
XLA_FFI_Error* RunEmulated(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Handler* handler = Targets()[kIndex].handler;
  if (frame->extension_start != nullptr) return handler(frame);  // asks for metadata
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  ++calls;
  return EmulatedCall(*frame).Run(handler);
}

constexpr size_t kMaxTargets = 64;

template <size_t... kIndices>
std::vector<XLA_FFI_Handler*> MakeHandlers(std::index_sequence<kIndices...>) {
  return {RunEmulated<kIndices>...};
}

}  // namespace
}  // namespace nvfp4

extern "C" {

// How the next calls run: the device, which kernels it takes (a value of Forced), and whether
// operands are unchanged since the previous kernel.
void configure(int count, int shared_bytes, int capability, int forced, int is_unchanged) {
  nvfp4::multiprocessors = count;
  nvfp4::block_shared_bytes = shared_bytes;
  nvfp4::capability_major = capability;
  nvfp4::forced = static_cast<nvfp4::Forced>(forced);
  nvfp4::is_unchanged = is_unchanged != 0;
  nvfp4::calls = 0;
}

// The number of calls since `configure`.
int call_count() { return nvfp4::calls; }

// Of the last call: the most dynamic shared memory of a launch, the most blocks of a cluster, and
// the number of launches.
int largest_dynamic_bytes() { return nvfp4::largest_shared_bytes; }
int largest_cluster_blocks() { return nvfp4::largest_cluster; }
int launch_count() { return nvfp4::launches; }

// The FFI targets by number. The name is null behind the last one.
const char* target_name(size_t index) {
  const auto& targets = nvfp4::Targets();
  if (targets.size() > nvfp4::kMaxTargets) std::abort();
  return index < targets.size() ? targets[index].name.data() : nullptr;
}
void* target_handler(size_t index) {
  static const auto handlers = nvfp4::MakeHandlers(std::make_index_sequence<nvfp4::kMaxTargets>());
  return reinterpret_cast<void*>(handlers[index]);
}

// The CUDA runtime, as far as handlers call it. Kernels run when they are launched, so that events
// and streams have nothing to order.
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "CUDA error";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
// There is one GPU.
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorInvalidDevice; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  if (bytes > 0) std::memcpy(target, source, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  static char place;
  *event = reinterpret_cast<cudaEvent_t>(&place);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
}
