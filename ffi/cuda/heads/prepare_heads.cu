// Prepares the heads of new tokens for attention, in one launch: norms of query heads and key
// heads, rotation, and the write of keys and values into the cache, which is changed in place.
//
//   qkv [tokens, n + 2m, d] -> q [tokens, n, d], keys and values [b, m, s, d]
//
// With gates, qkv is [tokens, 2n + 2m, d], and the gate of each query head follows it. GateHeads in
// gating/gating.cu reads the gates.
//
// A cache in E4M3 has one scale for the keys and one for the values of each head.
//
// Each step rounds to the type of the heads, as the jnp expressions of ops/heads.py do.
// Channels i and i + r/2 rotate by position * frequency[i], for i below r/2. The channels from r on
// keep their values. For a cache in E4M3, keys and values are rounded once more, to the bytes that
// round_fp8 of numerics/fp8.py gives. Tokens at positions outside of the cache are not written.
//
// Bottleneck: latency for few tokens, memory bandwidth for many. While the preceding kernel still
// runs, weights and frequencies come into the L2 cache. A warp handles up to kHeads heads of one
// token, which are all queries, all keys or all values. With few tokens that is one head, so that
// no warp does the work of another one. With many tokens it is several, whose loads are all in
// flight, and which share the sines of their position.
//
// Attention prepares the heads of a single token itself (attention/token_heads.cuh). Both share
// head_items.cuh.
//
// Tests: tests/emulation/test_emulation_heads.py, tests/gpu/test_cuda_heads.py.
#include "cuda/call_with_type.cuh"
#include "cuda/heads/head_items.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTogether = 8;     // heads of a warp with many tokens; half as many if wider than 128
constexpr int kFewHeads = 4096;  // heads of all tokens that take a warp each: they run at once

enum class Kind : int { kQuery, kKey, kValue };

// The heads of one warp: `count` heads of one kind from head `first` of that kind on.
struct WarpHeads {
  Kind kind;
  int32_t first, count;
};

// Returns the number of warps for `count` heads of one kind.
template <int kHeads>
NVFP4_HOST_DEVICE int32_t WarpsFor(int32_t count) {
  return (count + kHeads - 1) / kHeads;
}

template <int kHeads>
__device__ __forceinline__ WarpHeads HeadsOf(const HeadsCall& call, int32_t group) {
  const int32_t query_groups = WarpsFor<kHeads>(call.n), key_groups = WarpsFor<kHeads>(call.m);
  const int32_t behind_queries = group - query_groups;
  if (behind_queries < 0) {
    return {Kind::kQuery, group * kHeads, min(kHeads, call.n - group * kHeads)};
  }
  const bool is_value = behind_queries >= key_groups;
  const int32_t first = (behind_queries - (is_value ? key_groups : 0)) * kHeads;
  return {is_value ? Kind::kValue : Kind::kKey, first, min(kHeads, call.m - first)};
}

