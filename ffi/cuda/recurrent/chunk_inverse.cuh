// The corrections of the delta rule, for the tokens of one chunk of one value head:
//
//   wanted = T beta v,  known = -T beta D k,  T = (I + L)^-1
//
// L is float32, and so is T. It is computed from small blocks to large ones: blocks of 16 by
// substitution, and then, for pairs of neighbors, [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1,
// C^-1]]. See numerics/triangular_inverse.py for why no shorter form of the inverse is accurate.
// The products of T with values and keys take TensorFloat-32.
#pragma once

#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/recurrent/chunk_prepare.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"

namespace nvfp4 {
namespace {

constexpr int kBlock = 16;      // blocks of this size are inverted by substitution
constexpr float kTiny = 1e-6f;  // added to squared lengths, as in ops/recurrent/gated_delta.py

template <int kChunk>
struct System {
  Matrix<kChunk> below;    // L; above its diagonal, blocks of intermediate results
  Matrix<kChunk> inverse;  // T, without the blocks above its diagonal
};

// Factors of the rows of values and of keys.
template <int kChunk>
struct RowFactors {
  float values[kChunk];  // beta
  float keys[kChunk];    // what makes -beta D k of the keys in shared memory
};

// Inverts the blocks on the diagonal. Each thread computes one column of one block.
template <int kChunk>
__device__ __forceinline__ void InvertBlocks(System<kChunk>& system) {
  const int first = threadIdx.x / kBlock * kBlock, column = threadIdx.x % kBlock;
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < kBlock; ++j) {
#pragma unroll
    for (int i = j + 1; i < kBlock; ++i) x[i] -= system.below.At(first + i, first + j) * x[j];
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) system.inverse.At(first + i, first + column) = x[i];
}

// Adds `factor` times four numbers to four sums.
__device__ __forceinline__ void AddTimes(float4& sums, float factor, const float4& numbers) {
  sums.x += factor * numbers.x;
  sums.y += factor * numbers.y;
  sums.z += factor * numbers.z;
  sums.w += factor * numbers.w;
}

// Joins neighboring inverses of kSize rows. B A^-1 is stored above the diagonal of L.
template <int kChunk, int kSize>
__device__ __forceinline__ void JoinBlocks(System<kChunk>& system) {
  constexpr int kFours = kSize * kSize / 4, kCount = kChunk / (2 * kSize) * kFours;
  static_assert(kCount <= kThreads, "each thread has at most four neighboring results");
  const int first = threadIdx.x / kFours * 2 * kSize, index = threadIdx.x % kFours;
  const int row = index / (kSize / 4), column = index % (kSize / 4) * 4, second = first + kSize;
  const bool active = threadIdx.x < kCount;
  if (active) {
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = column / kBlock * kBlock; i < kSize; ++i) {
      AddTimes(sums, system.below.At(second + row, first + i),
               system.inverse.Four(first + i, first + column));
    }
    system.below.Four(first + row, second + column) = sums;
  }
  __syncthreads();
  if (active) {
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = 0; i < row / kBlock * kBlock + kBlock; ++i) {
      AddTimes(sums, -system.inverse.At(second + row, second + i),
               system.below.Four(first + i, second + column));
    }
    system.inverse.Four(second + row, first + column) = sums;
  }
  __syncthreads();
}

