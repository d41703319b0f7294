// The last step of an expert layer: y[t] = sum over j, in order, of weight[t, j] * output(t, j).
// output(t, j) is the output of expert j of token t. Sums are float32.
//
// The source of the outputs of GEMM 2 is a template parameter, a struct with
//   Value, stride            the type of the outputs, and the distance of rows in memory
//   Row(slot)                returns the row of a slot, where slot = t * top_k + j
//   Values()                 returns the first row
//   Scale(row, expert)       returns a scale, which is loaded together with the values
//   Output(value, scale, expert, column)
// Outputs of slots that are not routed are never read, because nobody wrote them.
//
// Bottleneck: reading the outputs. A thread reads 16 bytes of each row: 8 columns of 16 bits, or 4
// of float32. Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"
#include "shapes.h"

namespace nvfp4 {

// The outputs [t, top_k, h] of GEMM 2, which has applied scales and bias.
template <typename T>
struct FinishedOutputs {
  using Value = T;
  const T* values;
  int64_t stride;

  __device__ __forceinline__ const T* Values() const { return values; }
  __device__ __forceinline__ int32_t Row(int32_t slot) const { return slot; }
  __device__ __forceinline__ float Scale(int64_t, int32_t) const { return 1.0f; }
  __device__ __forceinline__ float Output(T value, float, int32_t, int32_t) const {
    return ToFloat(value);
  }
};

constexpr int kCombineThreads = 256;
constexpr int kChoices = 8;  // choices of a token that are loaded at once, so that loads overlap

// Choices `first` to first + kChoices - 1 of a token. The row of a choice that is not routed is -1.
struct Choices {
  int32_t experts[kChoices];
  int32_t rows[kChoices];
  float weights[kChoices];
};

template <typename Source>
__device__ __forceinline__ Choices LoadChoices(const CombineTokens& p, const Source& source,
                                               int32_t token, int first) {
  Choices choices;
#pragma unroll
  for (int j = 0; j < kChoices; ++j) {
    const int32_t slot = token * p.top_k + first + j;
    const int32_t expert = first + j < p.top_k ? p.expert_ids[slot] : -1;
    const bool routed = expert >= 0 && expert < p.num_experts;
    choices.experts[j] = expert;
    choices.rows[j] = routed ? source.Row(slot) : -1;
    choices.weights[j] = routed && p.expert_weights != nullptr ? p.expert_weights[slot] : 1.0f;
  }
  return choices;
}

// As Choices, for a whole warp: lane j has choice first + j.
struct WarpChoices {
  unsigned routed;  // bit j tells whether choice first + j is routed
  float weight = 1.0f;

