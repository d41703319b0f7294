// A router: chooses the experts of each token and their weights from logits, as `route` of
// numerics/routing.py does.
//
//   logits [t, e], bias [e] or null -> expert_ids [t, top_k], expert_weights [t, top_k]
//
// Bottleneck: latency; 64 tokens of 512 experts are only 128 KiB. One warp handles a token, and
// lane l holds experts l, 32 + l, 64 + l, ... in registers. Each of top_k rounds finds the largest
// key of the warp, and then the lowest expert that has this key. Lane j keeps the j-th choice.
//
// Fetching instructions is a large part of the time of so short a kernel. Two forms had fewer steps
// that depend on each other, but more code. In one, a thread for each expert counted the keys
// before its own, and in the other, lanes sorted their keys first. Steps of Qwen3-30B-A3B became
// slower.
//
// At the end, lane j computes the score of the j-th choice again, which costs less than keeping
// scores beside the keys.
//
// A key is a float that is mapped to an unsigned number of the same order, so that one instruction
// (redux) finds a maximum. The order is that of lax.top_k: -0 is below +0, NaN is above everything,
// and ties go to the lower expert. Key 0 belongs to no float. It marks experts that are already
// chosen, or do not exist.
//
// Groups of experts are ranked in the same way. The key of a group comes from its two best experts,
// which are found in shared memory.
//
// Needs: e <= 1024, top_k <= 32, and top_k at most the number of experts in the groups that are
// kept. cuda_bindings.cc checks these. Test: tests/ops/test_route.py.
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/warp_sum.cuh"
#include "nvfp4.h"

namespace nvfp4 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kNoKey = 0;
constexpr uint32_t kNanKey = 0xffffffffu;
constexpr uint32_t kLowestKey = 0x007fffffu;  // the key of minus infinity
constexpr float kTiny = 1e-20f;               // as in numerics/routing.py

static_assert(kMaxTopK <= 32, "a lane keeps one choice");

__device__ __forceinline__ uint32_t KeyOf(float value) {
  if (isnan(value)) return kNanKey;
  const uint32_t bits = FloatBits(value);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// Returns the float of a key. kNanKey gives a NaN.
__device__ __forceinline__ float ValueOf(uint32_t key) {
  return BitsFloat(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// Returns a / d for 0 <= a <= 1 <= d. The result is that of IEEE division in all but rare cases. A
// division would branch for each expert, and the divisions of a lane would run one after another.
__device__ __forceinline__ float Quotient(float a, float d) {
  const float reciprocal = __fdividef(1.0f, d);
  const float near = a * reciprocal;
  const float refined = fmaf(fmaf(-near, d, a), reciprocal, near);
  return d < 0x1p126f ? refined : near;  // if d is infinite, `refined` would be NaN
}

// The maximum and the sum of a softmax over logits. The other scores do not read it.
struct Softmax {
  float largest = 0.0f;
  float sum = 1.0f;
};

template <int kPerLane>
__device__ __forceinline__ Softmax SoftmaxOf(const float (&logits)[kPerLane]) {
  uint32_t largest = kNoKey;
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) largest = max(largest, KeyOf(logits[r]));
  Softmax softmax;
  softmax.largest = ValueOf(__reduce_max_sync(kAllLanes, largest));
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) sum += expf(logits[r] - softmax.largest);
  softmax.sum = WarpSum(sum);
  return softmax;
}

template <RouterScore kScore>
__device__ __forceinline__ float Score(float logit, const Softmax& softmax) {
  if constexpr (kScore == RouterScore::kSoftmax) {
    return Quotient(expf(logit - softmax.largest), softmax.sum);
  } else if constexpr (kScore == RouterScore::kSigmoid) {
    return Quotient(1.0f, 1.0f + expf(-logit));
  } else {
    return sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
  }
}

// Removes the largest key of the warp and returns its index. keys[r] of lane l has the index 32 * r
// + l.
template <int kPerLane>
__device__ __forceinline__ int TakeBest(uint32_t (&keys)[kPerLane], int lane) {
  uint32_t best = keys[0];
#pragma unroll
  for (int r = 1; r < kPerLane; ++r) best = max(best, keys[r]);
  best = __reduce_max_sync(kAllLanes, best);
  int index = INT32_MAX;
#pragma unroll
  for (int r = kPerLane - 1; r >= 0; --r) index = keys[r] == best ? 32 * r + lane : index;
  index = __reduce_min_sync(kAllLanes, index);
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) keys[r] = 32 * r + lane == index ? kNoKey : keys[r];
  return index;
}

