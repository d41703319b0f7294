// Runs several calls of an extension in order, as one FFI call. Only the bindings include this.
//
// XLA records each custom call of a CUDA graph as a graph of its own, whose kernels start when all
// kernels of the calls before it have ended. Inside one call, a kernel can start while the kernel
// before it still runs (LaunchClusters in cuda/launch_kernel.cuh).
//
// backends/chains/emission.py writes the call. For call i of the chain it has three attributes,
// whose names begin with the same number:
//
// * `attributes`: the attributes of the call, a dictionary.
// * `buffers`: int64 numbers. First come the number of operands, the number of results, and flags.
//   Each operand and result then has its place, its index, its element type, its number of
//   dimensions, and the dimensions.
// * `target`: the name of the FFI target.
//
// A buffer lies at one of three places: in an operand of the chain, in a result of the chain, or in
// the chain's last result. The last result is memory for values that only the chain itself reads,
// and the index is then an offset in bytes. Element types are those of XLA_FFI_DataType.
//
// A chain may fork: successive calls, the fork, run in parallel with the calls ahead of them, the
// scope of the fork. Flags (CallFlag) mark the first call of the scope, the calls of the fork, and
// the call after the fork. Calls of the fork and of its scope share no memory that one of them
// writes. A platform that runs calls in parallel implements ChainForks. On other platforms, these
// flags have no effect, and calls run in order.
//
// A call may be fused into the next one: it leaves its work, or the rest of it, to the next call,
// whose kernel then does both. For example, each block of a linear layer computes the norm of its
// input, and a norm computes the sum over experts that it adds. The call has kFuseFlag, and the
// handlers of the two calls pass the work on in RunningChain::work.
#pragma once

#include <algorithm>
#include <any>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

struct NamedHandler {
  std::string_view name;
  XLA_FFI_Handler* handler;
};

// The addresses [begin, end).
struct ByteRange {
  const char* begin;
  const char* end;
};

// The calls that this thread runs as a chain, as far as kernels that overlap may know them. Outside
// of a chain there is nothing to know.
struct RunningChain {
  const XLA_FFI_CallFrame* frame = nullptr;         // of the chain
  const std::vector<ByteRange>* earlier = nullptr;  // what the calls before this one write
  bool is_first = true;                             // whether the first call of the chain runs
  // What the preceding call on the same stream has written, if its kernels let the next one start
  // only after they have waited. Otherwise nothing is known, and this is empty.
  std::vector<ByteRange> preceding;
  bool starts_next = false;   // whether a kernel of this call lets the next one start before
  bool fuses = false;         // whether this call is fused into the next one
  std::any work;              // what a call has left to the next one
  bool has_launched = false;  // whether a call that has left work has launched kernels

  // Whether the kernel before this call belongs to the chain. A call that begins a fork at the
  // start of the chain has no such kernel. But its first kernel starts when all others have ended,
  // so that what follows from a preceding kernel holds as well.
  bool Follows() const { return frame != nullptr && !is_first; }

  // Whether a kernel of this call may let the next kernel start before it has waited itself.
  bool StartsNext() { return starts_next = Follows(); }

  // Leaves the rest of the work of this call to the next one.
  template <typename Work>
  void LeaveRest(const Work& rest) {
    work = rest;
    has_launched = true;
  }

  // Takes the work that the preceding call has left, if it is of this type.
  template <typename Work>
  std::optional<Work> TakeWork() {
    const Work* left = std::any_cast<Work>(&work);
    if (left == nullptr) return std::nullopt;
    const Work taken = *left;
    work.reset();
    return taken;
  }

  // Whether an operand of this call was written before the preceding kernel started: that kernel
  // belongs to the chain, the operand is one of the chain, and no call before this one writes it. A
  // kernel may read it before it waits.
  bool IsUnchanged(const ByteRange& operand) const {
    const auto has = [&](void* const* buffers, int64_t count) {
      return std::any_of(buffers, buffers + count, [&](const void* buffer) {
        return static_cast<const XLA_FFI_Buffer*>(buffer)->data == operand.begin;
      });
    };
    if (!Follows() || !has(frame->args.args, frame->args.size)) return false;
    // Only a result that takes the memory of the operand can change it.
    return !has(frame->rets.rets, frame->rets.size) || !Overlap(*earlier, operand);
  }

