// Sums the outputs of the experts of each token, adds the sum to the residual stream, and
// normalizes the result, in one launch. The first step is that of combine.cuh:
//
//   added = sum over j, in order, of weight[t, j] * output(t, j)     rounded to the type of x
//
// `added` stays in registers. The other steps are those of add_rms_norm.cu:
//
//   sum = x + added                                                 rounded to the type of x
//   y = weight * sum / sqrt(mean(sum^2) + eps)                      over each row
//
// Bottleneck: latency for few rows, reading the outputs for many. One block handles a row, with
// pieces as in norm_pieces.cuh. For few rows, the kernel may start while GEMM 2 of the experts
// still runs. For many, it does not, and its loads pass through the L1 cache; see combine.cu.
//
// Tests: tests/emulation/test_fused_calls.py, tests/gpu/test_cuda_chain.py.
#include "cuda/epilogues/combine.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/norm_pieces.cuh"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {
namespace {

constexpr int kMaxThreads = 1024;  // each has one piece of 16 bytes of a row

struct CombineRows {
  NormBuffers norm;
  CombineTokens tokens;
  const void* outputs;
  int32_t threads;
  float eps;
  bool starts_next;
};

template <typename T, typename W>
__global__ void __launch_bounds__(kMaxThreads, 1) CombineRmsNorm(const CombineRows p) {
  constexpr int kWidth = kNormWidth<T>;
  __shared__ float groups[kMaxThreads / 32];
  const NormBuffers& b = p.norm;
  const int32_t h = p.tokens.h;
  NormPieces<T, W, 1> pieces(h, static_cast<int>(threadIdx.x), p.threads);
  const int64_t token = blockIdx.x, row = token * pieces.pieces;
  PrefetchLines(b.weight, h * static_cast<int>(sizeof(W)), threadIdx.x, p.threads);
  // GEMM 2 has waited for what writes ids and weights before it let this kernel start.
  WarpChoices choices(p.tokens, token, 0);
  WaitAndStartNextKernel(p.starts_next);
  pieces.LoadX(static_cast<const uint4*>(b.x) + row);
  const T* outputs =
      static_cast<const T*>(p.outputs) + token * p.tokens.top_k * h + pieces.thread * kWidth;
  float sums[kWidth] = {};
  AddOutputs<T>(choices, outputs, h, pieces.thread < pieces.pieces, sums);
#pragma unroll 1
  for (int first = kChoices; first < p.tokens.top_k; first += kChoices) {
    choices = WarpChoices(p.tokens, token, first);
    outputs += kChoices * static_cast<int64_t>(h);
    AddOutputs<T>(choices, outputs, h, pieces.thread < pieces.pieces, sums);
  }
  Word<T> added[kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) added[i] = FromFloats<T>(sums[2 * i], sums[2 * i + 1]);
  memcpy(pieces.added, added, sizeof(added));
  pieces.LoadWeight(b.weight);
  pieces.Add([&](int piece, const uint4& sum) { static_cast<uint4*>(b.sum)[row + piece] = sum; });
  pieces.Normalize(p.eps, groups,
                   [&](int piece, const uint4& y) { static_cast<uint4*>(b.y)[row + piece] = y; });
}

template <typename T, typename W>
cudaError_t LaunchTyped(cudaStream_t stream, const NormCall& call, CombineRows rows) {
  rows.threads = static_cast<int32_t>(CeilDiv(call.h / kNormWidth<T>, 32) * 32);
  const dim3 grid(static_cast<unsigned>(call.rows));
  return CombinesMany(call.rows, call.h)
             ? LaunchCached(stream, grid, rows.threads, CombineRmsNorm<T, W>, rows)
             : LaunchWide(stream, grid, rows.threads, 0, /*overlaps=*/true, CombineRmsNorm<T, W>,
                          rows);
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const NormCall& call, const CombineRows& rows) {
  return call.weight_type == DataType::kF32 ? LaunchTyped<T, float>(stream, call, rows)
                                            : LaunchTyped<T, T>(stream, call, rows);
}

}  // namespace

cudaError_t LaunchCombineRmsNorm(cudaStream_t stream, const NormCall& call,
                                 const NormBuffers& buffers, const InputCombine& combine) {
  const bool fits = call.h <= kMaxThreads * kNormWidth<__nv_bfloat16> &&
                    (call.weight_type == call.type || call.weight_type == DataType::kF32);
  if (!fits) {
    NVFP4_RETURN_IF_CUDA_ERROR(
        LaunchCombineOutputs(stream, combine.type, combine.tokens, combine.outputs));
    return LaunchAddRmsNorm(stream, call, buffers);
  }
  const CombineRows rows = {buffers, combine.tokens, combine.outputs,
                            0,       call.eps,       call.starts_next};
  return call.type == DataType::kF16 ? LaunchOf<__half>(stream, call, rows)
                                     : LaunchOf<__nv_bfloat16>(stream, call, rows);
}

}  // namespace nvfp4