// Returns the place of expert i in the row of shared memory of a warp. Groups of 32 start in
// different banks.
__device__ __forceinline__ int RowPlace(int i) { return i + i / 32; }

// Returns the key of a group: that of the sum of its two best keys, or its only key.
__device__ __forceinline__ uint32_t GroupKey(const uint32_t* row, int first, int size) {
  uint32_t best = kNoKey, second = kNoKey;
  for (int i = first; i < first + size; ++i) {
    const uint32_t key = row[RowPlace(i)];
    second = max(second, min(best, key));
    best = max(best, key);
  }
  return size == 1 ? best : KeyOf(ValueOf(best) + ValueOf(second));
}

// Gives the experts of all groups except the best ones the key of minus infinity.
//
// Lane l owns groups l, 32 + l, ... and is the only lane that accesses their places in the row
// until the end. A place holds first the key of an expert. The first place of a group then holds
// the key of the group. At the end, all places of a group that is dropped hold kNoKey.
template <int kPerLane>
__device__ __forceinline__ void DropGroups(const RouterCall& call, uint32_t (&keys)[kPerLane],
                                           uint32_t* row, int lane) {
  const int size = call.e / call.num_groups;
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) row[RowPlace(32 * r + lane)] = keys[r];
  __syncwarp();
#pragma unroll 1
  for (int group = lane; group < call.num_groups; group += 32) {
    row[RowPlace(group * size)] = GroupKey(row, group * size, size);
  }
  uint32_t left[kPerLane];
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) {
    const int group = 32 * r + lane;
    left[r] = group < call.num_groups ? row[RowPlace(group * size)] : kNoKey;
  }
#pragma unroll 1
  for (int kept = 0; kept < call.groups_kept; ++kept) TakeBest(left, lane);
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) {
    const int first = (32 * r + lane) * size;
#pragma unroll 1
    for (int i = first; left[r] != kNoKey && i < first + size; ++i) row[RowPlace(i)] = kNoKey;
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) {
    const int expert = 32 * r + lane;
    if (expert < call.e && row[RowPlace(expert)] == kNoKey) keys[r] = kLowestKey;
  }
}

template <int kPerLane>
__device__ __forceinline__ void LoadExperts(const float* source, int e, float absent,
                                            float (&values)[kPerLane], int lane) {
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) {
    values[r] = source != nullptr && 32 * r + lane < e ? source[32 * r + lane] : absent;
  }
}

// Computes the keys by which experts are chosen: those of their logits, or of their scores plus
// bias.
template <int kPerLane, RouterScore kScore>
__device__ __forceinline__ Softmax ChoiceKeys(const RouterCall& call, const float* logits,
                                              const float* bias, uint32_t (&keys)[kPerLane],
                                              int lane) {
  float values[kPerLane], biases[kPerLane];
  LoadExperts(logits, call.e, -INFINITY, values, lane);
  LoadExperts(bias, call.e, 0.0f, biases, lane);
  Softmax softmax;
  if (!call.select_logits) {
    if constexpr (kScore == RouterScore::kSoftmax) softmax = SoftmaxOf(values);
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) values[r] = Score<kScore>(values[r], softmax) + biases[r];
  }
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) keys[r] = 32 * r + lane < call.e ? KeyOf(values[r]) : kNoKey;
  return softmax;
}