  // Whether an operand of this call was written before the preceding kernel started, because the
  // preceding call has written `result`, and not the operand. Both have at least one byte. All
  // kernels ahead of that call have then ended when a kernel of this one starts.
  bool IsUnchangedByWriterOf(const ByteRange& result, const ByteRange& operand) const {
    return Overlap(preceding, result) && !Overlap(preceding, operand);
  }

 private:
  static bool Overlap(const std::vector<ByteRange>& ranges, const ByteRange& bytes) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const ByteRange& range) {
      return range.begin < bytes.end && bytes.begin < range.end;
    });
  }
};
inline thread_local RunningChain running_chain;

// What a call has to do with forks, and with the next call.
enum CallFlag : int64_t {
  kForkFlag = 1,    // a fork may start when all calls before this one have ended
  kForkedFlag = 2,  // this call belongs to the fork
  kJoinFlag = 4,    // this call waits until the fork has ended
  kFuseFlag = 8,    // this call may be fused into the next one, which has no other flags
};

// How a platform runs forks. For each fork, CallChain calls Fork, Begin and Join, in this
// order. Each of them returns null, or an error.
class ChainForks {
 public:
  virtual XLA_FFI_Error* Fork() = 0;   // before the first call of the scope
  virtual XLA_FFI_Error* Begin() = 0;  // before the first call of the fork
  virtual XLA_FFI_Error* Join() = 0;   // before the call that waits for the fork
  // What the calls of a fork get instead of the API of the chain.
  virtual const XLA_FFI_Api* api() const = 0;

 protected:
  ~ChainForks() = default;
};

// Creates an error with the name of the chain.
inline XLA_FFI_Error* ChainError(const XLA_FFI_Api* api, XLA_FFI_Error_Code code,
                                 const std::string& what) {
  const std::string message = "nvfp4 call chain: " + what;
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message.c_str();
  args.errc = code;
  return api->XLA_FFI_Error_Create(&args);
}

enum class BufferPlace : int64_t { kOperand = 0, kResult = 1, kScratch = 2 };

// One run of a chain. Methods that return a pointer to an error return null if there is none.
class CallChain {
 public:
  // Without `forks`, all calls run in order.
  CallChain(XLA_FFI_CallFrame* frame, const std::vector<NamedHandler>& handlers, ChainForks* forks)
      : frame_(*frame), handlers_(handlers), forks_(forks) {}

  XLA_FFI_Error* Run() {
    XLA_FFI_Error* error = RunCalls();
    if (place_ != Place::kForked) return error;
    // A fork that is not joined would leave a CUDA graph incomplete, and work that nothing waits
    // for. The first error says more than one of the join.
    XLA_FFI_Error* other = forks_->Join();
    if (error == nullptr && other == nullptr) return Invalid("no call waits for the last fork");
    if (error == nullptr) return other;
    Destroy(other);
    return error;
  }

 private:
  // The numbers of `buffers` that have not been read.
  struct Numbers {
    const int64_t* next;
    const int64_t* end;

    bool Has(int64_t count) const { return count >= 0 && count <= end - next; }
    int64_t Take() { return *next++; }
  };

  // Where the calls that have run end.
  enum class Place { kOutside, kScope, kForked };

