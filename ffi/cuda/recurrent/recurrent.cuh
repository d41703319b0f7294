// What the decoding steps of recurrent mixers share: their convolution, and small functions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/epilogues/activations.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {

// A token at this position or a later one is padding, which changes no state. The number is that of
// ops/positions.py.
constexpr int32_t kPaddingPosition = 1 << 30;

__device__ __forceinline__ float Silu(float value) { return value * Sigmoid(value); }

__device__ __forceinline__ float Softplus(float value) {
  return fmaxf(value, 0.0f) + log1pf(expf(-fabsf(value)));
}

__device__ __forceinline__ float ReciprocalRoot(float value) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(value);
#else
  return 1.0f / sqrtf(value);
#endif
}

__device__ __forceinline__ float SumOfWarp(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// The newest inputs of a convolution that a thread holds in registers. A convolution with more taps
// reads the earlier inputs one after the other.
constexpr int kWindow = 4;

// A short causal convolution for the tokens of one row. Each channel has `taps` - 1 past inputs,
// the oldest first.
template <typename T>
struct Convolution {
  T* past;               // [taps - 1, channels]
  const float* weights;  // [channels, taps]; the last one is that of the newest input
  int32_t channels, taps;

  __device__ __forceinline__ T* Past(int slot, int32_t channel) const {
    return past + static_cast<int64_t>(slot) * channels + channel;
  }
};

// The newest inputs of a channel, the newest one first, and their weights.
template <typename T>
struct Window {
  T inputs[kWindow];
  float weights[kWindow];
};

template <typename T>
__device__ __forceinline__ Window<T> LoadWindow(const Convolution<T>& c, int32_t channel,
                                                T newest) {
  const float* last = c.weights + static_cast<int64_t>(channel) * c.taps + c.taps - 1;
  Window<T> window = {{newest}, {*last}};
#pragma unroll
  for (int back = 1; back < kWindow; ++back) {
    const bool exists = back < c.taps;
    window.inputs[back] = exists ? *c.Past(c.taps - 1 - back, channel) : FromFloat<T>(0.0f);
    window.weights[back] = exists ? last[-back] : 0.0f;
  }
  return window;
}

// Prefetches what LoadWindow reads.
template <typename T>
__device__ __forceinline__ void PrefetchWindow(const Convolution<T>& c, int32_t channel) {
  PrefetchLine(c.weights + static_cast<int64_t>(channel) * c.taps);
#pragma unroll
  for (int back = 1; back < kWindow; ++back) {
    if (back < c.taps) PrefetchLine(c.Past(c.taps - 1 - back, channel));
  }
}

// Returns the sum over all taps, from the oldest on.
template <typename T>
__device__ __forceinline__ float Convolve(const Convolution<T>& c, int32_t channel,
                                          const Window<T>& window) {
  float sum = 0.0f;
#pragma unroll 1
  for (int tap = 0; tap < c.taps - kWindow; ++tap) {
    sum += ToFloat(*c.Past(tap, channel)) * c.weights[static_cast<int64_t>(channel) * c.taps + tap];
  }
#pragma unroll
  for (int back = kWindow - 1; back >= 0; --back) {
    sum += ToFloat(window.inputs[back]) * window.weights[back];
  }
  return sum;
}

// Moves the past of a channel on by one token. No other thread may still have to read it.
template <typename T>
__device__ __forceinline__ void Advance(const Convolution<T>& c, int32_t channel,
                                        const Window<T>& window) {
#pragma unroll 1
  for (int slot = 0; slot < c.taps - kWindow; ++slot) {
    *c.Past(slot, channel) = *c.Past(slot + 1, channel);
  }
#pragma unroll
  for (int back = kWindow - 2; back >= 0; --back) {
    if (back < c.taps - 1) *c.Past(c.taps - 2 - back, channel) = window.inputs[back];
  }
}

// Where a kernel on compute capability 9.0 or later was launched in clusters, these two functions
// are a barrier of the cluster in two halves. Elsewhere they do nothing. The first half orders no
// memory: what a thread has loaded and used before it is complete, and a fence would wait for the
// loads of the state.
__device__ __forceinline__ void ArriveAtCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

}  // namespace nvfp4
