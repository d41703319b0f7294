// Adds up small arrays of the GPUs of one host, through memory that they write for each other:
//
//   y = x of rank 0 + x of rank 1 + ...       in float32, rounded to the type of x
//
// peer_sum.cuh says how. A thread has 16 bytes of the array.
//
// Bottleneck: latency, which is that of a store over NVLink. Each GPU writes x twice as wide to all
// others, so that large arrays are faster with NCCL, where each writes only parts of them.
//
// Tests: tests/emulation/test_emulation_all_reduce.py, tests/backends/test_peer_threads.py,
// tests/gpu/test_cuda_all_reduce.py.
#include "cuda/collectives/all_reduce.cuh"

#include "cuda/call_with_type.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {

cudaError_t PrepareAllReduce(bool* overlaps) {
  for (const DataType one : {DataType::kBF16, DataType::kF16, DataType::kF32}) {
    NVFP4_RETURN_IF_CUDA_ERROR(CallWithType(
        one, [&](auto type) { return PrepareOverlap(AllReduce<decltype(type)>, overlaps); }));
  }
  return PrepareAllReduceRmsNorm(overlaps);
}

cudaError_t LaunchAllReduce(cudaStream_t stream, const AllReduceCall& call) {
  constexpr int kWarp = 32;
  const dim3 grid(static_cast<unsigned>(CeilDiv(call.pieces, kPeerThreads)));
  const int64_t threads = CeilDiv(call.pieces, kWarp) * kWarp;
  return CallWithType(call.type, [&](auto type) {
    return LaunchPrepared(stream, grid, /*cluster=*/1,
                          static_cast<int>(threads < kPeerThreads ? threads : kPeerThreads),
                          /*shared_bytes=*/0, call.group.overlaps, AllReduce<decltype(type)>, call);
  });
}

}  // namespace nvfp4
