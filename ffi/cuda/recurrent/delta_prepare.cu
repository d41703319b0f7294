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
// queries arrive. The system and its inverse T are computed in float32 (chunk_inverse.cuh). The
// products of queries with keys, and of T with values and keys, take TensorFloat-32.
//
// Padding behind the tokens of a row is not read, and its results become zeros. A block whose chunk
// is all padding does nothing else, so a row costs its tokens.
//
// Bottleneck: latency and shared memory, since a multiprocessor has only two blocks. On an H200,
// 8192 tokens of 16 key heads and 32 value heads with 128 x 128 take 323 us. To move their 740 MB
// takes 184 us. One block with more registers took 487 us.
//
// Needs: d and e at most 128 and multiples of 4. cuda_recurrent_bindings.cc checks these. Tests:
// tests/emulation/test_emulation_delta_rule.py, tests/gpu/test_cuda_delta_rule.py.
#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/chunk_inverse.cuh"
#include "cuda/recurrent/chunk_prepare.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kHeads = kWarps;  // value heads of a block

// What belongs to the tokens of one value head.
template <int kChunk>
struct HeadTokens {
  LogSums<kChunk> logs;
  RowFactors<kChunk> factors;
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
      const float4 decay = own.logs.DecaysBetween(i, j),
                   beta = TimesFour(decay, own.factors.values[i]);
      pair = RoundFour(KeepBefore(MultiplyFours(decay, w.query_pairs.Four(i, j)), i + 1 - j));
      below = KeepBefore(MultiplyFours(beta, w.key_pairs.Four(i, j)), i - j);
    }
    reinterpret_cast<float4*>(pairs)[PairPlace(kChunk, i, four)] = pair;
    w.system.below.Four(i, j) = below;
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
    own.factors.values[i] = i < present ? beta[i * heads] : 0.0f;
  }
  own.logs.Sum([&](int i) { return g[i * heads]; }, present);
  __syncwarp();
#pragma unroll
  for (int i = lane; i < kChunk; i += 32) {
    const float faded = own.logs.DecayTo(i);
    decays[i] = faded;
    own.factors.keys[i] = -own.factors.values[i] * faded;
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
  DecayPairs(w, own, chunks.pairs + number * kChunk * kChunk);
  __syncthreads();
  WriteCorrections(w.system, w.keys, own.factors, c, p, chunks, head, number, token, present);
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
