// Combines 16-bit outputs, for the layers that run on engines; see combine.cuh.
//
// Few tokens take Combine, which may start while GEMM 2 still runs. Many tokens take CombineMany.
// There, each thread has 16 bytes of up to kChoices rows in flight, and these bytes pass through
// the L1 cache. A kernel that overlaps wants all memory of a multiprocessor as shared memory, which
// leaves 28 KiB of L1 cache on Hopper: less than its threads request. CombineMany therefore does
// not overlap, and asks for the L1 cache. Each warp reads ids and weights once, and not each
// thread. Both kernels compute the same sums in the same order.
#include "cuda/epilogues/combine.cuh"

namespace nvfp4 {
namespace {

constexpr int kManyThreads = 128;

// A block handles kManyThreads vectors of a token, which has `blocks` blocks.
template <typename T>
__global__ void __launch_bounds__(kManyThreads, 8)
    CombineMany(const CombineTokens p, const T* outputs, uint32_t blocks) {
  constexpr int kVector = 16 / sizeof(T);
  StartNextKernel();  // allowed at once: this kernel does not overlap
  const uint32_t token = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const auto column = static_cast<int32_t>(part * kManyThreads + threadIdx.x) * kVector;
  const bool inside = column < p.h;
  const T* row = outputs + static_cast<int64_t>(token) * p.top_k * p.h + column;
  float sums[kVector] = {};
  for (int first = 0; first < p.top_k; first += kChoices, row += kChoices * p.h) {
    AddOutputs<T>(WarpChoices(p, token, first), row, p.h, inside, sums);
  }
  if (!inside) return;
  T rounded[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) rounded[i] = FromFloat<T>(sums[i]);
  T* y = static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.h + column;
  *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4*>(rounded);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const CombineTokens& tokens, const void* outputs) {
  constexpr int64_t kVector = 16 / sizeof(T);
  const auto* values = static_cast<const T*>(outputs);
  if (!CombinesMany(tokens.t, tokens.h)) {
    return LaunchCombine<T>(stream, tokens, FinishedOutputs<T>{values, tokens.h},
                            /*overlaps=*/true);
  }
  const auto parts = static_cast<unsigned>(CeilDiv(tokens.h / kVector, kManyThreads));
  const dim3 grid(static_cast<unsigned>(tokens.t) * parts);
  return LaunchCached(stream, grid, kManyThreads, CombineMany<T>, tokens, values, parts);
}

}  // namespace

cudaError_t LaunchCombineOutputs(cudaStream_t stream, DataType type, const CombineTokens& tokens,
                                 const void* outputs) {
  return type == DataType::kF16 ? LaunchOf<__half>(stream, tokens, outputs)
                                : LaunchOf<__nv_bfloat16>(stream, tokens, outputs);
}

}  // namespace nvfp4
