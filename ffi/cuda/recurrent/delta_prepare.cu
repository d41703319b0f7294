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
// A block handles one chunk of at most kHeads value heads of one key head: these share the products
// of keys and queries with keys. Each warp sums the logarithms of one value head while keys and
// queries arrive. The system and its inverse are computed in float32. The products of queries with
// keys, and of T with values and keys, take TensorFloat-32.
//
// T is computed from small blocks to large ones: blocks of 16 by substitution, and then, for pairs
// of neighbors, [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]. See
// numerics/triangular_inverse.py for why no shorter form of the inverse is accurate.
//
// Padding behind the tokens of a row is not read, and its results become zeros. A block whose chunk
// is all padding does nothing else, so a row costs its tokens.
//
// Bottleneck: latency and shared memory, since a multiprocessor has only two blocks. On an H200,
// 8192 tokens of 16 key heads and 32 value heads with 128 x 128 take 333 us. To move their 740 MB
// takes 184 us. One block with more registers took 487 us.
//
// Needs: d and e at most 128 and multiples of 4. cuda_recurrent_bindings.cc checks these. Tests:
// tests/emulation/test_emulation_delta_rule.py, tests/gpu/test_cuda_delta_rule.py.
#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/chunk_prepare.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kHeads = kWarps;  // value heads of a block
constexpr int kBlock = 16;      // blocks of this size are inverted by substitution
constexpr float kTiny = 1e-6f;  // as in backends/gated_delta.py

template <int kChunk>
struct System {
  Matrix<kChunk> below;    // L; above its diagonal, blocks of intermediate results
  Matrix<kChunk> inverse;  // T, without the blocks above its diagonal
};

// What belongs to the tokens of one value head.
template <int kChunk>
struct HeadTokens {
  LogSums<kChunk> logs;
  float faded[kChunk], beta[kChunk];  // `faded` are the decays from the start of the chunk
};

template <int kChunk>
struct Workspace {
  float keys[kChunk * kChunkWidth];  // a tile (TilePlace)
  union {
    float queries[kChunk * kChunkWidth];  // a tile, until query_pairs are there
    System<kChunk> system;
  };
  Matrix<kChunk> key_pairs, query_pairs;  // products of keys and queries with keys
  HeadTokens<kChunk> heads[kHeads];
};