  __device__ __forceinline__ WarpChoices(const CombineTokens& p, int64_t token, int first) {
    const int choice = static_cast<int>(threadIdx.x % 32);
    int32_t expert = -1;
    if (choice < kChoices && first + choice < p.top_k) {
      const int64_t slot = token * p.top_k + first + choice;
      expert = p.expert_ids[slot];
      if (p.expert_weights != nullptr) weight = p.expert_weights[slot];
    }
    routed = __ballot_sync(kAllLanes, expert >= 0 && expert < p.num_experts);
  }
};

// sums += weight * output for these choices, in their order. `row` points to the columns of this
// thread in the output of the first of them. Whole warps call it; threads that are not `inside`
// read nothing.
template <typename T>
__device__ __forceinline__ void AddOutputs(const WarpChoices& choices, const T* row, int32_t stride,
                                           bool inside, float (&sums)[16 / sizeof(T)]) {
  constexpr int kVector = 16 / sizeof(T);
  uint4 loaded[kChoices];
#pragma unroll
  for (int j = 0; j < kChoices; ++j) {
    const bool exists = inside && (choices.routed >> j & 1) != 0;
    if (exists) loaded[j] = __ldcs(reinterpret_cast<const uint4*>(row));
    row += stride;
  }
#pragma unroll
  for (int j = 0; j < kChoices; ++j) {
    const float weight = __shfl_sync(kAllLanes, choices.weight, j);
    if ((choices.routed >> j & 1) == 0) continue;
    T values[kVector];
    *reinterpret_cast<uint4*>(values) = loaded[j];
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += weight * ToFloat(values[i]);
  }
}

// Combines the rows of a token. Each thread handles 16 bytes of each row.
template <typename T, typename Source>
__global__ void __launch_bounds__(kCombineThreads)
    Combine(const CombineTokens p, const Source source) {
  using Value = typename Source::Value;
  constexpr int kVector = 16 / sizeof(Value);
  const int32_t vectors = p.h / kVector;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
  if (index >= p.t * vectors) return;
  const auto token = static_cast<int32_t>(index / vectors);
  const auto column = static_cast<int32_t>(index % vectors) * kVector;
  // If this kernel overlaps, ids, weights and rows are unchanged since the previous kernel, so that
  // loading them need not wait for it.
  Choices choices = LoadChoices(p, source, token, 0);
  WaitForPrecedingKernel();
  StartNextKernel();
  const Value* outputs = source.Values() + column;
  float sums[kVector] = {};
  for (int first = 0; first < p.top_k; first += kChoices) {
    if (first > 0) choices = LoadChoices(p, source, token, first);
    uint4 loaded[kChoices];
    float scales[kChoices];
#pragma unroll
    for (int j = 0; j < kChoices; ++j) {
      if (choices.rows[j] < 0) continue;
      const int64_t row = choices.rows[j];
      loaded[j] = __ldcs(reinterpret_cast<const uint4*>(outputs + row * source.stride));
      scales[j] = source.Scale(row, choices.experts[j]);
    }
#pragma unroll
    for (int j = 0; j < kChoices; ++j) {
      if (choices.rows[j] < 0) continue;
      Value values[kVector];
      *reinterpret_cast<uint4*>(values) = loaded[j];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sums[i] += choices.weights[j] *
                   source.Output(values[i], scales[j], choices.experts[j], column + i);
      }
    }
  }
  T rounded[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) rounded[i] = FromFloat<T>(sums[i]);
  T* y = static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.h + column;
  if constexpr (sizeof(rounded) == sizeof(uint4)) {
    *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4*>(rounded);
  } else {
    static_assert(sizeof(rounded) == sizeof(uint2), "8 or 16 bytes");
    *reinterpret_cast<uint2*>(y) = *reinterpret_cast<uint2*>(rounded);
  }
}

// Launches Combine. If `overlaps` is set, the kernel may start before the one ahead of it in the
// stream has ended. Ids, weights and rows must then be unchanged since that kernel started; only
// the values of `source` may be its results.
template <typename T, typename Source>
cudaError_t LaunchCombine(cudaStream_t stream, const CombineTokens& tokens, const Source& source,
                          bool overlaps) {
  constexpr int64_t kVector = 16 / sizeof(typename Source::Value);
  const int64_t blocks = CeilDiv(tokens.t * (tokens.h / kVector), kCombineThreads);
  return LaunchWide(stream, dim3(static_cast<unsigned>(blocks)), kCombineThreads, 0, overlaps,
                    Combine<T, Source>, tokens, source);
}

// Whether so many tokens are combined that kernels should not overlap; see combine.cu.
inline bool CombinesMany(int64_t tokens, int64_t h) {
  constexpr int64_t kManyBlocks = 4;  // of Combine, for each multiprocessor
  return CeilDiv(tokens * (h / 8), kCombineThreads) >= kManyBlocks * MultiprocessorCount();
}

// Combines outputs [t, top_k, h] of `type`, bf16 or f16. For few tokens, the kernel overlaps with
// the one ahead of it.
cudaError_t LaunchCombineOutputs(cudaStream_t stream, DataType type, const CombineTokens& tokens,
                                 const void* outputs);

}  // namespace nvfp4
