// Combines 16-bit outputs, for the layers that run on engines; see combine.cuh.
#include "cuda/epilogues/combine.cuh"

namespace nvfp4 {
namespace {

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const CombineTokens& tokens, const void* outputs) {
  return LaunchCombine<T>(stream, tokens,
                          FinishedOutputs<T>{static_cast<const T*>(outputs), tokens.h},
                          /*overlaps=*/true);
}

}  // namespace

cudaError_t LaunchCombineOutputs(cudaStream_t stream, DataType type, const CombineTokens& tokens,
                                 const void* outputs) {
  return type == DataType::kF16 ? LaunchOf<__half>(stream, tokens, outputs)
                                : LaunchOf<__nv_bfloat16>(stream, tokens, outputs);
}

}  // namespace nvfp4