__device__ __forceinline__ float4 TimesFour(const float4& four, float factor) {
  return make_float4(four.x * factor, four.y * factor, four.z * factor, four.w * factor);
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

// Writes the pairs of queries to `pairs`, and L to the system. A thread has four pairs of one token
// at a time.
template <int kChunk>
__device__ __forceinline__ void DecayPairs(Workspace<kChunk>& w, const HeadTokens<kChunk>& own,
                                           float* pairs) {
  constexpr int kFours = kChunk / 4;
  const int thread = ReadThread();
#pragma unroll 2
  for (int step = 0; step < kChunk * kFours / kThreads; ++step) {
    const int index = step * kThreads + thread;
    const int i = index / kFours, four = index % kFours, j = 4 * four;
    float4 pair = make_float4(0.0f, 0.0f, 0.0f, 0.0f), below = pair;
    if (j <= i) {
      const float4 decay = own.logs.DecaysBetween(i, j), beta = TimesFour(decay, own.beta[i]);
      pair = RoundFour(KeepBefore(MultiplyFours(decay, w.query_pairs.Four(i, j)), i + 1 - j));
      below = KeepBefore(MultiplyFours(beta, w.key_pairs.Four(i, j)), i - j);
    }
    reinterpret_cast<float4*>(pairs)[PairPlace(kChunk, i, four)] = pair;
    w.system.below.Four(i, j) = below;
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

// Loads the rates of one value head, sums the logarithms of its decays, and writes its decays. One
// warp does this. `scalars` is the place of the first token in g and beta.
template <int kChunk>
__device__ __forceinline__ void PrepareTokens(HeadTokens<kChunk>& own, const DeltaRuleCall& c,
                                              const DeltaRuleBuffers& p, float* decays,
                                              int64_t scalars, int present) {
  const int64_t heads = int64_t{c.key_heads} * c.shared;
  const float *const g = p.g + scalars, *const beta = p.beta + scalars;
  const int lane = ReadThread() % 32;
#pragma unroll
  for (int i = lane; i < kChunk; i += 32) {
    own.beta[i] = i < present ? beta[i * heads] : 0.0f;
  }
  own.logs.Sum([&](int i) { return g[i * heads]; }, present);
  __syncwarp();
#pragma unroll
  for (int i = lane; i < kChunk; i += 32) {
    own.faded[i] = decays[i] = own.logs.DecayTo(i);
    decays[kChunk + i] = own.logs.DecayBetween(kChunk - 1, i);
  }
}

// Handles one value head of the chunk. `number` is that of the chunk among those of all value
// heads, and `token` that of its first token among those of all rows.
template <int kChunk>
__device__ __forceinline__ void PrepareHead(Workspace<kChunk>& w, const HeadTokens<kChunk>& own,
                                            const DeltaRuleCall& c, const DeltaRuleBuffers& p,
                                            const ChunkBuffers& chunks, int head, int64_t number,
                                            int64_t token, int present) {
  const int heads = c.key_heads * c.shared, thread = ReadThread();
  const int g = thread % 32 / 4, q = thread % 4, column = thread / 32 * 16;
  DecayPairs(w, own, chunks.pairs + number * kChunk * kChunk);
  __syncthreads();
  if (thread < kChunk) InvertBlocks(w.system);
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
  JoinBlocks<kChunk, kBlock>(w.system);
  if constexpr (kChunk == kLargeChunk) JoinBlocks<kChunk, 2 * kBlock>(w.system);

  // T beta v and -T beta D k. The factors are those of the rows of v and k.
  float* const wanted = p.y + place + 4 * q;
  float4* const known = reinterpret_cast<float4*>(chunks.known + number * kChunk * kChunkWidth);
  MultiplyInverse<kChunk>(
      w.system,
      [&](int matrix, int tile, uint32_t (&b)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 8 * tile + 4 * half + q;
          const float* const unit = w.keys + 4 * TilePlace(row, column / 4 + g / 2);
          const float2 pair =
              matrix == 0 ? rows[tile][half] : reinterpret_cast<const float2*>(unit)[g % 2];
          const float factor = matrix == 0 ? own.beta[row] : -own.beta[row] * own.faded[row];
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

// The blocks of the chunks of one part of a key head follow each other.
template <int kChunk>
__global__ void __launch_bounds__(kThreads, kChunk == kLargeChunk ? 2 : 1)
    DeltaPrepare(const DeltaRuleCall c, const DeltaRuleBuffers p, const ChunkBuffers chunks) {
  if constexpr (kChunk > kMostChunkTokens) return;
  NVFP4_DYNAMIC_SHARED(shared);
  Workspace<kChunk>& w = *reinterpret_cast<Workspace<kChunk>*>(shared);
  const int count = static_cast<int>((c.t + kChunk - 1) / kChunk);
  const int parts = (c.shared + kHeads - 1) / kHeads;
  const int unit_and_part = blockIdx.x / count, chunk = blockIdx.x - unit_and_part * count;
  const int unit = unit_and_part / parts, part = unit_and_part - unit * parts;
  const int row = unit / c.key_heads, key_head = unit - row * c.key_heads;
  const int first_own = part * kHeads, own_heads = min(kHeads, c.shared - first_own);
  const int first_head = key_head * c.shared + first_own;
  const int64_t first = static_cast<int64_t>(chunk) * kChunk, token = row * c.t + first;
  // At most 0 if all is padding.
  const int present =
      static_cast<int>(min(RowTokens(c.t, p.lengths, row) - first, int64_t{kChunk}));
  if (present < kChunk) {
    const int64_t begin = max(present, 0), end = min(c.t - first, int64_t{kChunk});
    const int64_t results = static_cast<int64_t>(c.key_heads) * c.shared * c.e;
    WriteZeros(p.y + token * results + static_cast<int64_t>(first_head) * c.e, results,
               own_heads * c.e, begin, end);
    if (present <= 0) return;
  }
  const int64_t stride = static_cast<int64_t>(c.key_heads) * c.d;
  const int64_t offset = token * stride + key_head * c.d;
  CopyTile<kChunk>(w.keys, p.k + offset, stride, present, c.d);
  CopyTile<kChunk>(w.queries, p.q + offset, stride, present, c.d);
  CommitCopies();
  const int64_t number = (static_cast<int64_t>(unit) * c.shared + first_own) * count + chunk;
  const int warp = threadIdx.x / 32;
  if (warp < own_heads) {
    const int64_t scalars = token * c.key_heads * c.shared + first_head + warp;
    PrepareTokens(w.heads[warp], c, p,
                  chunks.decays + (number + int64_t{warp} * count) * 2 * kChunk, scalars, present);
  }
  WaitCopies<0>();
  __syncthreads();
  if (c.normalize) {
    NormalizeTile<kChunk>(w.keys, 1.0f);
    NormalizeTile<kChunk>(w.queries, c.scale);
    __syncthreads();
  }
  if (part == 0) {
    const int64_t tile = (static_cast<int64_t>(unit) * count + chunk) * kChunk * kChunkWidth;
    WriteTiles<kChunk>(w.queries, w.keys, chunks.queries + tile, chunks.keys + tile);
  }
  MultiplyKeys(w, c.d);
  MultiplyQueries<kChunk>(w.queries, w.keys, w.query_pairs, c.d);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < own_heads; ++i) {
    PrepareHead(w, w.heads[i], c, p, chunks, first_head + i, number + int64_t{i} * count, token,
                present);
  }
}

template <int kChunk>
cudaError_t LaunchDeltaPrepareOf(cudaStream_t stream, const DeltaRuleCall& c,
                                 const DeltaRuleBuffers& p, const ChunkBuffers& chunks) {
  const int64_t parts = CeilDiv(c.shared, kHeads);
  const dim3 grid(static_cast<unsigned>(CeilDiv(c.t, kChunk) * c.b * c.key_heads * parts));
  return LaunchWide(stream, grid, kThreads, sizeof(Workspace<kChunk>), false, DeltaPrepare<kChunk>,
                    c, p, chunks);
}

}  // namespace

cudaError_t LaunchDeltaPrepare(cudaStream_t stream, const DeltaRuleCall& call,
                               const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                               int chunk) {
  const auto launch =
      chunk == kLargeChunk ? LaunchDeltaPrepareOf<kLargeChunk> : LaunchDeltaPrepareOf<kSmallChunk>;
  return launch(stream, call, buffers, chunks);
}

}  // namespace nvfp4
