// The gated delta rule for prompts, first kernel: what the tokens of each chunk contribute.
//
// With D_ij, the decay from token j to token i, and D_i, the decay from the start of the chunk:
//
//   pairs_ij = D_ij (q_i . k_j) for i >= j
//   L_ij = beta_i D_ij (k_i . k_j) for i > j,  T = (I + L)^-1
//   wanted = T beta v,  known = -T beta D k
//
// If the call says so, keys are first scaled to length 1, and queries to the length `scale`.
//
// A block handles one chunk of one key head, for all its value heads: these share the products of
// keys and queries with keys. The system and its inverse are computed in float32. The products of
// queries with keys, and of T with values and keys, take TensorFloat-32.
//
// T is computed from small blocks to large ones: blocks of 16 by substitution, and then, for pairs
// of neighbors, [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]. See
// numerics/triangular_inverse.py for why no shorter form of the inverse is accurate.
//
// Padding behind the tokens of a row is not read, and its results become zeros. A block whose chunk
// is all padding does nothing else, so a row costs its tokens.
//
// A sum of logarithms between two tokens is the difference of two sums from the start of the chunk.
// It would lose digits in float32, so the sums are float64, and are stored as two float32 numbers.
//
// Prediction for 4096 tokens of 16 key heads and 32 value heads with 128 x 128 on an H200: 370 MB,
// which take 92 us at 4 TB/s. k.k in float32 takes 2600 cycles of each of 1024 blocks, 12 us of a
// multiprocessor's time with two blocks at once; the rest is products on tensor cores.
//
// Needs: d and e at most 128 and multiples of 4. cuda_mixer_bindings.cc checks these. Tests:
// tests/emulation/test_emulation_delta_rule.py, tests/gpu/test_cuda_delta_rule.py.
#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/delta_rule.cuh"
#include "cuda/recurrent/recurrent.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlock = 16;             // blocks of this size are inverted by substitution
constexpr float kTiny = 1e-6f;         // as in backends/gated_delta.py
constexpr double kLeastLog = -1000.0;  // e^-1000 is 0 in float32, and differences remain finite

static_assert(kWarps * 16 == kRuleWidth, "each warp has 16 columns of keys and values");

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

template <int kChunk>
struct System {
  Matrix<kChunk> below;    // L; above its diagonal, blocks of intermediate results
  Matrix<kChunk> inverse;  // T, without the blocks above its diagonal
};

template <int kChunk>
struct Workspace {
  float keys[kChunk * kRuleWidth];  // a tile (TilePlace)
  union {
    float queries[kChunk * kRuleWidth];  // a tile, until query_pairs are there
    System<kChunk> system;
  };
  Matrix<kChunk> key_pairs, query_pairs;  // products of keys and queries with keys
  float high[kChunk], low[kChunk];        // sums of logarithms from the start of the chunk
  float faded[kChunk], beta[kChunk];
};

// Returns the place of 16 bytes, unit `unit` of `row`, in a tile with rows of kRuleWidth floats.
// The exclusive or moves the units of neighboring rows to other banks.
__device__ __forceinline__ int TilePlace(int row, int unit) {
  return row * (kRuleWidth / 4) + (unit ^ (row & 7));
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

__device__ __forceinline__ float4 RoundFour(const float4& four) {
  return make_float4(__uint_as_float(RoundToTf32(four.x)), __uint_as_float(RoundToTf32(four.y)),
                     __uint_as_float(RoundToTf32(four.z)), __uint_as_float(RoundToTf32(four.w)));
}

// Scales each row of a tile to `length`. Each warp has every eighth row.
template <int kChunk>
__device__ __forceinline__ void NormalizeTile(float* tile, float length) {
  float4* units = reinterpret_cast<float4*>(tile);
#pragma unroll 2
  for (int i = 0; i < kChunk / kWarps; ++i) {
    const int row = kWarps * i + threadIdx.x / 32;
    float4& place = units[TilePlace(row, threadIdx.x % 32)];
    const float4 x = place;
    const float sum = WarpSum(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
    place = TimesFour(x, ReciprocalRoot(sum + kTiny) * length);
  }
}

// Writes the rounded queries and keys of a chunk in the orders of the second kernel.
template <int kChunk>
__device__ __forceinline__ void WriteTiles(const Workspace<kChunk>& w, float* queries,
                                           float* keys) {
  constexpr int kSteps = kChunk * kRuleWidth / 4 / kThreads;
  const float4* from = reinterpret_cast<const float4*>(w.queries);
  float4* to = reinterpret_cast<float4*>(queries);
#pragma unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kThreads + threadIdx.x;
    const int row = i / (kRuleWidth / 4), unit = i % (kRuleWidth / 4);
    to[TokenPlace(row, unit)] = RoundFour(from[TilePlace(row, unit)]);
  }
  from = reinterpret_cast<const float4*>(w.keys);
  to = reinterpret_cast<float4*>(keys);
#pragma unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const int i = step * kThreads + threadIdx.x;
    const int pair = i / (kRuleWidth / 2), two = i % (kRuleWidth / 2) / 8, n = i % 8;
    const int unit = StateRow(2 * two, n) / 4;
    const float4 x = from[TilePlace(2 * pair, unit)], y = from[TilePlace(2 * pair + 1, unit)];
    const float4 both =
        n % 2 == 0 ? make_float4(x.x, y.x, x.z, y.z) : make_float4(x.y, y.y, x.w, y.w);
    to[KeyPlace(pair, two, n)] = RoundFour(both);
  }
}

