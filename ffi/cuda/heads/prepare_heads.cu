// Prepares the heads of new tokens for attention, in one launch: norms of query heads and key
// heads, rotation, and the write of keys and values into the cache, which is changed in place.
//
//   qkv [tokens, n + 2m, d] -> q [tokens, n, d], keys and values [b, m, s, d]
//
// With gates, qkv is [tokens, 2n + 2m, d], and the gate of each query head follows it. GateHeads in
// gating/gating.cu reads the gates.
//
// Each step rounds to the type of the heads, as the jnp expressions of backends/heads.py do.
// Channels i and i + r/2 rotate by position * frequency[i], for i below r/2. The channels from r on
// keep their values. Tokens at positions outside of the cache are not written.
//
// Bottleneck: latency for few tokens, memory bandwidth for many. While the preceding kernel still
// runs, weights and frequencies come into the L2 cache. One warp handles a head. An item
// is two words of two channels: those that rotate together, or four neighbors from channel r on.
// Lane l holds items l and 32 + l.
//
// Tests: tests/emulation/test_emulation_heads.py, tests/gpu/test_cuda_heads.py.
#include <cstring>

#include "cuda/heads/sine.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/normalized.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

template <typename T>
struct alignas(2 * sizeof(T)) Word {
  T values[2];
};

// Returns the first channel of both words of an item.
__device__ __forceinline__ int2 ChannelsOf(int item, int half) {
  const int rotated = half / 2;
  if (item < rotated) return make_int2(2 * item, 2 * item + half);
  const int first = 2 * half + 4 * (item - rotated);
  return make_int2(first, first + 2);
}

// The weights of the norm and the frequencies of the items of a lane. They are loaded together with
// the head, because each load after another would wait for memory again.
template <typename W, int kItems>
struct Factors {
  Word<W> weights[kItems][2];
  float2 frequencies[kItems];

  __device__ __forceinline__ void Load(const W* weight, const float* frequency,
                                       const HeadsCall& call, int lane) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = lane + 32 * i;
      const int2 at = ChannelsOf(item, call.half);
      if (weight != nullptr && item < call.d / 4) {
        weights[i][0] = *reinterpret_cast<const Word<W>*>(weight + at.x);
        weights[i][1] = *reinterpret_cast<const Word<W>*>(weight + at.y);
      }
      if (item < call.half / 2) frequencies[i] = reinterpret_cast<const float2*>(frequency)[item];
    }
  }
};

// The four channels of an item: two words, one after the other.
template <typename T, int kItems>
struct Head {
  float values[kItems][4];

  __device__ __forceinline__ void Load(const T* source, const HeadsCall& call, int lane) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = lane + 32 * i;
      Word<T> words[2] = {};
      if (item < call.d / 4) {
        const int2 at = ChannelsOf(item, call.half);
        words[0] = *reinterpret_cast<const Word<T>*>(source + at.x);
        words[1] = *reinterpret_cast<const Word<T>*>(source + at.y);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i][j] = ToFloat(words[j / 2].values[j % 2]);
    }
  }

  __device__ __forceinline__ void Store(T* target, const HeadsCall& call, int lane) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = lane + 32 * i;
      if (item >= call.d / 4) continue;
      const int2 at = ChannelsOf(item, call.half);
      Word<T> words[2];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j / 2].values[j % 2] = FromFloat<T>(values[i][j]);
      *reinterpret_cast<Word<T>*>(target + at.x) = words[0];
      *reinterpret_cast<Word<T>*>(target + at.y) = words[1];
    }
  }

  // The values of items that do not exist are 0 and stay 0.
  template <typename W>
  __device__ __forceinline__ void Normalize(const Factors<W, kItems>& factors,
                                            const HeadsCall& call, int lane) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) squares += values[i][j] * values[i][j];
    }
    const float inverse_root = InverseRoot(WarpSum(squares), call.d, call.eps);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = lane + 32 * i;
      if (item >= call.d / 4) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const W factor = factors.weights[i][j / 2].values[j % 2];
        values[i][j] = ToFloat(Normalized<T>(values[i][j], inverse_root, factor));
      }
    }
  }

  template <typename W>
  __device__ __forceinline__ void Rotate(const Factors<W, kItems>& factors, const HeadsCall& call,
                                         int32_t position, int lane) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = lane + 32 * i;
      if (item >= call.half / 2) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float frequency = j == 0 ? factors.frequencies[i].x : factors.frequencies[i].y;
        const SineCosine turn = SineAndCosine(static_cast<float>(position) * frequency);
        const float sine = turn.sine * call.rotation_scale;
        const float cosine = turn.cosine * call.rotation_scale;
        const float first = values[i][j], second = values[i][j + 2];
        values[i][j] = ToFloat(FromFloat<T>(first * cosine - second * sine));
        values[i][j + 2] = ToFloat(FromFloat<T>(second * cosine + first * sine));
      }
    }
  }
};

