// Adds two parts with a gate, adds the result to the residual stream, and normalizes that sum, in
// one launch. The first step is that of AddGated or AddLinearGated in gating.cu:
//
//   added = routed + factor * z                           rounded to the type of x
//
// `added` stays in registers. The other steps are those of add_rms_norm.cu:
//
//   sum = x + added                                       rounded to the type of x
//   y = weight * sum / sqrt(mean(sum^2) + eps)            over each row
//
// Shared experts end like this: `routed` is the result of the routed experts, and z that of the
// shared ones. The kernel also waits for both streams of the chain.
//
// Bottleneck: latency. One block handles a row, with pieces as in norm_pieces.cuh. All loads but
// those of a long gate are in flight before the first is used.
//
// Tests: tests/emulation/test_fused_calls.py, tests/gpu/test_cuda_chain.py.
#include <algorithm>

#include "cuda/gating/gates.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/norm_pieces.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kMaxThreads = 1024;  // each has one piece of 16 bytes of a row
constexpr int kSums = kLinearThreads / 32;

// Where the gate of a row comes from. Null pointers stand for what there is not.
struct GateSource {
  const void* gate;    // [rows]
  const void* input;   // [rows, k]
  const void* weight;  // [k]
  int64_t k;
};

struct GatedRows {
  NormBuffers norm;
  GateSource gate;
  const void* routed;
  const void* z;
  int32_t h, threads;
  float eps;
  bool starts_next;
};

// Adds up a linear gate as AddLinearGated does: its threads have a part of the sum each, and then
// come the sums of their warps, in order. `sums` is shared memory.
template <typename T>
__device__ __forceinline__ float SumGate(const GateSource& gate, int64_t row, int threads,
                                         float* sums) {
  using Pieces = GatePieces<T, kNormWidth<T>>;
  const auto inputs = static_cast<uint32_t>(gate.k) / kNormWidth<T>;
  const T* input = static_cast<const T*>(gate.input) + row * gate.k;
#pragma unroll 1
  for (int part = static_cast<int>(threadIdx.x); part < kLinearThreads; part += threads) {
    float product = 0.0f;
#pragma unroll 1
    for (uint32_t first = part; first < inputs; first += Pieces::kAhead * kLinearThreads) {
      Pieces pieces;
      pieces.Load(input, gate.weight, first, inputs);
      product = pieces.Multiply(product);
    }
    product = WarpSum(product);
    if (part % 32 == 0) sums[part / 32] = product;
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kSums; ++warp) sum += sums[warp];
  return sum;
}

template <typename T, typename W, bool kLinear>
__global__ void __launch_bounds__(kMaxThreads, 1) AddGatedRmsNorm(const GatedRows p) {
  __shared__ float groups[kMaxThreads / 32];
  __shared__ float sums[kSums];
  const NormBuffers& b = p.norm;
  NormPieces<T, W, 1> pieces(p.h, static_cast<int>(threadIdx.x), p.threads);
  const int64_t row = blockIdx.x, first = row * pieces.pieces;
  PrefetchLines(b.weight, p.h * static_cast<int>(sizeof(W)), threadIdx.x, p.threads);
  if constexpr (kLinear) {
    PrefetchLines(p.gate.weight, static_cast<int>(p.gate.k) * static_cast<int>(sizeof(T)),
                  threadIdx.x, p.threads);
  }
  WaitAndStartNextKernel(p.starts_next);
  pieces.LoadX(static_cast<const uint4*>(b.x) + first);
  pieces.LoadAdded(static_cast<const uint4*>(p.routed) + first);
  uint4 other = {};
  if (pieces.thread < pieces.pieces) other = static_cast<const uint4*>(p.z)[first + pieces.thread];
  pieces.LoadWeight(b.weight);
  const bool gated = kLinear || p.gate.gate != nullptr;
  float factor = 1.0f;
  if constexpr (kLinear) {
    factor = GateFactor<T>(Round<T>(SumGate<T>(p.gate, row, p.threads, sums)));
  } else if (gated) {
    factor = GateFactor<T>(ToFloat(static_cast<const T*>(p.gate.gate)[row]));
  }
  pieces.Each([&](int i, int) {
    WordsOf16<T> added(pieces.added[i]);
    const WordsOf16<T> z(other);
#pragma unroll
    for (int j = 0; j < added.kCount; ++j) {
      const float2 routed = ToFloats(added.words[j]);
      float2 more = ToFloats(z.words[j]);
      if (gated) more = make_float2(Round<T>(more.x * factor), Round<T>(more.y * factor));
      added.words[j] = FromFloats<T>(routed.x + more.x, routed.y + more.y);
    }
    pieces.added[i] = added.Bytes();
  });
  pieces.Add([&](int piece, const uint4& sum) { static_cast<uint4*>(b.sum)[first + piece] = sum; });
  pieces.Normalize(p.eps, groups,
                   [&](int piece, const uint4& y) { static_cast<uint4*>(b.y)[first + piece] = y; });
}