  XLA_FFI_Error* RunCalls() {
    const XLA_FFI_Attrs& attrs = frame_.attrs;
    RunningChain next;
    next.frame = &frame_;
    next.earlier = &earlier_;
    if (attrs.size % 3 != 0) return Invalid("expected three attributes for each call");
    for (int64_t i = 0; i < attrs.size; i += 3) {  // the names are sorted
      if (attrs.types[i] != XLA_FFI_AttrType_DICTIONARY ||
          attrs.types[i + 1] != XLA_FFI_AttrType_ARRAY ||
          attrs.types[i + 2] != XLA_FFI_AttrType_STRING) {
        return Invalid("expected a dictionary, an array and a string for each call");
      }
      const auto* own = static_cast<const XLA_FFI_Attrs*>(attrs.attrs[i]);
      const auto* buffers = static_cast<const XLA_FFI_Array*>(attrs.attrs[i + 1]);
      const auto* target = static_cast<const XLA_FFI_ByteSpan*>(attrs.attrs[i + 2]);
      running_chain = next;
      XLA_FFI_Error* error = RunCall({target->ptr, target->len}, *own, *buffers);
      const RunningChain ran = std::exchange(running_chain, {});
      if (error != nullptr) return error;
      if (ran.work.has_value() && !ran.fuses) {
        return Invalid(std::string(target->ptr, target->len) +
                       " does not do the work that is left to it");
      }
      next.work = ran.work;
      if (ran.work.has_value() && !ran.has_launched) {  // what precedes it precedes the next one
        next.is_first = ran.is_first;
        next.preceding = ran.preceding;
        continue;
      }
      next.is_first = false;
      next.preceding = ran.starts_next ? std::vector<ByteRange>() : written_;
      earlier_.insert(earlier_.end(), written_.begin(), written_.end());
      written_.clear();
    }
    return next.work.has_value() ? Invalid("no call does the work of the last one") : nullptr;
  }

  // Does what the flags of the next call ask for.
  XLA_FFI_Error* Advance(int64_t flags) {
    const bool ends = (flags & kJoinFlag) != 0, forks = (flags & kForkFlag) != 0;
    const bool inside = (flags & kForkedFlag) != 0;
    const bool was_inside = place_ == Place::kForked;
    if (ends) {
      if (!was_inside || inside) return Invalid("a call waits for a fork that does not end");
      place_ = Place::kOutside;
      if (XLA_FFI_Error* error = forks_->Join()) return error;
    }
    if (forks) {
      if (place_ != Place::kOutside || inside) return Invalid("a fork inside of a fork");
      if (XLA_FFI_Error* error = forks_->Fork()) return error;
      place_ = Place::kScope;
    }
    if (inside && place_ == Place::kScope) {
      if (XLA_FFI_Error* error = forks_->Begin()) return error;
      place_ = Place::kForked;
    }
    if (inside == (place_ == Place::kForked)) return nullptr;
    return Invalid("a forked call without a fork, or without a call that waits for it");
  }

