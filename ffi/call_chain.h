// Runs several calls of an extension in order, as one FFI call. Only the bindings include this.
//
// XLA records each custom call of a CUDA graph as a graph of its own, whose kernels start when all
// kernels of the calls before it have ended. Inside one call, a kernel can start while the kernel
// before it still runs (LaunchClusters in cuda/launch_kernel.cuh).
//
// backends/call_chain.py writes the call. For call i of the chain it has three attributes, whose
// names begin with the same number:
//
// * `attributes`: the attributes of the call, a dictionary.
// * `buffers`: int64 numbers. First come the number of operands and the number of results. Each of
//   them then has its place, its index, its element type, its number of dimensions, and the
//   dimensions.
// * `target`: the name of the FFI target.
//
// A buffer lies at one of three places: in an operand of the chain, in a result of the chain, or in
// the chain's last result. The last result is memory for values that only the chain itself reads,
// and the index is then an offset in bytes. Element types are those of XLA_FFI_DataType.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

struct NamedHandler {
  std::string_view name;
  XLA_FFI_Handler* handler;
};

// The calls that this thread runs as a chain, as far as kernels that overlap may know them. Outside
// of a chain there is nothing to know.
struct RunningChain {
  const XLA_FFI_CallFrame* frame = nullptr;  // of the chain
  bool is_first = true;                      // whether its first call runs

  // Whether the kernel before this call belongs to the chain.
  bool Follows() const { return frame != nullptr && !is_first; }

  // Whether an operand of this call was written before the preceding kernel started: that kernel
  // belongs to the chain, and no call of the chain writes the operand. A kernel may read it before
  // it waits.
  bool IsOlder(const void* operand) const {
    if (!Follows()) return false;
    const auto has = [&](void* const* buffers, int64_t count) {
      return std::any_of(buffers, buffers + count, [&](const void* buffer) {
        return static_cast<const XLA_FFI_Buffer*>(buffer)->data == operand;
      });
    };
    return has(frame->args.args, frame->args.size) && !has(frame->rets.rets, frame->rets.size);
  }
};
inline thread_local RunningChain running_chain;

enum class BufferPlace : int64_t { kOperand = 0, kResult = 1, kScratch = 2 };

// One run of a chain. Each method returns null, or an error.
class CallChain {
 public:
  CallChain(XLA_FFI_CallFrame* frame, const std::vector<NamedHandler>& handlers)
      : frame_(*frame), handlers_(handlers) {}

  XLA_FFI_Error* Run() const {
    const XLA_FFI_Attrs& attrs = frame_.attrs;
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
      running_chain = {&frame_, i == 0};
      XLA_FFI_Error* error = RunCall({target->ptr, target->len}, *own, *buffers);
      running_chain = {};
      if (error != nullptr) return error;
    }
    return nullptr;
  }

 private:
  // The numbers of `buffers` that have not been read.
  struct Numbers {
    const int64_t* next;
    const int64_t* end;

    bool Has(int64_t count) const { return count >= 0 && count <= end - next; }
    int64_t Take() { return *next++; }
  };

  XLA_FFI_Error* RunCall(std::string_view target, const XLA_FFI_Attrs& attrs,
                         const XLA_FFI_Array& array) const {
    XLA_FFI_Handler* handler = nullptr;
    for (const NamedHandler& known : handlers_) {
      if (known.name == target) handler = known.handler;
    }
    if (handler == nullptr) return Invalid("unknown target " + std::string(target));
    const auto* data = static_cast<const int64_t*>(array.data);
    Numbers numbers = {data, data + array.size};
    if (array.dtype != XLA_FFI_DataType_S64 || !numbers.Has(2)) {
      return Invalid("expected int64 numbers for the buffers of " + std::string(target));
    }
    const int64_t num_operands = numbers.Take(), num_results = numbers.Take();
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
    XLA_FFI_CallFrame call = frame_;
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
    const std::string message = "nvfp4 call chain: " + what;
    XLA_FFI_Error_Create_Args args = {};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = message.c_str();
    args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
    return frame_.api->XLA_FFI_Error_Create(&args);
  }

  const XLA_FFI_CallFrame& frame_;
  const std::vector<NamedHandler>& handlers_;
};

// The body of a handler that runs a chain. XLA asks a handler for its metadata, such as whether a
// CUDA graph can record it, with an extension of the frame. The first of `handlers` answers for all
// of them.
inline XLA_FFI_Error* RunCallChain(XLA_FFI_CallFrame* frame,
                                   const std::vector<NamedHandler>& handlers) {
  const auto* extension = frame->extension_start;  // the name of the type depends on the version
  if (extension != nullptr && extension->type == XLA_FFI_Extension_Metadata) {
    return handlers.front().handler(frame);
  }
  return CallChain(frame, handlers).Run();
}

}  // namespace nvfp4