// key_pairs = k k.T in float32, in blocks of 16 x 16 at and below the diagonal.
template <int kChunk>
__device__ __forceinline__ void MultiplyKeys(Workspace<kChunk>& w, int width) {
  constexpr int kSide = kChunk / 16;
  const int row = threadIdx.x / 16, column = threadIdx.x % 16;
  const float4* units = reinterpret_cast<const float4*>(w.keys);
  float sums[kSide][kSide] = {};
#pragma unroll 2
  for (int unit = 0; unit < width / 4; ++unit) {
    float4 left[kSide], right[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      left[i] = units[TilePlace(row + 16 * i, unit)];
      right[i] = units[TilePlace(column + 16 * i, unit)];
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        sums[i][j] += left[i].x * right[j].x;
        sums[i][j] += left[i].y * right[j].y;
        sums[i][j] += left[i].z * right[j].z;
        sums[i][j] += left[i].w * right[j].w;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) w.key_pairs.At(row + 16 * i, column + 16 * j) = sums[i][j];
  }
}

// query_pairs = q k.T in TensorFloat-32, in tiles of 16 x 8 that reach the diagonal or lie below.
template <int kChunk>
__device__ __forceinline__ void MultiplyQueries(Workspace<kChunk>& w, int width) {
  constexpr int kRowTiles = kChunk / 16, kParts = kWarps / kRowTiles;
  constexpr int kTiles = kChunk / 8 / kParts;  // of columns, for each warp
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const int row = warp % kRowTiles * 16, column = warp / kRowTiles * kTiles * 8;
  const float4* queries = reinterpret_cast<const float4*>(w.queries);
  const float4* keys = reinterpret_cast<const float4*>(w.keys);
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
    w.query_pairs.At(row + g, left) = sums[i][0];
    w.query_pairs.At(row + g, left + 1) = sums[i][1];
    w.query_pairs.At(row + 8 + g, left) = sums[i][2];
    w.query_pairs.At(row + 8 + g, left + 1) = sums[i][3];
  }
}

// One warp sums the logarithms g of the decays. `g` is that of the first token.
template <int kChunk>
__device__ __forceinline__ void SumLogs(Workspace<kChunk>& w, const float* g, int64_t stride,
                                        int64_t present) {
  constexpr int kOwn = kChunk / 32;  // tokens of a lane
  const int lane = threadIdx.x % 32;
  double sums[kOwn], total = 0.0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int token = lane * kOwn + i;
    const double value = token < present ? g[token * stride] : 0.0;
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
    const float high = static_cast<float>(sum);
    w.high[lane * kOwn + i] = high;
    w.low[lane * kOwn + i] = static_cast<float>(sum - high);
  }
}

// Returns the decay of the state from token j to a token i behind it.
template <int kChunk>
__device__ __forceinline__ float DecayBetween(const Workspace<kChunk>& w, int i, int j) {
  return expf((w.high[i] - w.high[j]) + (w.low[i] - w.low[j]));
}

