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

// Returns the slot of the states from which a row goes on. A wrong number reads no other row.
__device__ __forceinline__ int32_t KeptSlot(const int32_t* kept, int64_t row, int32_t w) {
  return kept == nullptr ? 0 : max(0, min(kept[row], w - 1));
}

// A short causal convolution for the tokens of one row. Each channel has `taps` - 1 past inputs,
// the oldest first.
template <typename T>
struct Convolution {
  T* slots;              // [w, taps - 1, channels]: the past inputs in each slot
  const float* weights;  // [channels, taps]; the last one is that of the newest input
  int32_t channels, taps;
  int32_t kept;  // the slot before the first token

  // Returns the place of input `index` of a slot.
  __device__ __forceinline__ T* Slot(int slot, int index, int32_t channel) const {
    return slots + (static_cast<int64_t>(slot) * (taps - 1) + index) * channels + channel;
  }
  __device__ __forceinline__ T* Past(int index, int32_t channel) const {
    return Slot(kept, index, channel);
  }
};

// The inputs of one channel in the tokens of a row.
template <typename T>
struct TokenInputs {
  const T* first;
  int32_t stride;  // from a token to the next one
};

// Returns an input of a channel: `index` counts from the oldest past one on, over all tokens.
template <typename T>
__device__ __forceinline__ T InputAt(const Convolution<T>& c, int32_t channel,
                                     const TokenInputs<T>& tokens, int index) {
  const int token = index - (c.taps - 1);
  return token < 0 ? *c.Past(index, channel)
                   : tokens.first[static_cast<int64_t>(token) * tokens.stride];
}

// The newest inputs of a channel, the newest one first, and their weights.
template <typename T>
struct Window {
  T inputs[kWindow];
  float weights[kWindow];
};

// Returns the window of a token. `earlier(index)` returns an input before it: `index` counts from
// the oldest one that the token needs.
template <typename T, typename Earlier>
__device__ __forceinline__ Window<T> LoadWindow(const Convolution<T>& c, int32_t channel, T newest,
                                                const Earlier& earlier) {
  const float* last = c.weights + static_cast<int64_t>(channel) * c.taps + c.taps - 1;
  Window<T> window = {{newest}, {*last}};
#pragma unroll
  for (int back = 1; back < kWindow; ++back) {
    const bool exists = back < c.taps;
    window.inputs[back] = exists ? earlier(c.taps - 1 - back) : FromFloat<T>(0.0f);
    window.weights[back] = exists ? last[-back] : 0.0f;
  }
  return window;
}

// Returns the window of the first token.
template <typename T>
__device__ __forceinline__ Window<T> LoadWindow(const Convolution<T>& c, int32_t channel,
                                                T newest) {
  return LoadWindow(c, channel, newest, [&](int index) { return *c.Past(index, channel); });
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

// Returns the sum over all taps, from the oldest on. `earlier(tap)` returns an input that is not in
// the window.
template <typename T, typename Earlier>
__device__ __forceinline__ float Convolve(const Convolution<T>& c, int32_t channel,
                                          const Window<T>& window, const Earlier& earlier) {
  float sum = 0.0f;
#pragma unroll 1
  for (int tap = 0; tap < c.taps - kWindow; ++tap) {
    sum += ToFloat(earlier(tap)) * c.weights[static_cast<int64_t>(channel) * c.taps + tap];
  }
#pragma unroll
  for (int back = kWindow - 1; back >= 0; --back) {
    sum += ToFloat(window.inputs[back]) * window.weights[back];
  }
  return sum;
}

// Moves the past of a channel on by one token, in place. No other thread may still have to read it.
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

// Makes room for the input of the next token.
template <typename T>
__device__ __forceinline__ void Shift(Window<T>& window) {
#pragma unroll
  for (int back = kWindow - 1; back > 0; --back) window.inputs[back] = window.inputs[back - 1];
}

// Writes the past of a channel after each of t tokens to slots 0 to t - 1. Tokens from `present` on
// are padding. No other thread may still have to read the past. The slot that has it comes last.
template <typename T>
__device__ __forceinline__ void WriteSlots(const Convolution<T>& c, int32_t channel,
                                           const TokenInputs<T>& tokens, int t, int present) {
  const auto write = [&](int slot) {
    const int first = min(slot + 1, present);
#pragma unroll 1
    for (int i = 0; i < c.taps - 1; ++i) {
      *c.Slot(slot, i, channel) = InputAt(c, channel, tokens, first + i);
    }
  };
#pragma unroll 1
  for (int slot = 0; slot < t; ++slot) {
    if (slot != c.kept) write(slot);
  }
  if (c.kept < t) write(c.kept);
}

// Returns how many tokens of a row are no padding, which follows all others.
__device__ __forceinline__ int CountPresent(const int32_t* positions, int64_t row, int t) {
  int count = 0;
#pragma unroll 1
  for (int token = 0; token < t; ++token) count += positions[row * t + token] < kPaddingPosition;
  return count;
}

}  // namespace nvfp4