  XLA_FFI_Error* RunCall(std::string_view target, const XLA_FFI_Attrs& attrs,
                         const XLA_FFI_Array& array) {
    XLA_FFI_Handler* handler = nullptr;
    for (const NamedHandler& known : handlers_) {
      if (known.name == target) handler = known.handler;
    }
    if (handler == nullptr) return Invalid("unknown target " + std::string(target));
    const auto* data = static_cast<const int64_t*>(array.data);
    Numbers numbers = {data, data + array.size};
    if (array.dtype != XLA_FFI_DataType_S64 || !numbers.Has(3)) {
      return Invalid("expected int64 numbers for the buffers of " + std::string(target));
    }
    const int64_t num_operands = numbers.Take(), num_results = numbers.Take();
    const int64_t flags = numbers.Take();
    // Each buffer takes four numbers or more, so that these bounds also keep the sum small.
    if (!numbers.Has(num_operands) || !numbers.Has(num_results)) return WrongBuffers(target);
    std::vector<XLA_FFI_Buffer> buffers(num_operands + num_results);
    std::vector<void*> addresses;
    for (XLA_FFI_Buffer& buffer : buffers) {
      if (!FindBuffer(&numbers, &buffer)) return WrongBuffers(target);
      addresses.push_back(&buffer);
    }
    std::vector<XLA_FFI_ArgType> operand_types(num_operands, XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(num_results, XLA_FFI_RetType_BUFFER);
    if (forks_ != nullptr) {
      const Place before = place_;
      if (XLA_FFI_Error* error = Advance(flags)) return error;
      if (place_ != before || (flags & (kForkFlag | kJoinFlag)) != 0) {
        running_chain.preceding.clear();  // it may have run on another stream
      }
    }
    running_chain.fuses = (flags & kFuseFlag) != 0;
    for (int64_t i = num_operands; i < num_operands + num_results; ++i) {
      const auto* data = static_cast<const char*>(buffers[i].data);
      written_.push_back({data, data + BytesOf(buffers[i])});
    }
    XLA_FFI_CallFrame call = frame_;
    if (place_ == Place::kForked) call.api = forks_->api();
    call.future = nullptr;
    call.attrs = attrs;
    call.args.size = num_operands;
    call.args.types = operand_types.data();
    call.args.args = addresses.data();
    call.rets.size = num_results;
    call.rets.types = result_types.data();
    call.rets.rets = addresses.data() + num_operands;
    return handler(&call);
  }

  // Reads a buffer of a call. Returns whether it exists, and lies inside of the memory at its
  // place.
  bool FindBuffer(Numbers* numbers, XLA_FFI_Buffer* buffer) const {
    if (!numbers->Has(4)) return false;
    const auto place = static_cast<BufferPlace>(numbers->Take());
    const int64_t index = numbers->Take();
    const auto dtype = static_cast<XLA_FFI_DataType>(numbers->Take());
    const int64_t rank = numbers->Take();
    if (!numbers->Has(rank) || index < 0) return false;
    const xla::ffi::Span<const int64_t> dims(numbers->next, rank);
    numbers->next += rank;
    int64_t bytes =
        static_cast<int64_t>(xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(dtype)));
    for (const int64_t extent : dims) {
      if (extent < 0 || (extent != 0 && bytes > INT64_MAX / extent)) return false;
      bytes *= extent;
    }
    const bool in_operands = place == BufferPlace::kOperand;
    const int64_t count = in_operands ? frame_.args.size : frame_.rets.size;
    const int64_t own = place == BufferPlace::kScratch ? count - 1 : index;
    if (own < 0 || own >= count) return false;
    const XLA_FFI_Buffer& memory = *static_cast<const XLA_FFI_Buffer*>(
        in_operands ? frame_.args.args[own] : frame_.rets.rets[own]);
    const int64_t offset = place == BufferPlace::kScratch ? index : 0;
    const int64_t room = BytesOf(memory) - offset;
    // Reshaped operands have the size of the whole memory, so that nothing is misread.
    if (place == BufferPlace::kScratch ? bytes > room : bytes != room) return false;
    *buffer = memory;
    buffer->dtype = dtype;
    buffer->data = static_cast<char*>(memory.data) + offset;
    buffer->rank = rank;
    buffer->dims = const_cast<int64_t*>(dims.begin());
    return true;
  }

  static int64_t BytesOf(const XLA_FFI_Buffer& buffer) {
    auto bytes =
        static_cast<int64_t>(xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(buffer.dtype)));
    for (int64_t i = 0; i < buffer.rank; ++i) bytes *= buffer.dims[i];
    return bytes;
  }

  XLA_FFI_Error* WrongBuffers(std::string_view target) const {
    return Invalid("the buffers of " + std::string(target) + " do not fit those of the chain");
  }

  XLA_FFI_Error* Invalid(const std::string& what) const {
    return ChainError(frame_.api, XLA_FFI_Error_Code_INVALID_ARGUMENT, what);
  }

  void Destroy(XLA_FFI_Error* error) const {
    if (error == nullptr) return;
    XLA_FFI_Error_Destroy_Args args = {};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    frame_.api->XLA_FFI_Error_Destroy(&args);
  }

  const XLA_FFI_CallFrame& frame_;
  const std::vector<NamedHandler>& handlers_;
  ChainForks* const forks_;
  Place place_ = Place::kOutside;
  std::vector<ByteRange> earlier_;  // written by all calls before these
  std::vector<ByteRange> written_;  // by the last call, and by those that left all work to it
};

// The body of a handler that runs a chain. XLA asks a handler for its metadata, such as whether a
// CUDA graph can record it, with an extension of the frame. The first of `handlers` answers for all
// of them.
inline XLA_FFI_Error* RunCallChain(XLA_FFI_CallFrame* frame,
                                   const std::vector<NamedHandler>& handlers,
                                   ChainForks* forks = nullptr) {
  const auto* extension = frame->extension_start;  // the name of the type depends on the version
  if (extension != nullptr && extension->type == XLA_FFI_Extension_Metadata) {
    return handlers.front().handler(frame);
  }
  return CallChain(frame, handlers, forks).Run();
}

}  // namespace nvfp4
