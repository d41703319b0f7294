// One row of an RMS norm in the registers of a block:
//
//   sum = x + added                                       rounded to the type of x
//   y = weight * sum / sqrt(mean(sum^2) + eps)
//
// The normalized values are float32. They are rounded to the type of the weight, multiplied by it,
// and rounded to the type of x, as `normalize` of numerics/norms.py does.
//
// A thread has pieces of 16 bytes of the row. The squares of 32 neighboring pieces are added first,
// and then these sums, so that the bits of y do not depend on the number of threads.
//
// The kernel of the norm and kernels that normalize their own input (InputNorm in launch.h) share
// this. The input is one row then, and each block computes all of it.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/norms/normalized.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {

template <typename T>
constexpr int kNormWidth = 16 / static_cast<int>(sizeof(T));  // values of a piece

// 16 bytes of values in registers, two at a time. The bytes are loaded and stored at once, which
// the compiler does not do for each struct of words.
template <typename T>
struct WordsOf16 {
  static constexpr int kCount = kNormWidth<T> / 2;
  Word<T> words[kCount];

  __device__ __forceinline__ explicit WordsOf16(const uint4& bytes) {
    memcpy(words, &bytes, sizeof(bytes));
  }
  __device__ __forceinline__ uint4 Bytes() const {
    uint4 bytes;
    memcpy(&bytes, words, sizeof(bytes));
    return bytes;
  }
};

// The pieces of thread `thread` of `threads` of the block, a multiple of 32: piece `thread`, then
// each threads-th one, up to kPieces of them.
template <typename T, typename W, int kPieces>
struct NormPieces {
  static constexpr int kWidth = kNormWidth<T>;
  static constexpr int kWeights = static_cast<int>(sizeof(W)) * kWidth / 16;  // 16 bytes each

  int pieces, thread, threads;
  uint4 x[kPieces] = {}, added[kPieces];
  uint4 weight[kPieces][kWeights];

  __device__ __forceinline__ NormPieces(int32_t h, int own, int all)
      : pieces(h / kWidth), thread(own), threads(all) {}

  // Calls function(i, its place in the row) for the pieces of this thread.
  template <typename Function>
  __device__ __forceinline__ void Each(const Function& function) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = thread + i * threads;
      if (piece < pieces) function(i, piece);
    }
  }

  __device__ __forceinline__ void LoadX(const void* row) {
    Each([&](int i, int piece) { x[i] = static_cast<const uint4*>(row)[piece]; });
  }
  __device__ __forceinline__ void LoadAdded(const void* row) {
    Each([&](int i, int piece) { added[i] = static_cast<const uint4*>(row)[piece]; });
  }
  __device__ __forceinline__ void LoadWeight(const void* row) {
    Each([&](int i, int piece) {
#pragma unroll
      for (int j = 0; j < kWeights; ++j) {
        weight[i][j] = static_cast<const uint4*>(row)[piece * kWeights + j];
      }
    });
  }

  // Adds what LoadAdded has loaded to x, and calls store(piece, sum).
  template <typename Store>
  __device__ __forceinline__ void Add(const Store& store) {
    Each([&](int i, int piece) {
      WordsOf16<T> sum(x[i]);
      const WordsOf16<T> more(added[i]);
#pragma unroll
      for (int j = 0; j < sum.kCount; ++j) {
        const float2 own = ToFloats(sum.words[j]), other = ToFloats(more.words[j]);
        sum.words[j] = FromFloats<T>(own.x + other.x, own.y + other.y);
      }
      x[i] = sum.Bytes();
      store(piece, x[i]);
    });
  }

  // Normalizes x, and calls store(piece, y). `groups` is shared memory for a number for each 32
  // pieces that the block may have. All threads of the block call this.
  template <typename Store>
  __device__ __forceinline__ void Normalize(float eps, float* groups, const Store& store) {
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const WordsOf16<T> own(x[i]);
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < own.kCount; ++j) {
        const float2 values = ToFloats(own.words[j]);
        squares += values.x * values.x;
        squares += values.y * values.y;
      }
      squares = WarpSum(squares);
      if (lane == 0) groups[i * warps + warp] = squares;
    }
    __syncthreads();
    float squares = 0.0f;
#pragma unroll 1
    for (int group = lane; group < kPieces * warps; group += 32) squares += groups[group];
    const float inverse_root = InverseRoot(WarpSum(squares), pieces * kWidth, eps);
    Each([&](int i, int piece) {
      WordsOf16<T> y(x[i]);
#pragma unroll
      for (int j = 0; j < y.kCount; ++j) {
        constexpr int kInPiece = WordsOf16<W>::kCount;
        const WordsOf16<W> weights(weight[i][j / kInPiece]);
        y.words[j] =
            NormalizedWord<T, W>(ToFloats(y.words[j]), inverse_root, weights.words[j % kInPiece]);
      }
      store(piece, y.Bytes());
    });
  }
};

// Stands for the type of the weight of a norm where a kernel's input is not the result of one.
struct NoNorm {};

// The norm of a kernel's input, as the kernel gets it.
struct InputNormRow {
  NormBuffers buffers;
  int32_t h;
  float eps;
};

inline InputNormRow RowOf(const InputNorm& norm) {
  return {norm.buffers, static_cast<int32_t>(norm.call.h), norm.call.eps};
}

// Loads what the norm reads, after the wait for the preceding kernel. All loads are in flight
// together, so that one of them before the wait would gain nothing.
template <typename Pieces>
__device__ __forceinline__ void LoadInput(const InputNormRow& norm, Pieces& pieces) {
  pieces.LoadX(norm.buffers.x);
  if (norm.buffers.added != nullptr) pieces.LoadAdded(norm.buffers.added);
  pieces.LoadWeight(norm.buffers.weight);
}

// Computes the norm. Its row goes to `row` in shared memory, and also to global memory if `writes`,
// as one block of the kernel does. No thread may read the row before a barrier of the block.
template <typename Pieces>
__device__ __forceinline__ void FinishNorm(const InputNormRow& norm, bool writes, float* groups,
                                           uint8_t* row, Pieces& pieces) {
  if (norm.buffers.added != nullptr) {
    pieces.Add([&](int piece, const uint4& sum) {
      if (writes) static_cast<uint4*>(norm.buffers.sum)[piece] = sum;
    });
  }
  pieces.Normalize(norm.eps, groups, [&](int piece, const uint4& y) {
    reinterpret_cast<uint4*>(row)[piece] = y;
    if (writes) static_cast<uint4*>(norm.buffers.y)[piece] = y;
  });
}

}  // namespace nvfp4
