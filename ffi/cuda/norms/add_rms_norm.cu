// Adds to the residual stream and normalizes the sum, in one launch:
//
//   sum = x + added                                       rounded to the type of x
//   y = weight * sum / sqrt(mean(sum^2) + eps)            over each row
//
// norm_pieces.cuh says how values are rounded.
//
// Bottleneck: latency for few rows, memory bandwidth for many. One block handles a row. Each thread
// keeps 16 bytes, or four times 16 bytes, of the sum in registers, so that a row is read once. The
// loads of x, of `added` and of the weight are all in flight before the first is used. While the
// preceding kernel still runs, the weight comes into the L2 cache.
//
// AddRmsNormAny takes the other calls: rows of any length, and any pair of types. It reads a row
// twice, one value at a time.
//
// Tests: tests/emulation/test_emulation_norms.py, tests/gpu/test_cuda_norms.py.
#include <cstring>

#include "cuda/call_with_type.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/norm_pieces.cuh"
#include "cuda/norms/normalized.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kWarp = 32;
constexpr int kFew = 1, kMany = 4;  // pieces of 16 bytes of a row that a thread may keep

// What the kernels read, with the number of threads of a block.
struct NormRows {
  NormBuffers buffers;
  int32_t h, threads;
  float eps;
  bool starts_next;
};

// Returns the sum of the values of all threads of the block, with the same bits in each thread. It
// may be called once in a kernel, because nothing protects the shared memory of a second call.
__device__ __forceinline__ float BlockSum(float value, int threads) {
  __shared__ float sums[kMaxThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  value = WarpSum(value);
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  return WarpSum(lane < threads / kWarp ? sums[lane] : 0.0f);
}

template <typename T>
__device__ __forceinline__ T Sum(T x, T added) {
  return FromFloat<T>(ToFloat(x) + ToFloat(added));
}

// Needs: rows whose length is a multiple of 16 bytes, and at most kPieces * 16 bytes for each of
// p.threads threads.
template <typename T, typename W, int kPieces>
__global__ void __launch_bounds__(kMaxThreads, 1) AddRmsNorm(const NormRows p) {
  __shared__ float groups[kPieces * kMaxThreads / kWarp];
  const NormBuffers& b = p.buffers;
  NormPieces<T, W, kPieces> pieces(p.h, static_cast<int>(threadIdx.x), p.threads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * pieces.pieces;
  PrefetchLines(b.weight, p.h * static_cast<int>(sizeof(W)), threadIdx.x, p.threads);
  WaitAndStartNextKernel(p.starts_next);
  pieces.LoadX(static_cast<const uint4*>(b.x) + row);
  if (b.added != nullptr) pieces.LoadAdded(static_cast<const uint4*>(b.added) + row);
  pieces.LoadWeight(b.weight);
  if (b.added != nullptr) {
    pieces.Add([&](int piece, const uint4& sum) { static_cast<uint4*>(b.sum)[row + piece] = sum; });
  }
  pieces.Normalize(p.eps, groups,
                   [&](int piece, const uint4& y) { static_cast<uint4*>(b.y)[row + piece] = y; });
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    AddRmsNormAny(const NormRows p, const DataType weight_type) {
  const NormBuffers& b = p.buffers;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.h;
  const T* x = static_cast<const T*>(b.x) + row;
  const T* added = static_cast<const T*>(b.added) + row;
  WaitAndStartNextKernel(p.starts_next);
  float squares = 0.0f;
  for (int32_t i = threadIdx.x; i < p.h; i += p.threads) {
    T sum = x[i];
    if (b.added != nullptr) {
      sum = Sum(sum, added[i]);
      static_cast<T*>(b.sum)[row + i] = sum;
    }
    squares += ToFloat(sum) * ToFloat(sum);
  }
  const float inverse_root = InverseRoot(BlockSum(squares, p.threads), p.h, p.eps);
  for (int32_t i = threadIdx.x; i < p.h; i += p.threads) {
    const float sum = ToFloat(b.added != nullptr ? Sum(x[i], added[i]) : x[i]);
    T y;
    if (weight_type == DataType::kBF16) {
      y = Normalized<T>(sum, inverse_root, static_cast<const __nv_bfloat16*>(b.weight)[i]);
    } else if (weight_type == DataType::kF16) {
      y = Normalized<T>(sum, inverse_root, static_cast<const __half*>(b.weight)[i]);
    } else {
      y = Normalized<T>(sum, inverse_root, static_cast<const float*>(b.weight)[i]);
    }
    static_cast<T*>(b.y)[row + i] = y;
  }
}

template <typename... Kernel, typename... Arguments>
cudaError_t LaunchRows(cudaStream_t stream, const NormCall& call, NormRows rows, int64_t wanted,
                       void (*kernel)(Kernel...), const Arguments&... arguments) {
  const int64_t threads = CeilDiv(wanted, kWarp) * kWarp;
  rows.threads = static_cast<int32_t>(threads < kMaxThreads ? threads : kMaxThreads);
  const dim3 grid(static_cast<unsigned>(call.rows));
  return LaunchWide(stream, grid, rows.threads, 0, true, kernel, rows, arguments...);
}

// Launches the kernel that keeps rows in registers, if it takes rows of this length.
template <typename T, typename W>
cudaError_t LaunchOf(cudaStream_t stream, const NormCall& call, const NormRows& rows) {
  constexpr int64_t kWidth = 16 / sizeof(T);
  const int64_t pieces = call.h / kWidth;
  if (call.h % kWidth != 0 || pieces > kMany * kMaxThreads) {
    return LaunchRows(stream, call, rows, call.h, AddRmsNormAny<T>, call.weight_type);
  }
  if (pieces <= kFew * kMaxThreads) {
    return LaunchRows(stream, call, rows, pieces, AddRmsNorm<T, W, kFew>);
  }
  return LaunchRows(stream, call, rows, CeilDiv(pieces, kMany), AddRmsNorm<T, W, kMany>);
}

template <typename T>
cudaError_t LaunchType(cudaStream_t stream, const NormCall& call, const NormRows& rows) {
  if (call.weight_type == call.type) return LaunchOf<T, T>(stream, call, rows);
  if (call.weight_type == DataType::kF32) return LaunchOf<T, float>(stream, call, rows);
  return LaunchRows(stream, call, rows, call.h, AddRmsNormAny<T>, call.weight_type);
}

}  // namespace

cudaError_t LaunchAddRmsNorm(cudaStream_t stream, const NormCall& call,
                             const NormBuffers& buffers) {
  if (call.rows == 0 || call.h == 0) return cudaSuccess;
  const NormRows rows = {buffers, static_cast<int32_t>(call.h), 0, call.eps, call.starts_next};
  return CallWithType(call.type,
                      [&](auto type) { return LaunchType<decltype(type)>(stream, call, rows); });
}

}  // namespace nvfp4
