// Combine: y[t] = sum of w[t, j] * d[t, j] over j in order, one token's outputs of its experts.
//
// Bound by: reading d. A thread takes eight columns of a token. Test: test_cuda_kernel.py.
#include "cuda/epilogues/combine.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;   // 16-bit elements of 16 bytes
constexpr int kChoices = 8;  // of a token, loaded at once: one after the other they would wait

// The places in `down` and weights of choices `first` to first + kChoices - 1 of a token; -1 for
// those that are not routed.
struct Choices {
  int32_t slots[kChoices];
  float weights[kChoices];
};

__device__ __forceinline__ Choices LoadChoices(const CombineRows& p, int32_t token, int first) {
  Choices choices;
#pragma unroll
  for (int j = 0; j < kChoices; ++j) {
    const int32_t slot = token * p.top_k + first + j;
    const int32_t expert = first + j < p.top_k ? p.expert_ids[slot] : -1;
    const bool routed = expert >= 0 && expert < p.num_experts;
    choices.slots[j] = routed ? slot : -1;
    choices.weights[j] = routed && p.weighted ? p.expert_weights[slot] : 1.0f;
  }
  return choices;
}

// Eight columns of a token for each thread; h is a multiple of 16.
template <typename T>
__global__ void __launch_bounds__(kThreads) Combine(const CombineRows p) {
  const int32_t vectors = p.h / kVector;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.t * vectors) return;
  const auto token = static_cast<int32_t>(index / vectors);
  const int64_t column = index % vectors * kVector;
  Choices choices = LoadChoices(p, token, 0);  // older than the kernel before this one
#if __CUDA_ARCH__ >= 900
  WaitForPrecedingKernel();
#endif
  const T* down = static_cast<const T*>(p.down) + column;
  float sums[kVector] = {};
  for (int first = 0; first < p.top_k; first += kChoices) {
    if (first > 0) choices = LoadChoices(p, token, first);
    uint4 loaded[kChoices];
#pragma unroll
    for (int j = 0; j < kChoices; ++j) {
      if (choices.slots[j] < 0) continue;
      loaded[j] = __ldcs(
          reinterpret_cast<const uint4*>(down + static_cast<int64_t>(choices.slots[j]) * p.h));
    }
#pragma unroll
    for (int j = 0; j < kChoices; ++j) {
      if (choices.slots[j] < 0) continue;
      T values[kVector];
      *reinterpret_cast<uint4*>(values) = loaded[j];
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += choices.weights[j] * ToFloat(values[i]);
    }
  }
  T values[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = FromFloat<T>(sums[i]);
  *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.h + column) =
      *reinterpret_cast<uint4*>(values);
}

template <typename T>
cudaError_t LaunchCombineOf(cudaStream_t stream, const CombineRows& p) {
  const int64_t blocks = CeilDiv(p.t * (p.h / kVector), kThreads);
  return LaunchWide(stream, dim3(static_cast<unsigned>(blocks)), kThreads, 0, /*overlaps=*/true,
                    Combine<T>, p);
}

}  // namespace

cudaError_t LaunchCombine(cudaStream_t stream, DataType type, const CombineRows& rows) {
  return type == DataType::kF16 ? LaunchCombineOf<__half>(stream, rows)
                                : LaunchCombineOf<__nv_bfloat16>(stream, rows);
}

}  // namespace nvfp4
