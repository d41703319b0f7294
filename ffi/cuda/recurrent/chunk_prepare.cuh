// What the first kernels of recurrences over prompts share: tiles of queries and keys, their
// products, and the decays between the tokens of a chunk.
//
// A sum of logarithms between two tokens is the difference of two sums from the start of the chunk.
// It would lose digits in float32, so the sums are float64, and are stored as two float32 numbers.
#pragma once

#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"
#include "cuda/recurrent/recurrent.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr double kLeastLog = -1000.0;  // e^-1000 is 0 in float32, and differences remain finite

static_assert(kWarps * 16 == kChunkWidth, "each warp has 16 columns of keys and values");

// The stride of a matrix with kChunk columns. The threads of a warp that read one column of 8 rows
// have other banks.
template <int kChunk>
constexpr int kStride = kChunk + 4;

template <int kChunk>
struct Matrix {
  float of[kChunk * kStride<kChunk>];

  __device__ __forceinline__ float& At(int row, int column) {
    return of[row * kStride<kChunk> + column];
  }
  __device__ __forceinline__ float4& Four(int row, int column) {
    return reinterpret_cast<float4&>(At(row, column));
  }
};

// Returns what moves the units of neighboring rows to other banks by an exclusive or. Then 8 rows
// have other banks for one unit, 4 rows for two neighboring units, and 2 rows for four.
__device__ __forceinline__ int RowBank(int row) { return (row & 7) ^ (row & 1) << 2; }

// Returns the place of 16 bytes, unit `unit` of `row`, in a tile with rows of kChunkWidth floats.
__device__ __forceinline__ int TilePlace(int row, int unit) {
  return row * (kChunkWidth / 4) + (unit ^ RowBank(row));
}

// Starts copies of the keys or queries of a chunk to a tile, with zeros for tokens and channels
// that do not exist. `source` is the first token.
template <int kChunk>
__device__ __forceinline__ void CopyTile(float* tile, const float* source, int64_t stride,
                                         int64_t present, int width) {
  const uint32_t target = SharedAddress(tile);
  const int unit = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kChunk / kWarps; ++i) {
    const int row = kWarps * i + threadIdx.x / 32;
    const bool exists = row < present && 4 * unit < width;
    const float* place = exists ? source + row * stride + 4 * unit : source;
    CopyOrZero(target + 16 * TilePlace(row, unit), place, exists ? 16 : 0);
  }
}

__device__ __forceinline__ float4 TimesFour(const float4& four, float factor) {
  return make_float4(four.x * factor, four.y * factor, four.z * factor, four.w * factor);
}

__device__ __forceinline__ float4 MultiplyFours(const float4& x, const float4& y) {
  return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}

// Returns the first `count` of four numbers, and zeros.
__device__ __forceinline__ float4 KeepBefore(const float4& four, int count) {
  return make_float4(count > 0 ? four.x : 0.0f, count > 1 ? four.y : 0.0f,
                     count > 2 ? four.z : 0.0f, count > 3 ? four.w : 0.0f);
}

__device__ __forceinline__ float4 RoundFour(const float4& four) {
  return make_float4(__uint_as_float(RoundToTf32(four.x)), __uint_as_float(RoundToTf32(four.y)),
                     __uint_as_float(RoundToTf32(four.z)), __uint_as_float(RoundToTf32(four.w)));
}

// Writes the rounded queries and keys of a chunk in the orders of the second kernel.
template <int kChunk>
__device__ __forceinline__ void WriteTiles(const float* query_tile, const float* key_tile,
                                           float* queries, float* keys) {
  constexpr int kSteps = kChunk * kChunkWidth / 4 / kThreads;
  const float4* from = reinterpret_cast<const float4*>(query_tile);
  float4* to = reinterpret_cast<float4*>(queries);
#pragma unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kThreads + threadIdx.x;
    const int row = i / (kChunkWidth / 4), unit = i % (kChunkWidth / 4);
    to[TokenPlace(row, unit)] = RoundFour(from[TilePlace(row, unit)]);
  }
  from = reinterpret_cast<const float4*>(key_tile);
  to = reinterpret_cast<float4*>(keys);
#pragma unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kThreads + threadIdx.x;
    const int pair = i / (kChunkWidth / 2), two = i % (kChunkWidth / 2) / 8, n = i % 8;
    const int unit = StateRow(2 * two, n) / 4;
    const float4 x = from[TilePlace(2 * pair, unit)], y = from[TilePlace(2 * pair + 1, unit)];
    const float4 both =
        n % 2 == 0 ? make_float4(x.x, y.x, x.z, y.z) : make_float4(x.y, y.y, x.w, y.w);
    to[KeyPlace(pair, two, n)] = RoundFour(both);
  }
}

