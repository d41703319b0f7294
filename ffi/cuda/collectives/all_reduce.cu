// Adds up small arrays of the GPUs of one host, through memory that they write for each other:
//
//   y = x of rank 0 + x of rank 1 + ...       in float32, rounded to the type of x
//
// Each GPU writes its x to all others, and then a stamp. When the stamps of the others have
// arrived, it adds up what it has received in the order of the ranks. All GPUs thus have the same
// bits, in every run. A block does this for its own part of x, and never waits for another block.
//
// Values and stamps have two slots, which take turns. An epoch counts the sums, so that nothing is
// cleared between them. It lies in device memory: a CUDA graph that runs again goes on counting.
// A GPU may write values of epoch e as soon as it has finished epoch e - 1, although another GPU
// may still be in that epoch. That GPU has sent its stamp of e - 1, in a kernel that started when
// its kernel of e - 2 had ended. It thus no longer reads the slot of e - 2, which is that of e.
//
// The wait for another GPU is bounded. After that time, and if the other GPU adds up an array of
// another size or type, the kernel writes the reason to memory of the host, and ends with an error.
//
// Needs: the GPUs run the same sums in the same order, one at a time. Chains run no sum in parallel
// with other calls (backends/chains/forks.py).
//
// Bottleneck: latency, which is that of a store and a release over NVLink. Each GPU writes x to all
// others, so that large arrays are faster with NCCL, where each writes only parts of them.
//
// The kernel has been compiled and emulated, but not executed.
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
  return cudaSuccess;
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