template <typename T, typename W, int kItems>
__global__ void __launch_bounds__(kThreads)
    PrepareHeads(const HeadsCall call, const HeadsBuffers p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t heads = call.n + 2 * call.m;
  const int32_t index = static_cast<int32_t>(blockIdx.x) * kWarps + warp;
  const int32_t token = index / heads, head = index % heads;
  const bool is_query = head < call.n, is_value = head >= call.n + call.m;
  const int32_t gates_before = !call.gated ? 0 : is_query ? head : call.n;
  const W* weight = is_value ? nullptr : static_cast<const W*>(is_query ? p.q_weight : p.k_weight);
  if (weight != nullptr) {
    PrefetchLines(weight, call.d * static_cast<int>(sizeof(W)), lane, 32);
  }
  PrefetchLines(p.frequencies, call.half * static_cast<int>(sizeof(float)), lane, 32);
  WaitForPrecedingKernel();
  StartNextKernel();
  if (token >= call.b * call.t) return;
  Head<T, kItems> values;
  Factors<W, kItems> factors;
  const int32_t position = p.positions[token];
  const int64_t source = static_cast<int64_t>(token) * (heads + (call.gated ? call.n : 0)) + head;
  values.Load(static_cast<const T*>(p.qkv) + (source + gates_before) * call.d, call, lane);
  factors.Load(weight, p.frequencies, call, lane);
  if (!is_value) {
    if (weight != nullptr && !call.rotates_first) values.Normalize(factors, call, lane);
    values.Rotate(factors, call, position, lane);
    if (weight != nullptr && call.rotates_first) values.Normalize(factors, call, lane);
  }
  if (is_query) {
    values.Store(static_cast<T*>(p.q) + (static_cast<int64_t>(token) * call.n + head) * call.d,
                 call, lane);
  } else if (position >= 0 && position < call.s) {
    const int own = head - call.n - (is_value ? call.m : 0);
    const auto cached = static_cast<int64_t>(token / call.t) * call.m + own;
    const int64_t row = cached * call.s + position;
    values.Store(static_cast<T*>(is_value ? p.values : p.keys) + row * call.d, call, lane);
  }
}

template <typename T, typename W>
cudaError_t LaunchOf(cudaStream_t stream, const HeadsCall& call, const HeadsBuffers& p) {
  const int64_t heads = static_cast<int64_t>(call.b) * call.t * (call.n + 2 * call.m);
  const dim3 grid(static_cast<unsigned>(CeilDiv(heads, kWarps)));
  if (call.d <= 128) {
    return LaunchWide(stream, grid, kThreads, 0, true, PrepareHeads<T, W, 1>, call, p);
  }
  return LaunchWide(stream, grid, kThreads, 0, true, PrepareHeads<T, W, 2>, call, p);
}

template <typename T>
cudaError_t LaunchType(cudaStream_t stream, const HeadsCall& call, const HeadsBuffers& p) {
  return call.weight_type == DataType::kF32 ? LaunchOf<T, float>(stream, call, p)
                                            : LaunchOf<T, T>(stream, call, p);
}

}  // namespace

cudaError_t LaunchPrepareHeads(cudaStream_t stream, const HeadsCall& call,
                               const HeadsBuffers& buffers) {
  switch (call.type) {
    case DataType::kBF16:
      return LaunchType<__nv_bfloat16>(stream, call, buffers);
    case DataType::kF16:
      return LaunchType<__half>(stream, call, buffers);
    case DataType::kF32:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4
