// The recurrence of Mamba-2 for prompts, first kernel: what the tokens of each chunk contribute.
//
// With D_ij, the decay from token j to token i, which is exp of the sum of dt a between them:
//
//   pairs_ij = D_ij (C_i . B_j) dt_j for i >= j
//
// The second kernel (chunk_scan.cuh) also needs the decays from the start of the chunk, those to
// its end, times dt, and B and C, rounded to TensorFloat-32.
//
// A block handles one chunk of at most kHeads heads of a group. These share the products of C with
// B, which take TensorFloat-32. Each warp sums the logarithms of one head while B and C arrive.
//
// Padding behind the tokens of a row is not read, and its results become zeros. A block whose chunk
// is all padding does nothing else, so a row costs its tokens.
//
// Bottleneck: memory bandwidth. For 8192 tokens of 8 groups of 8 heads with 128 x 64, 67 MB of B
// and C are read, and 67 MB of tiles and 134 MB of pairs are written. On an H200, that takes 86 us,
// and moving the bytes takes 65 us.
//
// Needs: n and p at most 128 and multiples of 4. cuda_recurrent_bindings.cc checks these. Tests:
// tests/emulation/test_emulation_mamba2_scan.py, tests/gpu/test_cuda_mamba2_scan.py.
#include "cuda/instructions/async_copy.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/chunk_prepare.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"