// Stores choice `lane` of a token: expert `mine`, counted from `first`, with its logit. Whole warps
// call it.
template <RouterScore kScore>
__device__ __forceinline__ void Finish(const RouterCall& call, const RouterBuffers& p,
                                       int64_t token, int lane, int mine, int32_t first,
                                       float logit, Softmax softmax) {
  const bool chosen = lane < call.top_k;
  if (call.select_logits && kScore == RouterScore::kSoftmax) {
    const float only[1] = {logit};
    softmax = SoftmaxOf(only);
  }
  float weight = chosen ? Score<kScore>(logit, softmax) : 0.0f;
  if (call.renormalize) weight = Divide(weight, WarpSum(weight) + kTiny);
  if (!chosen) return;
  p.expert_ids[token * call.top_k + lane] = mine - first;
  p.expert_weights[token * call.top_k + lane] = weight * call.scaling;
}

template <int kPerLane, RouterScore kScore>
__global__ void __launch_bounds__(kThreads, 1) Route(const RouterCall call, const RouterBuffers p) {
  __shared__ uint32_t rows[kWarps][33 * kPerLane];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (p.bias != nullptr) PrefetchLines(p.bias, 4 * call.e, threadIdx.x, kThreads);
  WaitForPrecedingKernel();
  StartNextKernel();
  if (token >= call.t) return;
  const int32_t first = p.first == nullptr ? 0 : *p.first;
  const float* logits = p.logits + token * call.e;
  uint32_t keys[kPerLane];
  Softmax softmax = ChoiceKeys<kPerLane, kScore>(call, logits, p.bias, keys, lane);
  if (call.groups_kept < call.num_groups) DropGroups(call, keys, rows[warp], lane);

  int mine = 0;
#pragma unroll 1
  for (int choice = 0; choice < call.top_k; ++choice) {
    const int best = TakeBest(keys, lane);
    if (lane == choice) mine = best;
  }

  const float logit = lane < call.top_k ? logits[mine] : -INFINITY;
  Finish<kScore>(call, p, token, lane, mine, first, logit, softmax);
}

__global__ void __launch_bounds__(kThreads) ShiftIds(const ShiftIdsCall p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  WaitAndStartNextKernel(p.starts_next);
  if (at < p.count) p.shifted[at] = p.ids[at] - *p.first;
}

// Launches the instance that needs the fewest registers to hold all experts.
template <int kPerLane, RouterScore kScore>
cudaError_t LaunchRouteOf(cudaStream_t stream, const RouterCall& call, const RouterBuffers& p) {
  if constexpr (32 * kPerLane < kMaxExperts) {
    if (call.e > 32 * kPerLane) return LaunchRouteOf<2 * kPerLane, kScore>(stream, call, p);
  }
  const dim3 grid(static_cast<unsigned>(CeilDiv(call.t, kWarps)));
  return LaunchWide(stream, grid, kThreads, 0, /*overlaps=*/true, Route<kPerLane, kScore>, call, p);
}

}  // namespace

cudaError_t LaunchRoute(cudaStream_t stream, const RouterCall& call, const RouterBuffers& p) {
  switch (call.score) {
    case RouterScore::kSoftmax:
      return LaunchRouteOf<1, RouterScore::kSoftmax>(stream, call, p);
    case RouterScore::kSigmoid:
      return LaunchRouteOf<1, RouterScore::kSigmoid>(stream, call, p);
    case RouterScore::kSqrtSoftplus:
      return LaunchRouteOf<1, RouterScore::kSqrtSoftplus>(stream, call, p);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchShiftIds(cudaStream_t stream, const ShiftIdsCall& call) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(call.count, kThreads)));
  return LaunchWide(stream, grid, kThreads, 0, /*overlaps=*/true, ShiftIds, call);
}

}  // namespace nvfp4