// kE4M3: whether the cache is in E4M3.
template <typename T, typename W, int kItems, int kHeads, bool kE4M3>
__global__ void __launch_bounds__(kThreads)
    PrepareHeads(const HeadsCall call, const HeadsBuffers p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t groups = WarpsFor<kHeads>(call.n) + 2 * WarpsFor<kHeads>(call.m);
  const int32_t index = static_cast<int32_t>(blockIdx.x) * kWarps + warp;
  const int32_t token = index / groups;
  const WarpHeads own = HeadsOf<kHeads>(call, index % groups);
  const bool is_query = own.kind == Kind::kQuery, is_value = own.kind == Kind::kValue;
  const W* weight = is_value ? nullptr : static_cast<const W*>(is_query ? p.q_weight : p.k_weight);
  if (weight != nullptr) {
    PrefetchLines(weight, call.d * static_cast<int>(sizeof(W)), lane, 32);
  }
  PrefetchLines(p.frequencies, call.half * static_cast<int>(sizeof(float)), lane, 32);
  WaitAndStartNextKernel(call.starts_next);
  if (token >= call.b * call.t) return;
  const LaneItems<kItems> items(call, lane);
  const int32_t position = p.positions[token];
  // In units of heads: a query with its gate counts twice.
  const int32_t query_step = call.gated ? 2 : 1, queries = query_step * call.n;
  const int32_t before =
      is_query ? query_step * own.first : queries + (is_value ? call.m : 0) + own.first;
  const int32_t step = (is_query ? query_step : 1) * call.d;
  const T* source = static_cast<const T*>(p.qkv) +
                    (static_cast<int64_t>(token) * (queries + 2 * call.m) + before) * call.d;
  Head<T, kItems> all[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i < own.count) all[i].Load(source, items);
    source += step;
  }
  const bool to_e4m3 = kE4M3 && !is_query;
  float scale = 1.0f;  // lane i has that of head i
  if (to_e4m3 && lane < own.count) scale = (is_value ? p.v_scale : p.k_scale)[own.first + lane];
  Factors<W, kItems> factors;
  factors.Load(weight, p.frequencies, items, lane);
  Turns<kItems> turns;
  if (!is_value) turns.Compute(factors.frequencies, items, position, call.rotation_scale);
  // Its division is a function call, which each head would otherwise do for itself.
  const float factor = to_e4m3 ? E4M3Factor(scale, call.multiply_by_reciprocal) : 1.0f;
  if (!is_query && (position < 0 || position >= call.s)) return;
  const int64_t row =
      is_query ? static_cast<int64_t>(token) * call.n + own.first
               : (static_cast<int64_t>(token / call.t) * call.m + own.first) * call.s + position;
  const int64_t bytes = call.d * static_cast<int64_t>(to_e4m3 ? 1 : sizeof(T));  // of a head
  auto* target = static_cast<uint8_t*>(is_query ? p.q : is_value ? p.values : p.keys) + row * bytes;
  const int64_t target_step = is_query ? bytes : call.s * bytes;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= own.count) break;
    if (!is_value) {
      if (weight != nullptr && !call.rotates_first) all[i].Normalize(factors, call, items);
      all[i].Rotate(turns, items);
      if (weight != nullptr && call.rotates_first) all[i].Normalize(factors, call, items);
    }
    if (to_e4m3) {
      const float own_factor = __shfl_sync(kAllLanes, factor, i);
      const E4M3Rounding rounding = MakeE4M3Rounding(own_factor, call.multiply_by_reciprocal);
      all[i].StoreE4M3(target, items, rounding);
    } else {
      all[i].Store(reinterpret_cast<T*>(target), items);
    }
    target += target_step;
  }
}

template <typename T, typename W, int kItems, int kHeads>
cudaError_t LaunchGroups(cudaStream_t stream, const HeadsCall& call, const HeadsBuffers& p) {
  const int64_t groups = WarpsFor<kHeads>(call.n) + 2 * WarpsFor<kHeads>(call.m);
  const int64_t warps = static_cast<int64_t>(call.b) * call.t * groups;
  const dim3 grid(static_cast<unsigned>(CeilDiv(warps, kWarps)));
  const auto kernel = p.k_scale == nullptr ? PrepareHeads<T, W, kItems, kHeads, false>
                                           : PrepareHeads<T, W, kItems, kHeads, true>;
  return LaunchWide(stream, grid, kThreads, 0, true, kernel, call, p);
}

template <typename T, typename W>
cudaError_t LaunchOf(cudaStream_t stream, const HeadsCall& call, const HeadsBuffers& p) {
  const int64_t heads = static_cast<int64_t>(call.b) * call.t * (call.n + 2 * call.m);
  if (call.d <= 128) {
    return heads <= kFewHeads ? LaunchGroups<T, W, 1, 1>(stream, call, p)
                              : LaunchGroups<T, W, 1, kTogether>(stream, call, p);
  }
  return heads <= kFewHeads ? LaunchGroups<T, W, 2, 1>(stream, call, p)
                            : LaunchGroups<T, W, 2, kTogether / 2>(stream, call, p);
}

template <typename T>
cudaError_t LaunchType(cudaStream_t stream, const HeadsCall& call, const HeadsBuffers& p) {
  return call.weight_type == DataType::kF32 ? LaunchOf<T, float>(stream, call, p)
                                            : LaunchOf<T, T>(stream, call, p);
}

}  // namespace

cudaError_t LaunchPrepareHeads(cudaStream_t stream, const HeadsCall& call,
                               const HeadsBuffers& buffers) {
  return CallWithHalf(call.type,
                      [&](auto type) { return LaunchType<decltype(type)>(stream, call, buffers); });
}

}  // namespace nvfp4