namespace nvfp4 {
namespace {

constexpr int kHeads = kWarps;  // of a block

template <int kChunk>
struct Workspace {
  float keys[kChunk * kChunkWidth], queries[kChunk * kChunkWidth];  // tiles (TilePlace)
  Matrix<kChunk> query_pairs;
  LogSums<kChunk> logs[kHeads];
  alignas(16) float steps[kHeads][kChunk];  // dt
};

// Loads dt of a head, sums the logarithms of its decays, and writes its decays. One warp does this.
// `number` is that of the chunk among those of all heads, and `token` that of its first token.
template <int kChunk>
__device__ __forceinline__ void PrepareDecays(Workspace<kChunk>& w, const Mamba2ScanCall& c,
                                              const Mamba2ScanBuffers& p, float* decays, int head,
                                              int64_t token, int64_t present) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  LogSums<kChunk>& logs = w.logs[warp];
  float* const steps = w.steps[warp];
  const float* const dt = p.dt + token * c.heads + head;
#pragma unroll
  for (int i = lane; i < kChunk; i += 32) {
    steps[i] = i < present ? dt[i * int64_t{c.heads}] : 0.0f;
  }
  __syncwarp();
  const double rate = p.a[head];
  logs.Sum([&](int i) { return steps[i] * rate; }, present);
  __syncwarp();
#pragma unroll
  for (int i = lane; i < kChunk; i += 32) {
    decays[i] = logs.DecayTo(i);
    decays[kChunk + i] = logs.DecayBetween(kChunk - 1, i) * steps[i];
  }
}

// Writes the pairs of a head, whose place in the block is `own`. A thread has four pairs of one
// token at a time.
template <int kChunk>
__device__ __forceinline__ void WritePairs(Workspace<kChunk>& w, int own, float* pairs) {
  constexpr int kFours = kChunk / 4;
#pragma unroll 2
  for (int step = 0; step < kChunk * kFours / kThreads; ++step) {
    const int index = step * kThreads + threadIdx.x;
    const int i = index / kFours, four = index % kFours, j = 4 * four;
    float4 pair = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (j <= i) {
      const float4 steps = reinterpret_cast<const float4&>(w.steps[own][j]);
      const float4 products = MultiplyFours(w.query_pairs.Four(i, j), steps);
      const float4 decays = w.logs[own].DecaysBetween(i, j);
      pair = RoundFour(KeepBefore(MultiplyFours(decays, products), i + 1 - j));
    }
    reinterpret_cast<float4*>(pairs)[PairPlace(kChunk, i, four)] = pair;
  }
}

// The blocks of the chunks of one part of a group follow each other.
template <int kChunk>
__global__ void __launch_bounds__(kThreads)
    Mamba2Prepare(const Mamba2ScanCall c, const Mamba2ScanBuffers p, const ChunkBuffers chunks) {
  if constexpr (kChunk > kMostChunkTokens) return;
  NVFP4_DYNAMIC_SHARED(shared);
  Workspace<kChunk>& w = *reinterpret_cast<Workspace<kChunk>*>(shared);
  const int count = static_cast<int>((c.t + kChunk - 1) / kChunk), own = c.heads / c.groups;
  const int parts = (own + kHeads - 1) / kHeads;
  const int unit_and_part = blockIdx.x / count, chunk = blockIdx.x - unit_and_part * count;
  const int unit = unit_and_part / parts, part = unit_and_part - unit * parts;
  const int row = unit / c.groups, group = unit - row * c.groups;
  const int first_own = part * kHeads, heads = min(kHeads, own - first_own);
  const int first_head = group * own + first_own;
  const int64_t first = static_cast<int64_t>(chunk) * kChunk, token = row * c.t + first;
  const int64_t present = RowTokens(c.t, p.lengths, row) - first;  // at most 0 if all is padding
  if (present < kChunk) {
    const int64_t begin = max(present, int64_t{0}), end = min(c.t - first, int64_t{kChunk});
    const int64_t results = static_cast<int64_t>(c.heads) * c.p;
    WriteZeros(p.y + token * results + static_cast<int64_t>(first_head) * c.p, results, heads * c.p,
               begin, end);
    if (present <= 0) return;
  }
  const int64_t stride = static_cast<int64_t>(c.groups) * c.n;
  const int64_t offset = token * stride + group * c.n;
  CopyTile<kChunk>(w.keys, p.B + offset, stride, present, c.n);
  CopyTile<kChunk>(w.queries, p.C + offset, stride, present, c.n);
  CommitCopies();
  const int64_t number = (static_cast<int64_t>(unit) * own + first_own) * count + chunk;
  const int warp = threadIdx.x / 32;
  if (warp < heads) {
    PrepareDecays(w, c, p, chunks.decays + (number + int64_t{warp} * count) * 2 * kChunk,
                  first_head + warp, token, present);
  }
  WaitCopies<0>();
  __syncthreads();
  if (part == 0) {
    const int64_t tile = (static_cast<int64_t>(unit) * count + chunk) * kChunk * kChunkWidth;
    WriteTiles<kChunk>(w.queries, w.keys, chunks.queries + tile, chunks.keys + tile);
  }
  MultiplyQueries<kChunk>(w.queries, w.keys, w.query_pairs, c.n);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < heads; ++i) {
    WritePairs(w, i, chunks.pairs + (number + int64_t{i} * count) * kChunk * kChunk);
  }
}

template <int kChunk>
cudaError_t LaunchMamba2PrepareOf(cudaStream_t stream, const Mamba2ScanCall& c,
                                  const Mamba2ScanBuffers& p, const ChunkBuffers& chunks) {
  const int64_t parts = CeilDiv(c.heads / c.groups, kHeads);
  const dim3 grid(static_cast<unsigned>(CeilDiv(c.t, kChunk) * c.b * c.groups * parts));
  return LaunchWide(stream, grid, kThreads, sizeof(Workspace<kChunk>), false, Mamba2Prepare<kChunk>,
                    c, p, chunks);
}

}  // namespace

cudaError_t LaunchMamba2Prepare(cudaStream_t stream, const Mamba2ScanCall& call,
                                const Mamba2ScanBuffers& buffers, const ChunkBuffers& chunks,
                                int chunk) {
  const auto launch = chunk == kLargeChunk ? LaunchMamba2PrepareOf<kLargeChunk>
                                           : LaunchMamba2PrepareOf<kSmallChunk>;
  return launch(stream, call, buffers, chunks);
}

}  // namespace nvfp4