// Whether the kernel takes these sizes and types.
bool Fits(const NormCall& call, int64_t k) {
  return call.type != DataType::kF32 && call.h % kNormWidth<__nv_bfloat16> == 0 &&
         call.h <= kMaxThreads * kNormWidth<__nv_bfloat16> && k % kNormWidth<__nv_bfloat16> == 0 &&
         (call.weight_type == call.type || call.weight_type == DataType::kF32);
}

template <typename T, typename W>
cudaError_t LaunchTyped(cudaStream_t stream, const NormCall& call, const GatedRows& rows) {
  const dim3 grid(static_cast<unsigned>(call.rows));
  const auto kernel =
      rows.gate.weight != nullptr ? AddGatedRmsNorm<T, W, true> : AddGatedRmsNorm<T, W, false>;
  return LaunchWide(stream, grid, rows.threads, 0, /*overlaps=*/true, kernel, rows);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const NormCall& call, const GatedRows& rows) {
  return call.weight_type == DataType::kF32 ? LaunchTyped<T, float>(stream, call, rows)
                                            : LaunchTyped<T, T>(stream, call, rows);
}

cudaError_t Launch(cudaStream_t stream, const NormCall& call, const NormBuffers& buffers,
                   const GateSource& gate, const void* routed, const void* z) {
  if (call.rows == 0 || call.h == 0) return cudaSuccess;
  const GatedRows rows = {
      buffers,
      gate,
      routed,
      z,
      static_cast<int32_t>(call.h),
      static_cast<int32_t>(CeilDiv(call.h / kNormWidth<__nv_bfloat16>, 32) * 32),
      call.eps,
      call.starts_next};
  return call.type == DataType::kF16 ? LaunchOf<__half>(stream, call, rows)
                                     : LaunchOf<__nv_bfloat16>(stream, call, rows);
}

}  // namespace

cudaError_t LaunchAddGatedRmsNorm(cudaStream_t stream, const NormCall& call,
                                  const NormBuffers& buffers, const AddGatedCall& gated) {
  if (!Fits(call, 0)) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchAddGated(stream, gated));
    return LaunchAddRmsNorm(stream, call, buffers);
  }
  return Launch(stream, call, buffers, {gated.gate, nullptr, nullptr, 0}, gated.x, gated.z);
}

cudaError_t LaunchAddGatedRmsNorm(cudaStream_t stream, const NormCall& call,
                                  const NormBuffers& buffers, const AddLinearGatedCall& gated) {
  if (!Fits(call, gated.k)) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchAddLinearGated(stream, gated));
    return LaunchAddRmsNorm(stream, call, buffers);
  }
  return Launch(stream, call, buffers, {nullptr, gated.gate_input, gated.gate_weight, gated.k},
                gated.x, gated.z);
}

}  // namespace nvfp4
