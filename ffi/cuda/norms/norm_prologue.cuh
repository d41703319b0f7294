// A norm as the first step of the kernel that reads its result. Each block of that kernel
// normalizes the few rows of x by itself, with the same bits as AddRmsNorm (add_rms_norm.cu). This
// repeats little work, and saves a launch that would wait for the kernel before it.
//
// The first block also writes the sum and the normalized rows, which later kernels may read.
#pragma once

#include <cstring>

#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/norms/normalized.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {

struct NormPrologue {
  NormBuffers buffers;
  int32_t rows, h;
  float eps;
  bool wide_weight;  // whether the weight is f32, instead of the type of x
};

constexpr int kPrologueThreads = 256;  // threads of a block that runs a prologue
constexpr int kPrologueWarps = kPrologueThreads / 32;
constexpr int kMaxPrologueRuns = 64;  // runs of all rows

// Returns the number of runs of a row of h elements of 16 bits. A run is 32 pieces of 16 bytes,
// which are the part of one warp of AddRmsNorm.
__host__ __device__ constexpr int32_t NormRuns(int64_t h) {
  return static_cast<int32_t>((h + 255) / 256);
}

// Prefetches the weight into the L2 cache, before the kernel waits.
__device__ __forceinline__ void PrefetchNormWeight(const NormPrologue& p) {
  if (blockIdx.x != 0) return;
  PrefetchLines(p.buffers.weight, p.h * (p.wide_weight ? 4 : 2), threadIdx.x, kPrologueThreads);
}

// Normalizes the rows, and leaves y in shared memory: 16 bytes at place(row, piece). A caller needs
// a barrier before it reads what other threads have left there. kPrologueThreads threads call this,
// once in a kernel, because nothing protects the shared memory of a second call.
template <typename T, typename Place>
__device__ __forceinline__ void NormalizeRows(const NormPrologue& p, const Place& place) {
  constexpr int kWidth = 16 / sizeof(T), kAtOnce = 2;
  struct alignas(16) Values {
    T values[kWidth];
  };
  __shared__ float sums[kMaxPrologueRuns];
  const NormBuffers& b = p.buffers;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int pieces = p.h / kWidth, runs = NormRuns(p.h), all_runs = p.rows * runs;
  // Run `first` and the one kPrologueWarps after it are loaded together.
#pragma unroll 1
  for (int first = warp; first < all_runs; first += kAtOnce * kPrologueWarps) {
    Values sum[kAtOnce] = {}, added[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int run = first + i * kPrologueWarps, piece = run % runs * 32 + lane;
      if (run >= all_runs || piece >= pieces) continue;
      const int at = run / runs * pieces + piece;
      sum[i] = static_cast<const Values*>(b.x)[at];
      if (b.added != nullptr) added[i] = static_cast<const Values*>(b.added)[at];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int run = first + i * kPrologueWarps, piece = run % runs * 32 + lane;
      if (run >= all_runs) continue;
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (b.added != nullptr) {
          sum[i].values[j] = FromFloat<T>(ToFloat(sum[i].values[j]) + ToFloat(added[i].values[j]));
        }
        const float value = ToFloat(sum[i].values[j]);
        squares += value * value;
      }
      squares = WarpSum(squares);  // lanes past the end of the row have zeros
      if (lane == 0) sums[run] = squares;
      if (piece >= pieces) continue;
      std::memcpy(place(run / runs, piece), &sum[i], sizeof(uint4));
      if (b.added != nullptr && blockIdx.x == 0) {
        static_cast<Values*>(b.sum)[run / runs * pieces + piece] = sum[i];
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int run = warp; run < all_runs; run += kPrologueWarps) {
    const int row = run / runs, piece = run % runs * 32 + lane;
    const float squares = WarpSum(lane < runs ? sums[row * runs + lane] : 0.0f);
    const float inverse_root = InverseRoot(squares, p.h, p.eps);
    if (piece >= pieces) continue;
    Values values;
    std::memcpy(&values, place(row, piece), sizeof(uint4));
    if (p.wide_weight) {
      float weight[kWidth];
      std::memcpy(weight, static_cast<const float4*>(b.weight) + 2 * piece, sizeof(weight));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values.values[j] = Normalized<T>(ToFloat(values.values[j]), inverse_root, weight[j]);
      }
    } else {
      const Values weight = static_cast<const Values*>(b.weight)[piece];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values.values[j] = Normalized<T>(ToFloat(values.values[j]), inverse_root, weight.values[j]);
      }
    }
    std::memcpy(place(row, piece), &values, sizeof(uint4));
    if (blockIdx.x == 0) static_cast<Values*>(b.y)[row * pieces + piece] = values;
  }
}

}  // namespace nvfp4