// Writes the pairs of queries to `pairs`, and L to the system.
template <int kChunk>
__device__ __forceinline__ void DecayPairs(Workspace<kChunk>& w, float* pairs) {
#pragma unroll 4
  for (int step = 0; step < kChunk * kChunk / kThreads; ++step) {
    const int index = step * kThreads + threadIdx.x;
    const int i = index / kChunk, j = index % kChunk;
    float pair = 0.0f, below = 0.0f;
    if (j <= i) {
      const float decay = DecayBetween(w, i, j);
      pair = decay * w.query_pairs.At(i, j);
      if (j < i) below = w.beta[i] * decay * w.key_pairs.At(i, j);
    }
    pairs[4 * PairPlace(kChunk, i, j / 4) + j % 4] = __uint_as_float(RoundToTf32(pair));
    w.system.below.At(i, j) = below;
  }
}

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
    for (int i = column / kBlock * kBlock; i < kSize; ++i) {
      AddTimes(sums, system.below.At(second + row, first + i),
               system.inverse.Four(first + i, first + column));
    }
    system.below.Four(first + row, second + column) = sums;
  }
  __syncthreads();
  if (active) {
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < row / kBlock * kBlock + kBlock; ++i) {
      AddTimes(sums, -system.inverse.At(second + row, second + i),
               system.below.Four(first + i, second + column));
    }
    system.inverse.Four(second + row, first + column) = sums;
  }
  __syncthreads();
}

// The rows of a right operand that a lane has, in the tiles of 8 rows: two neighboring columns of
// rows q and q + 4.
template <int kChunk>
using Rows = float2[kChunk / 8][2];

// Multiplies T, with its columns times `scale`, by 16 columns of a matrix. Lane 4 g + q gets
// columns 4 q to 4 q + 3 of rows g and g + 8 of each tile of 16 rows, and passes them to store(row,
// four).
template <int kChunk, typename Scale, typename Store>
__device__ __forceinline__ void MultiplyInverse(System<kChunk>& system, const Rows<kChunk>& rows,
                                                Scale scale, Store store) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  float sums[kChunk / 16][2][4] = {};
#pragma unroll
  for (int k = 0; k < kChunk / 8; ++k) {
    const int left = 8 * k + q;
    const float near = scale(left), far = scale(left + 4);
    const uint32_t b[4] = {RoundToTf32(rows[k][0].x), RoundToTf32(rows[k][1].x),
                           RoundToTf32(rows[k][0].y), RoundToTf32(rows[k][1].y)};
#pragma unroll
    for (int i = k / 2; i < kChunk / 16; ++i) {  // the tiles of T ahead of it are 0
      const int row = 16 * i + g;
      const uint32_t a[4] = {RoundToTf32(near * system.inverse.At(row, left)),
                             RoundToTf32(near * system.inverse.At(row + 8, left)),
                             RoundToTf32(far * system.inverse.At(row, left + 4)),
                             RoundToTf32(far * system.inverse.At(row + 8, left + 4))};
      MultiplyAddTf32(sums[i][0], a, b[0], b[1]);
      MultiplyAddTf32(sums[i][1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < kChunk / 16; ++i) {
    const auto& s = sums[i];
    store(16 * i + g, make_float4(s[0][0], s[1][0], s[0][1], s[1][1]));
    store(16 * i + 8 + g, make_float4(s[0][2], s[1][2], s[0][3], s[1][3]));
  }
}

// Handles one value head of the chunk. `number` is that of the chunk among those of all value
// heads, and `token` that of its first token among those of all rows.
template <int kChunk>
__device__ __forceinline__ void PrepareHead(Workspace<kChunk>& w, const DeltaRuleCall& c,
                                            const DeltaRuleBuffers& p, const ChunkBuffers& chunks,
                                            int head, int64_t number, int64_t token,
                                            int64_t present) {
  const int heads = c.key_heads * c.shared, thread = threadIdx.x;
  const int g = thread % 32 / 4, q = thread % 4, column = thread / 32 * 16;
  const int64_t scalars = token * heads + head;
  if (thread < 32) SumLogs(w, p.g + scalars, heads, present);
  if (thread >= 32 && thread < 32 + kChunk) {
    const int i = thread - 32;
    w.beta[i] = i < present ? p.beta[scalars + static_cast<int64_t>(i) * heads] : 0.0f;
  }
  __syncthreads();
  if (thread < kChunk) {
    float* decays = chunks.decays + number * 2 * kChunk;
    w.faded[thread] = decays[thread] = expf(w.high[thread] + w.low[thread]);
    decays[kChunk + thread] = DecayBetween(w, kChunk - 1, thread);
  }
  DecayPairs(w, chunks.pairs + number * kChunk * kChunk);
  __syncthreads();
  if (thread < kChunk) InvertBlocks(w.system);
  // The values arrive while the blocks are joined.
  const float* values = p.v + (token * heads + head) * c.e + column + 2 * g;
  Rows<kChunk> rows;
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * i + 4 * half + q;
      rows[i][half] = make_float2(0.0f, 0.0f);
      if (row < present && column + 2 * g < c.e) {
        rows[i][half] =
            *reinterpret_cast<const float2*>(values + static_cast<int64_t>(row) * heads * c.e);
      }
    }
  }
  __syncthreads();
  JoinBlocks<kChunk, kBlock>(w.system);
  if constexpr (kChunk == 64) JoinBlocks<kChunk, 2 * kBlock>(w.system);

  float* wanted = p.y + (token * heads + head) * c.e + column + 4 * q;
  MultiplyInverse<kChunk>(
      w.system, rows, [&](int i) { return w.beta[i]; },
      [&](int row, const float4& four) {
        if (row >= present || column + 4 * q >= c.e) return;
        *reinterpret_cast<float4*>(wanted + static_cast<int64_t>(row) * heads * c.e) = four;
      });
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * i + 4 * half + q;
      const float* unit = w.keys + 4 * TilePlace(row, column / 4 + g / 2);
      rows[i][half] = reinterpret_cast<const float2*>(unit)[g % 2];
    }
  }
  float4* known = reinterpret_cast<float4*>(chunks.known + number * kChunk * kRuleWidth);
  MultiplyInverse<kChunk>(
      w.system, rows, [&](int i) { return -w.beta[i] * w.faded[i]; },
      [&](int row, const float4& four) {
        known[TokenPlace(row, column / 4 + q)] = RoundFour(four);
      });
  __syncthreads();
}