// Multiplies T by 16 columns of two matrices, of which right(matrix, tile, b) returns the lane's
// right operands of a tile of 8 rows. Lane 4 g + q gets columns 4 q to 4 q + 3 of rows g and g + 8
// of each tile of 16 rows, and passes them to store(matrix, row, four). One half of the rows
// follows the other, because registers do not suffice for all sums.
template <int kChunk, typename Right, typename Store>
__device__ __forceinline__ void MultiplyInverse(System<kChunk>& system, Right right, Store store) {
  constexpr int kTiles = kChunk / 32;  // of 16 rows, in a half
  const int thread = ReadThread(), g = thread % 32 / 4, q = thread % 4;
#pragma unroll
  for (int first = 0; first < 2 * kTiles; first += kTiles) {
    if (first > 0) __syncwarp();  // otherwise the compiler loads T for both halves at once
    float sums[2][kTiles][2][4] = {};
#pragma unroll
    for (int k = 0; k < 2 * (first + kTiles); ++k) {
      const int left = 8 * k + q;
      uint32_t b[2][4];
      right(0, k, b[0]);
      right(1, k, b[1]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (first + i < k / 2) continue;  // a tile of T that is 0
        const int row = 16 * (first + i) + g;
        const uint32_t a[4] = {RoundToTf32(system.inverse.At(row, left)),
                               RoundToTf32(system.inverse.At(row + 8, left)),
                               RoundToTf32(system.inverse.At(row, left + 4)),
                               RoundToTf32(system.inverse.At(row + 8, left + 4))};
#pragma unroll
        for (int matrix = 0; matrix < 2; ++matrix) {
          MultiplyAddTf32(sums[matrix][i][0], a, b[matrix][0], b[matrix][1]);
          MultiplyAddTf32(sums[matrix][i][1], a, b[matrix][2], b[matrix][3]);
        }
      }
    }
#pragma unroll
    for (int matrix = 0; matrix < 2; ++matrix) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const auto& s = sums[matrix][i];
        const int row = 16 * (first + i) + g;
        store(matrix, row, make_float4(s[0][0], s[1][0], s[0][1], s[1][1]));
        store(matrix, row + 8, make_float4(s[0][2], s[1][2], s[0][3], s[1][3]));
      }
    }
  }
}

// Inverts a system, and writes "wanted" and "known" of one value head. `number` is that of the
// chunk among those of all value heads, and `token` that of its first token among those of all
// rows. All threads of the block have written the system.
template <int kChunk>
__device__ __forceinline__ void WriteCorrections(System<kChunk>& system, const float* keys,
                                                 const RowFactors<kChunk>& factors,
                                                 const DeltaRuleCall& c, const DeltaRuleBuffers& p,
                                                 const ChunkBuffers& chunks, int head,
                                                 int64_t number, int64_t token, int present) {
  const int heads = c.key_heads * c.shared, thread = ReadThread();
  const int g = thread % 32 / 4, q = thread % 4, column = thread / 32 * 16;
  __syncthreads();
  if (thread < kChunk) InvertBlocks(system);
  // The values arrive while the blocks are joined.
  const int64_t place = (token * heads + head) * c.e + column;  // of the chunk's first token
  int stride = heads * c.e;                                     // from a token to the next one
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(stride));  // otherwise the offsets of all rows would stay in registers
#endif
  const float* const values = p.v + place + 2 * g;
  float2 rows[kChunk / 8][2];  // two neighboring columns of rows q and q + 4 of each tile of 8 rows
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * i + 4 * half + q;
      rows[i][half] = make_float2(0.0f, 0.0f);
      if (row < present && column + 2 * g < c.e) {
        rows[i][half] = *reinterpret_cast<const float2*>(values + int64_t{row} * stride);
      }
    }
  }
  __syncthreads();
  JoinBlocks<kChunk, kBlock>(system);
  if constexpr (kChunk == kLargeChunk) JoinBlocks<kChunk, 2 * kBlock>(system);

  // T beta v and -T beta D k. The factors are those of the rows of v and k.
  float* const wanted = p.y + place + 4 * q;
  float4* const known = reinterpret_cast<float4*>(chunks.known + number * kChunk * kChunkWidth);
  MultiplyInverse<kChunk>(
      system,
      [&](int matrix, int tile, uint32_t (&b)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 8 * tile + 4 * half + q;
          const float* const unit = keys + 4 * TilePlace(row, column / 4 + g / 2);
          const float2 pair =
              matrix == 0 ? rows[tile][half] : reinterpret_cast<const float2*>(unit)[g % 2];
          const float factor = matrix == 0 ? factors.values[row] : factors.keys[row];
          b[half] = RoundToTf32(factor * pair.x);
          b[2 + half] = RoundToTf32(factor * pair.y);
        }
      },
      [&](int matrix, int row, const float4& four) {
        if (matrix == 1) {
          known[TokenPlace(row, column / 4 + q)] = RoundFour(four);
        } else if (row < present && column + 4 * q < c.e) {
          *reinterpret_cast<float4*>(wanted + int64_t{row} * stride) = four;
        }
      });
  __syncthreads();
}

}  // namespace
}  // namespace nvfp4
