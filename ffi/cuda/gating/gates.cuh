// The gate of a row: what its factor is rounded to, and its sum if a linear layer computes it.
//
// Kernels that share this have the same bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/epilogues/activations.cuh"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {

constexpr int kLinearThreads = 256;  // each has its own part of the sum of a linear gate

// Values that a thread loads and stores at once.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Piece {
  T values[kWidth];
};

// The pieces of the operands of a gate that a thread loads before it multiplies.
template <typename T, int kWidth>
struct GatePieces {
  static constexpr int kAhead = 2;
  Piece<T, kWidth> input[kAhead], weight[kAhead];

  // Loads the pieces `first`, `first` + kLinearThreads and so on. Those past the end are zeros.
  __device__ __forceinline__ void Load(const void* inputs, const void* weights, uint32_t first,
                                       uint32_t count) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t at = first + i * kLinearThreads;
      input[i] = weight[i] = {};
      if (at >= count) continue;
      input[i] = static_cast<const Piece<T, kWidth>*>(inputs)[at];
      weight[i] = static_cast<const Piece<T, kWidth>*>(weights)[at];
    }
  }

  __device__ __forceinline__ float Multiply(float sum) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum += ToFloat(input[i].values[j]) * ToFloat(weight[i].values[j]);
      }
    }
    return sum;
  }
};

template <typename T>
__device__ __forceinline__ float Round(float value) {
  return ToFloat(FromFloat<T>(value));
}

// Returns the factor of a gate.
template <typename T>
__device__ __forceinline__ float GateFactor(float gate) {
  return Round<T>(Sigmoid(gate));
}

}  // namespace nvfp4
