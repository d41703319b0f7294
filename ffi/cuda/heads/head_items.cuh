// The channels of one head in the registers of a warp: its norm, and its rotation by a position.
//
// Each step rounds to the type of the heads, as the jnp expressions of ops/heads.py do.
// Channels i and i + r/2 rotate by position * frequency[i], for i below r/2. The channels from r on
// keep their values.
//
// An item is two words of two channels: those that rotate together, or four neighbors from channel
// r on. Lane l holds items l and 32 + l.
#pragma once

#include "cuda/heads/sine.cuh"
#include "cuda/launch.h"
#include "cuda/norms/normalized.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {

// The items of a lane: where their words begin in a head, and which of them exist and rotate.
template <int kItems>
struct LaneItems {
  int32_t first[kItems], second[kItems];
  bool exist[kItems], rotate[kItems];

  __device__ __forceinline__ LaneItems(const HeadsCall& call, int lane) {
    const int32_t rotated = call.half / 2;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int32_t item = lane + 32 * i;
      exist[i] = item < call.d / 4;
      rotate[i] = item < rotated;
      first[i] = rotate[i] ? 2 * item : 2 * call.half + 4 * (item - rotated);
      second[i] = first[i] + (rotate[i] ? call.half : 2);
    }
  }
};

// The weights of the norm and the frequencies of the items of a lane. They are loaded together with
// the heads, because each load after another would wait for memory again.
template <typename W, int kItems>
struct Factors {
  Word<W> weights[kItems][2];
  float2 frequencies[kItems];

  __device__ __forceinline__ void Load(const W* weight, const float* frequency,
                                       const LaneItems<kItems>& items, int lane) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (weight != nullptr && items.exist[i]) {
        weights[i][0] = *reinterpret_cast<const Word<W>*>(weight + items.first[i]);
        weights[i][1] = *reinterpret_cast<const Word<W>*>(weight + items.second[i]);
      }
      if (items.rotate[i]) {
        frequencies[i] = reinterpret_cast<const float2*>(frequency)[lane + 32 * i];
      }
    }
  }
};

// The rotation of the items of a lane at one position: of the first pair of channels and of the
// second pair.
template <int kItems>
struct Turns {
  SineCosine x[kItems], y[kItems];

  __device__ __forceinline__ void Compute(const float2 (&frequencies)[kItems],
                                          const LaneItems<kItems>& items, int32_t position,
                                          float scale) {
    const auto at = static_cast<float>(position);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items.rotate[i]) continue;
      const SineCosine first = SineAndCosine(at * frequencies[i].x);
      const SineCosine second = SineAndCosine(at * frequencies[i].y);
      x[i] = {first.sine * scale, first.cosine * scale};
      y[i] = {second.sine * scale, second.cosine * scale};
    }
  }
};

// The channels of the items of a lane, in the type of the heads. They are 0 for items that do not
// exist.
template <typename T, int kItems>
struct Head {
  Word<T> words[kItems][2];

  __device__ __forceinline__ void Load(const T* source, const LaneItems<kItems>& items) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      words[i][0] = words[i][1] = FromFloats<T>(0.0f, 0.0f);
      if (!items.exist[i]) continue;
      words[i][0] = *reinterpret_cast<const Word<T>*>(source + items.first[i]);
      words[i][1] = *reinterpret_cast<const Word<T>*>(source + items.second[i]);
    }
  }

  __device__ __forceinline__ void Store(T* target, const LaneItems<kItems>& items) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items.exist[i]) continue;
      *reinterpret_cast<Word<T>*>(target + items.first[i]) = words[i][0];
      *reinterpret_cast<Word<T>*>(target + items.second[i]) = words[i][1];
    }
  }

  __device__ __forceinline__ void StoreE4M3(uint8_t* target, const LaneItems<kItems>& items,
                                            const E4M3Rounding& rounding) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items.exist[i]) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 values = ToFloats(words[i][j]);
        const uint32_t low = EncodeE4M3(values.x, rounding), high = EncodeE4M3(values.y, rounding);
        const int32_t first = j == 0 ? items.first[i] : items.second[i];  // an even number
        *reinterpret_cast<uint16_t*>(target + first) = static_cast<uint16_t>(low | high << 8);
      }
    }
  }

  // Returns the sum of the squares of the channels of this lane.
  __device__ __forceinline__ float Squares() const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 values = ToFloats(words[i][j]);
        squares += values.x * values.x + values.y * values.y;
      }
    }
    return squares;
  }

  // Computes `Normalized` of norms/normalized.cuh.
  template <typename W>
  __device__ __forceinline__ void Scale(const Factors<W, kItems>& factors, float inverse_root,
                                        const LaneItems<kItems>& items) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items.exist[i]) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        words[i][j] =
            NormalizedWord<T, W>(ToFloats(words[i][j]), inverse_root, factors.weights[i][j]);
      }
    }
  }

  template <typename W>
  __device__ __forceinline__ void Normalize(const Factors<W, kItems>& factors,
                                            const HeadsCall& call, const LaneItems<kItems>& items) {
    Scale(factors, InverseRoot(WarpSum(Squares()), call.d, call.eps), items);
  }

  __device__ __forceinline__ void Rotate(const Turns<kItems>& turns,
                                         const LaneItems<kItems>& items) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items.rotate[i]) continue;
      const float2 first = ToFloats(words[i][0]), second = ToFloats(words[i][1]);
      const SineCosine x = turns.x[i], y = turns.y[i];
      words[i][0] = FromFloats<T>(first.x * x.cosine - second.x * x.sine,
                                  first.y * y.cosine - second.y * y.sine);
      words[i][1] = FromFloats<T>(second.x * x.cosine + first.x * x.sine,
                                  second.y * y.cosine + first.y * y.sine);
    }
  }
};

}  // namespace nvfp4