// pairs = q k.T in TensorFloat-32, in tiles of 16 x 8 that reach the diagonal or lie below.
template <int kChunk>
__device__ __forceinline__ void MultiplyQueries(const float* query_tile, const float* key_tile,
                                                Matrix<kChunk>& pairs, int width) {
  constexpr int kRowTiles = kChunk / 16, kParts = kWarps / kRowTiles;
  constexpr int kTiles = kChunk / 8 / kParts;  // of columns, for each warp
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const int row = warp % kRowTiles * 16, column = warp / kRowTiles * kTiles * 8;
  const float4* queries = reinterpret_cast<const float4*>(query_tile);
  const float4* keys = reinterpret_cast<const float4*>(key_tile);
  float sums[kTiles][4] = {};
#pragma unroll 2
  for (int first = 0; first < width / 4; first += 4) {
    // k = q of the first product is float 4q of 16, k = q + 4 the next one, and so on. Units at
    // `width` and behind it are 0.
    const float4 x = queries[TilePlace(row + g, first + q)];
    const float4 y = queries[TilePlace(row + 8 + g, first + q)];
    const uint32_t a[2][4] = {
        {RoundToTf32(x.x), RoundToTf32(y.x), RoundToTf32(x.y), RoundToTf32(y.y)},
        {RoundToTf32(x.z), RoundToTf32(y.z), RoundToTf32(x.w), RoundToTf32(y.w)}};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (column + 8 * i > row + 15) continue;
      const float4 b = keys[TilePlace(column + 8 * i + g, first + q)];
      MultiplyAddTf32(sums[i], a[0], RoundToTf32(b.x), RoundToTf32(b.y));
      MultiplyAddTf32(sums[i], a[1], RoundToTf32(b.z), RoundToTf32(b.w));
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int left = column + 8 * i + 2 * q;
    pairs.At(row + g, left) = sums[i][0];
    pairs.At(row + g, left + 1) = sums[i][1];
    pairs.At(row + 8 + g, left) = sums[i][2];
    pairs.At(row + 8 + g, left + 1) = sums[i][3];
  }
}

// The sums of the logarithms of the decays of one head, from the start of the chunk.
template <int kChunk>
struct alignas(16) LogSums {
  float high[kChunk], low[kChunk];

  // One warp sums log(token), a double, over the first tokens.
  template <typename Log>
  __device__ __forceinline__ void Sum(Log log, int64_t present) {
    constexpr int kOwn = kChunk / 32;  // tokens of a lane
    const int lane = ReadThread() % 32;
    double sums[kOwn], total = 0.0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int token = lane * kOwn + i;
      const double value = token < present ? log(token) : 0.0;
      total += value < kLeastLog ? kLeastLog : value;  // keeps NaN
      sums[i] = total;
    }
    double before = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double other = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += other;
    }
    before -= total;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const double sum = before + sums[i];
      const float rounded = static_cast<float>(sum);
      high[lane * kOwn + i] = rounded;
      low[lane * kOwn + i] = static_cast<float>(sum - rounded);
    }
  }

  // Returns the decay of the state from the start of the chunk to token i.
  __device__ __forceinline__ float DecayTo(int i) const { return expf(high[i] + low[i]); }

  // Returns the decay from token j to a token i behind it.
  __device__ __forceinline__ float DecayBetween(int i, int j) const {
    return expf((high[i] - high[j]) + (low[i] - low[j]));
  }

  // Returns the decays from tokens j to j + 3 to token i. Those from tokens behind i mean nothing.
  __device__ __forceinline__ float4 DecaysBetween(int i, int j) const {
    const float4 from_high = reinterpret_cast<const float4&>(high[j]);
    const float4 from_low = reinterpret_cast<const float4&>(low[j]);
    const float to_high = high[i], to_low = low[i];
    return make_float4(expf((to_high - from_high.x) + (to_low - from_low.x)),
                       expf((to_high - from_high.y) + (to_low - from_low.y)),
                       expf((to_high - from_high.z) + (to_low - from_low.z)),
                       expf((to_high - from_high.w) + (to_low - from_low.w)));
  }
};

// Writes zeros to the results of tokens `begin` to `end` - 1 of a chunk. `y` is where the first
// token of the chunk has the `floats` results of the heads of a block. Each warp has every eighth
// token.
__device__ __forceinline__ void WriteZeros(float* y, int64_t stride, int floats, int64_t begin,
                                           int64_t end) {
#pragma unroll 1
  for (int64_t token = begin + threadIdx.x / 32; token < end; token += kWarps) {
    float4* const units = reinterpret_cast<float4*>(y + token * stride);
#pragma unroll 4
    for (int unit = threadIdx.x % 32; unit < floats / 4; unit += 32) {
      units[unit] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

}  // namespace
}  // namespace nvfp4