// Writes zeros to the results of tokens `begin` to `end` - 1 of a chunk. `y` is where the first
// token of the chunk has the `floats` results of one key head. Each warp has every eighth token.
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

// Blocks of the chunks of one key head follow each other.
template <int kChunk>
__global__ void __launch_bounds__(kThreads)
    DeltaPrepare(const DeltaRuleCall c, const DeltaRuleBuffers p, const ChunkBuffers chunks) {
  if constexpr (kChunk > kMostChunkTokens) return;
  NVFP4_DYNAMIC_SHARED(shared);
  Workspace<kChunk>& w = *reinterpret_cast<Workspace<kChunk>*>(shared);
  const int count = static_cast<int>((c.t + kChunk - 1) / kChunk);
  const int unit = blockIdx.x / count, chunk = blockIdx.x - unit * count;
  const int row = unit / c.key_heads, key_head = unit - row * c.key_heads;
  const int64_t first = static_cast<int64_t>(chunk) * kChunk, token = row * c.t + first;
  const int64_t present = RowTokens(c, p, row) - first;  // at most 0 if all is padding
  if (present < kChunk) {
    const int floats = c.shared * c.e;
    const int64_t begin = max(present, int64_t{0}), end = min(c.t - first, int64_t{kChunk});
    const int64_t results = static_cast<int64_t>(c.key_heads) * floats;
    WriteZeros(p.y + token * results + static_cast<int64_t>(key_head) * floats, results, floats,
               begin, end);
    if (present <= 0) return;
  }
  const int64_t stride = static_cast<int64_t>(c.key_heads) * c.d;
  const int64_t offset = token * stride + key_head * c.d;
  CopyTile<kChunk>(w.keys, p.k + offset, stride, present, c.d);
  CopyTile<kChunk>(w.queries, p.q + offset, stride, present, c.d);
  CommitCopies();
  WaitCopies<0>();
  __syncthreads();
  if (c.normalize) {
    NormalizeTile<kChunk>(w.keys, 1.0f);
    NormalizeTile<kChunk>(w.queries, c.scale);
    __syncthreads();
  }
  const int64_t tile = (static_cast<int64_t>(unit) * count + chunk) * kChunk * kRuleWidth;
  WriteTiles(w, chunks.queries + tile, chunks.keys + tile);
  MultiplyKeys(w, c.d);
  MultiplyQueries(w, c.d);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < c.shared; ++i) {
    const int head = key_head * c.shared + i;
    const int64_t number = (static_cast<int64_t>(unit) * c.shared + i) * count + chunk;
    PrepareHead(w, c, p, chunks, head, number, token, present);
  }
}

template <int kChunk>
cudaError_t LaunchDeltaPrepareOf(cudaStream_t stream, const DeltaRuleCall& c,
                                 const DeltaRuleBuffers& p, const ChunkBuffers& chunks) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(c.t, kChunk) * c.b * c.key_heads));
  return LaunchWide(stream, grid, kThreads, sizeof(Workspace<kChunk>), false, DeltaPrepare<kChunk>,
                    c, p, chunks);
}

}  // namespace

cudaError_t LaunchDeltaPrepare(cudaStream_t stream, const DeltaRuleCall& call,
                               const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                               int chunk) {
  const auto launch = chunk == 64 ? LaunchDeltaPrepareOf<64> : LaunchDeltaPrepareOf<32>;
  return launch(stream, call, buffers, chunks);
}

}  // namespace nvfp4
