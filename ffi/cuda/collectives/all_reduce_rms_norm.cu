// Adds up rows of the GPUs of one host, adds the result to the residual stream, and normalizes that
// sum, in one launch. The first step is that of all_reduce.cu:
//
//   added = x of rank 0 + x of rank 1 + ...           in float32, rounded to the type of x
//
// `added` stays in registers. The other steps are those of add_rms_norm.cu:
//
//   sum = residual + added                            rounded to the type of x
//   y = weight * sum / sqrt(mean(sum^2) + eps)        over each row
//
// Bottleneck: latency. One block handles a row, with pieces as in norm_pieces.cuh. While the values
// of the other GPUs are on their way, the block loads its row of the residual stream and the
// weight.
//
// Tests: tests/emulation/test_fused_calls.py, tests/gpu/test_cuda_all_reduce.py.
#include "cuda/call_with_type.cuh"
#include "cuda/collectives/peer_sum.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/norm_pieces.cuh"

namespace nvfp4 {
namespace {

constexpr int kMaxThreads = 1024;  // each has one piece of 16 bytes of a row
static_assert(kNormWidth<__half> * sizeof(__half) == kPieceBytes);

struct ReducedRows {
  AllReduceCall added;
  NormBuffers norm;
  int32_t h, threads;
  int32_t blocks;  // of the memory of peers, for each row
  float eps;
  bool starts_next;
};

template <typename T, typename W>
__global__ void __launch_bounds__(kMaxThreads, 1)
    AllReduceRmsNorm(const __grid_constant__ ReducedRows p) {
  __shared__ float groups[kMaxThreads / 32];
  const NormBuffers& b = p.norm;
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x);
  NormPieces<T, W, 1> pieces(p.h, thread, p.threads);
  const int64_t first = static_cast<int64_t>(row) * pieces.pieces;
  PrefetchLines(b.weight, p.h * static_cast<int>(sizeof(W)), threadIdx.x, p.threads);
  WaitAndStartNextKernel(p.starts_next);
  const bool inside = thread < pieces.pieces;
  const int block = row * p.blocks + thread / kPeerThreads;
  const uint32_t what = WhatIsAddedUp(p.added.pieces, p.added.type, /*by_rows=*/true);
  const PeerSum sum(p.added.group, block, thread % kPeerThreads, inside, what);
  uint4 mine = make_uint4(0, 0, 0, 0);
  if (inside) mine = static_cast<const uint4*>(p.added.x)[first + thread];
  sum.Send(mine);
  pieces.LoadX(static_cast<const uint4*>(b.x) + first);
  pieces.LoadWeight(b.weight);
  pieces.added[0] = sum.AddUp<T>(mine);
  pieces.Add([&](int piece, const uint4& y) { static_cast<uint4*>(b.sum)[first + piece] = y; });
  pieces.Normalize(p.eps, groups,
                   [&](int piece, const uint4& y) { static_cast<uint4*>(b.y)[first + piece] = y; });
  sum.Finish();  // Normalize has a barrier
}

int64_t PiecesOf(const NormCall& call) { return call.h / kNormWidth<__half>; }
int64_t BlocksOf(const NormCall& call) { return CeilDiv(PiecesOf(call), kPeerThreads); }

// Whether the kernel takes these sizes and types.
bool Fits(const NormCall& call) {
  return call.type != DataType::kF32 && call.h % kNormWidth<__half> == 0 &&
         PiecesOf(call) <= kMaxThreads && call.rows * BlocksOf(call) <= kPeerBlocks &&
         (call.weight_type == call.type || call.weight_type == DataType::kF32);
}

// Returns function(kernel), where the kernel is that of the types.
template <typename Function>
cudaError_t CallWithKernel(DataType type, DataType weight_type, const Function& function) {
  return CallWithHalf(type, [&](auto value) {
    using T = decltype(value);
    return weight_type == DataType::kF32 ? function(AllReduceRmsNorm<T, float>)
                                         : function(AllReduceRmsNorm<T, T>);
  });
}

}  // namespace

cudaError_t PrepareAllReduceRmsNorm(bool* overlaps) {
  for (const DataType type : {DataType::kBF16, DataType::kF16}) {
    for (const DataType weight_type : {type, DataType::kF32}) {
      NVFP4_RETURN_IF_CUDA_ERROR(CallWithKernel(
          type, weight_type, [&](auto kernel) { return PrepareOverlap(kernel, overlaps); }));
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchAllReduceRmsNorm(cudaStream_t stream, const NormCall& call,
                                   const NormBuffers& buffers, const AllReduceCall& added) {
  if (!Fits(call)) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchAllReduce(stream, added));
    return LaunchAddRmsNorm(stream, call, buffers);
  }
  const ReducedRows rows = {added,
                            buffers,
                            static_cast<int32_t>(call.h),
                            static_cast<int32_t>(CeilDiv(PiecesOf(call), 32) * 32),
                            static_cast<int32_t>(BlocksOf(call)),
                            call.eps,
                            call.starts_next};
  const dim3 grid(static_cast<unsigned>(call.rows));
  return CallWithKernel(call.type, call.weight_type, [&](auto kernel) {
    return LaunchPrepared(stream, grid, /*cluster=*/1, rows.threads, /*shared_bytes=*/0,
                          added.group.overlaps, kernel, rows);
  });
}

}  // namespace nvfp4
