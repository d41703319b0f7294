// What all CUDA targets share: how a handler runs, the errors of launches, and checks of the
// workspace and of chains.

#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "operands.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

// Kernels copy 16 bytes at a time; see launch.h.
inline constexpr size_t kAlignment = 16;

inline ffi::Error FromCuda(cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // otherwise the next call would report this error as its own
  return ffi::Error::Internal(cudaGetErrorString(status));
}

// The body of the handler of a target: reads the operands of `table`, and runs `run` on them.
// Errors of CUDA get the name of the target.
template <typename Run, typename... Values>
ffi::Error Handle(std::string_view target, const Table& table, const Run& run, cudaStream_t stream,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  Values... values) {
  Call operands;
  NVFP4_RETURN_IF_ERROR(operands.Read(table, args, rets, kAlignment));
  const ffi::Error error = run(stream, operands, values...);
  if (error.errc() == ffi::ErrorCode::kInternal) {
    return ffi::Error::Internal(std::string(target) + ": " + error.message());
  }
  if (error.failure() || operands.is_checked()) return error;
  return ffi::Error::Internal(std::string(target) + " does not check its operands");
}

// The target `name`, whose operands are those of `table`. `run` gets the stream, the operands, and
// the attributes, which `attributes` binds, as in `.Attr<float>("eps")`.
//
// kCmdBufferCompatible: handlers only launch kernels, fills and copies, so that a CUDA graph can
// capture them.
#define NVFP4_CUDA_TARGET(name, table, run, attributes)                                     \
  NamedHandler {                                                                            \
    name, +[](XLA_FFI_CallFrame* frame) {                                                   \
      static constexpr Table kTable(table);                                                 \
      static auto* const handler =                                                          \
          ffi::Ffi::Bind()                                                                  \
              .Ctx<ffi::PlatformStream<cudaStream_t>>()                                     \
              .RemainingArgs()                                                              \
              .RemainingRets() attributes                                                   \
              .To(                                                                          \
                  [](cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, \
                     auto... values) {                                                      \
                    return Handle(name, kTable, run, stream, args, rets, values...);        \
                  },                                                                        \
                  {ffi::Traits::kCmdBufferCompatible})                                      \
              .release();                                                                   \
      return handler->Call(frame);                                                          \
    }                                                                                       \
  }

inline ffi::Error ExpectWorkspace(const Call& operands, int64_t bytes) {
  return Expect({AtLeast("workspace, bytes", operands.size("bytes"), bytes)});
}

// Puts an operand where a kernel updates it in place. With input_output_aliases, XLA gives both the
// same memory, and nothing is copied. Under jax.vmap, JAX runs the call in a loop without aliases.
inline ffi::Error PutInPlace(cudaStream_t stream, const Call& operands, std::string_view operand,
                             std::string_view result) {
  const void* source = operands.in<void>(operand);
  if (source == operands.out(result)) return ffi::Error::Success();
  return FromCuda(cudaMemcpyAsync(operands.out(result), source, operands[operand].size_bytes(),
                                  cudaMemcpyDeviceToDevice, stream));
}

// The addresses of an operand.
inline ByteRange RangeOf(const ffi::AnyBuffer& buffer) {
  const auto* data = static_cast<const char*>(buffer.untyped_data());
  return {data, data + buffer.size_bytes()};
}

// Whether these operands, as far as they are given, are unchanged since the previous kernel.
inline bool AreUnchanged(const Call& operands, std::initializer_list<std::string_view> names) {
  return std::all_of(names.begin(), names.end(), [&](std::string_view name) {
    return !operands.has(name) || running_chain.IsUnchanged(RangeOf(operands[name]));
  });
}

// Checks a norm that the preceding call has left to the call that reads its result as x.
inline ffi::Error CheckInputNorm(const InputNorm& norm, const ffi::AnyBuffer& x) {
  if (norm.buffers.y == x.untyped_data()) return ffi::Error::Success();
  return Expected("x", "the result of the norm that is left to this call", "another operand");
}

// Checks a sum over experts that the preceding call has left to the norm that reads it as `added`.
// Such a norm has several rows, so that it leaves no work to the next call itself.
inline ffi::Error CheckInputCombine(const InputCombine& combine, const NormCall& norm,
                                    const ffi::AnyBuffer& added) {
  const bool same = combine.tokens.y == added.untyped_data() && combine.tokens.t == norm.rows &&
                    combine.tokens.h == norm.h && combine.type == norm.type;
  if (same && !running_chain.fuses) return ffi::Error::Success();
  return Expected("added", "the sum over experts that is left to this call", "another operand");
}

// Checks a sum over GPUs that the preceding call has left to the norm that reads it as `added`.
inline ffi::Error CheckInputSum(const AllReduceCall& sum, const NormCall& norm,
                                const ffi::AnyBuffer& added) {
  const bool same = sum.y == added.untyped_data() && sum.type == norm.type &&
                    sum.pieces * kPieceBytes == norm.rows * norm.h * Bytes(norm.type);
  if (same && !running_chain.fuses) return ffi::Error::Success();
  return Expected("added", "the sum over GPUs that is left to this call", "another operand");
}

// Checks a gated sum that the preceding call has left to the norm that reads it as `added`.
template <typename Gated>
ffi::Error CheckInputGated(const Gated& gated, const NormCall& norm, const ffi::AnyBuffer& added) {
  const bool same = gated.y == added.untyped_data() && gated.rows == norm.rows &&
                    gated.columns == norm.h && gated.type == norm.type;
  if (same && !running_chain.fuses) return ffi::Error::Success();
  return Expected("added", "the gated sum that is left to this call", "another operand");
}

}  // namespace nvfp4
