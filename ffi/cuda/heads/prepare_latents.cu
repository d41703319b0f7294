// Prepares the latents of new tokens for latent attention, in one launch. It normalizes the latents
// of queries and of keys, and rotates the key that all heads share. It writes latents and keys into
// the cache, which is changed in place.
//
//   down [tokens, r + k + e] -> q [tokens, r], cache [b, s, k + e]
//
// Each step rounds to the type of the tokens, as the jnp expressions of ops/latents.py do.
// Channels i and i + e/2 of the written key rotate by position * frequency[i]. They are channels 2
// i and 2 i + 1 of `down` if pairs are interleaved there. Tokens at positions outside of the cache
// are not written.
//
// Bottleneck: latency. While the preceding kernel still runs, weights and frequencies come into the
// L2 cache. One block handles the queries' part of a token, and one the keys' part. A thread reads
// four channels at a time, once for the norm and again for the result.
//
// Tests: tests/emulation/test_emulation_latents.py, tests/gpu/test_cuda_latents.py.
#include "cuda/call_with_type.cuh"
#include "cuda/heads/sine.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/normalized.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
static_assert(kThreads >= kMaxPreparedWidth / 2, "a thread rotates one pair of channels");

// Four channels, which are loaded and stored at once.
template <typename T>
struct alignas(4 * sizeof(T)) Vector {
  T values[4];
};

// Writes `width` channels, normalized unless `weight` is null.
template <typename T, typename W>
__device__ __forceinline__ void Normalize(const T* source, const W* weight, int width, float eps,
                                          T* target) {
  const auto* from = reinterpret_cast<const Vector<T>*>(source);
  const auto* factors = reinterpret_cast<const Vector<W>*>(weight);
  auto* to = reinterpret_cast<Vector<T>*>(target);
  const int thread = static_cast<int>(threadIdx.x), count = width / 4;
  if (weight == nullptr) {
    for (int i = thread; i < count; i += kThreads) to[i] = from[i];
    return;
  }
  float squares = 0.0f;
  for (int i = thread; i < count; i += kThreads) {
    const Vector<T> read = from[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) squares += ToFloat(read.values[j]) * ToFloat(read.values[j]);
  }
  const float inverse_root = InverseRoot(BlockSum<kWarps>(squares), width, eps);
  for (int i = thread; i < count; i += kThreads) {
    Vector<T> values = from[i];
    const Vector<W> factor = factors[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values.values[j] = Normalized<T>(ToFloat(values.values[j]), inverse_root, factor.values[j]);
    }
    to[i] = values;
  }
}

// Writes a key, rotated if there are frequencies. Each thread has one pair of channels.
template <typename T>
__device__ __forceinline__ void Rotate(const T* source, const float* frequencies,
                                       const LatentsCall& call, int32_t position, T* target) {
  const int half = call.e / 2, i = static_cast<int>(threadIdx.x);
  if (i >= half) return;
  const bool turns = call.half > 0, adjacent = turns && call.interleaved;
  const T first = source[adjacent ? 2 * i : i], second = source[adjacent ? 2 * i + 1 : i + half];
  if (!turns) {
    target[i] = first;
    target[i + half] = second;
    return;
  }
  const SineCosine turn = SineAndCosine(static_cast<float>(position) * frequencies[i]);
  const float sine = turn.sine * call.rotation_scale, cosine = turn.cosine * call.rotation_scale;
  target[i] = FromFloat<T>(ToFloat(first) * cosine - ToFloat(second) * sine);
  target[i + half] = FromFloat<T>(ToFloat(second) * cosine + ToFloat(first) * sine);
}

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads)
    PrepareLatents(const LatentsCall call, const LatentsBuffers p) {
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t token = static_cast<int32_t>(blockIdx.x) / 2;
  const bool is_query = blockIdx.x % 2 == 0;
  const auto* weight = static_cast<const W*>(is_query ? p.q_weight : p.kv_weight);
  const int width = is_query ? call.r : call.k;
  if (weight != nullptr) {
    PrefetchLines(weight, width * static_cast<int>(sizeof(W)), thread, kThreads);
  }
  if (!is_query) {
    PrefetchLines(p.frequencies, call.half * static_cast<int>(sizeof(float)), thread, kThreads);
  }
  WaitAndStartNextKernel(call.starts_next);
  const T* source =
      static_cast<const T*>(p.down) + static_cast<int64_t>(token) * (call.r + call.k + call.e);
  if (is_query) {
    T* target = static_cast<T*>(p.q) + static_cast<int64_t>(token) * call.r;
    Normalize<T, W>(source, weight, width, call.eps, target);
    return;
  }
  const int32_t position = p.positions[token];
  if (position < 0 || position >= call.s) return;
  const int64_t row = static_cast<int64_t>(token / call.t) * call.s + position;
  T* target = static_cast<T*>(p.cache) + row * (call.k + call.e);
  Normalize<T, W>(source + call.r, weight, width, call.eps, target);
  Rotate<T>(source + call.r + call.k, p.frequencies, call, position, target + call.k);
}

template <typename T>
cudaError_t LaunchType(cudaStream_t stream, const LatentsCall& call, const LatentsBuffers& p) {
  const dim3 grid(static_cast<unsigned>(2 * call.b * call.t));
  return call.weight_type == DataType::kF32
             ? LaunchWide(stream, grid, kThreads, 0, true, PrepareLatents<T, float>, call, p)
             : LaunchWide(stream, grid, kThreads, 0, true, PrepareLatents<T, T>, call, p);
}

}  // namespace

cudaError_t LaunchPrepareLatents(cudaStream_t stream, const LatentsCall& call,
                                 const LatentsBuffers& buffers) {
  return CallWithHalf(call.type,
                      [&](auto type) { return LaunchType<decltype(type)>(stream, call, buffers); });
}

}  // namespace nvfp4
