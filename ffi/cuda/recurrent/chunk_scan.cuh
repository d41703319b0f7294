// The second kernel of a recurrence over prompts: carries the state S of each head from chunk to
// chunk. For each chunk of 64 tokens:
//
//   u = values + known @ S           for the delta rule; u = values for Mamba-2
//   y = decay_i q_i @ S + pairs @ u  and D values more for Mamba-2
//   S = decay S + k.T @ (decay_to_end u)
//
// With a decay for each channel of a key, queries and keys already contain their decays, and those
// of the state are a vector.
//
// A warp owns 16 columns of one state, and nothing but the loads is shared between warps. It
// computes with transposed matrices, S.T [16, 128] and u.T [16, 64]: their sums in registers are
// then also the left operands of the next products, in TensorFloat-32, and never pass through
// shared memory. The state itself stays float32. A block has 2 or 4 such warps of one head, and 2
// warps that copy the tiles of the next chunk to shared memory in the meantime.
//
// In a fragment of m16n8k8, the sums of a lane are columns 2q and 2q + 1, and the left operand
// wants k at q and q + 4. The order of k does not matter as long as both operands have the same
// one, so column 2q of the sums is k = q, and column 2q + 1 is k = q + 4. StateRow says which row
// of S each column of S.T is. The first kernel writes its tiles in an order in which 16 bytes are
// the right operands of two products.
//
// A block ends after the last chunk of its row that has a token which is no padding. The first
// kernel has prepared no chunk behind it, and has written the results of padding.
//
// Bottleneck: the latency of a warp's instructions. On an H200, 8192 tokens took 315 us (delta
// rule, 32 heads with 128 x 128) and 275 us (Mamba-2, 64 heads with 128 x 64), with 128 blocks of 2
// warps that compute. Copies alone took 199 and 164 us. A warp issues 420 and 292 products for a
// chunk, one in 10 and 13 cycles, where mma.sync reaches one in 6.5.
//
// Needs: d and e at most 128 and multiples of 4. cuda_recurrent_bindings.cc checks these. Tests:
// test_emulation_delta_rule.py and test_emulation_mamba2_scan.py of tests/emulation. On a GPU:
// test_cuda_delta_rule.py and test_cuda_mamba2_scan.py of tests/gpu.
#pragma once

#include <type_traits>

#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/chunk_tiles.cuh"

namespace nvfp4 {
namespace {

constexpr int kColumns = 16;             // columns of the state for each warp
constexpr int kMaxWarps = 4;             // that compute, in a block
constexpr int kCopyWarps = 2;            // that copy
constexpr int kTiles = kChunkWidth / 8;  // of the transposed state

static_assert(kTiles % 2 == 0, "16 bytes are the right operands of two tiles");

// What only the delta rule has.
template <int kChunk>
struct KnownTile {
  float known[kChunk * kChunkWidth];
};
struct NoKnownTile {};

// The number of decays of a chunk.
template <Recurrence kKind, int kChunk>
constexpr int kDecays = 2 * kChunk + (kKind == Recurrence::kChannelDelta ? kChunkWidth : 0);

// One chunk in shared memory, in the order of ChunkBuffers.
template <Recurrence kKind, int kChunk>
struct Stage : std::conditional_t<Corrects(kKind), KnownTile<kChunk>, NoKnownTile> {
  float queries[kChunk * kChunkWidth];
  float keys[kChunk * kChunkWidth];
  float pairs[kChunk * kChunk];
  float decays[kDecays<kKind, kChunk>];
};

// Starts a copy of `kCount` floats by the warps that copy.
template <int kCount>
__device__ __forceinline__ void CopyFloats(float* target, const float* source, int thread) {
  constexpr int kThreads = 32 * kCopyWarps, kUnits = kCount / 4;
  const uint32_t place = SharedAddress(target) + 16 * thread;
  const float* from = source + 4 * thread;
#pragma unroll 8
  for (int i = 0; i < kUnits / kThreads; ++i)
    Copy(place + 16 * kThreads * i, from + 4 * kThreads * i);
  constexpr int kRest = kUnits / kThreads * kThreads;
  if (kRest + thread < kUnits) Copy(place + 16 * kRest, from + 4 * kRest);
}

// `number` is that of the chunk among all chunks of value heads, and `key_number` among those of
// key heads.
template <Recurrence kKind, int kChunk>
__device__ __forceinline__ void CopyStage(Stage<kKind, kChunk>& stage, const ChunkBuffers& w,
                                          int64_t number, int64_t key_number, int thread) {
  constexpr int kTile = kChunk * kChunkWidth;
  if constexpr (Corrects(kKind)) {
    CopyFloats<kTile>(stage.known, w.known + number * kTile, thread);
  }
  CopyFloats<kTile>(stage.queries, w.queries + key_number * kTile, thread);
  CopyFloats<kTile>(stage.keys, w.keys + key_number * kTile, thread);
  CopyFloats<kChunk * kChunk>(stage.pairs, w.pairs + number * kChunk * kChunk, thread);
  constexpr int kCount = kDecays<kKind, kChunk>;
  CopyFloats<kCount>(stage.decays, w.decays + number * kCount, thread);
  CommitCopies();
}

// Returns the left operand of which `sums` are the columns, each times its factor.
__device__ __forceinline__ void TakeAsLeft(const float (&sums)[4], float even, float odd,
                                           uint32_t (&a)[4]) {
  a[0] = RoundToTf32(sums[0] * even);
  a[1] = RoundToTf32(sums[2] * even);
  a[2] = RoundToTf32(sums[1] * odd);
  a[3] = RoundToTf32(sums[3] * odd);
}

// sums += a @ tile.T for two tiles of channels and all tokens. A product wants its two right
// operands in neighboring registers, and a unit has those of two products.
template <int kChunk>
__device__ __forceinline__ void MultiplyTokens(const uint32_t (&a)[2][4], const float* tile,
                                               int channels, float (&sums)[kChunk / 8][4]) {
  constexpr int kBatch = 4;  // tiles of tokens whose sums take turns
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const float4* units = reinterpret_cast<const float4*>(tile);
#pragma unroll
  for (int first = 0; first < kChunk / 8; first += kBatch) {
    float4 b[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      b[i] = units[TokenPlace(8 * (first + i) + g, channels / 4 + q)];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      MultiplyAddTf32(sums[first + i], a[0], __float_as_uint(b[i].x), __float_as_uint(b[i].y));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      MultiplyAddTf32(sums[first + i], a[1], __float_as_uint(b[i].z), __float_as_uint(b[i].w));
    }
  }
}

// Multiplies two neighboring tiles of the state by their decays over the chunk.
template <Recurrence kKind, int kChunk>
__device__ __forceinline__ void DecayTiles(const Stage<kKind, kChunk>& stage, int two,
                                           float (&state)[kTiles][4]) {
  const int q = threadIdx.x % 4;
  // Those of columns 2q and 2q + 1 of the first tile, and then of the second one.
  float4 kept;
  if constexpr (kKind == Recurrence::kChannelDelta) {
    const float* const channels = stage.decays + 2 * kChunk;
    kept = reinterpret_cast<const float4&>(channels[StateRow(2 * two, 2 * q)]);
  } else {
    const float all = stage.decays[kChunk - 1];
    kept = make_float4(all, all, all, all);
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    state[2 * two][i] *= kept.x;
    state[2 * two][i + 1] *= kept.y;
    state[2 * two + 1][i] *= kept.z;
    state[2 * two + 1][i + 1] *= kept.w;
  }
}

// u.T += S.T @ known.T, if there are known keys, y.T += S.T @ q.T, and S *= decay.
template <Recurrence kKind, int kChunk>
__device__ __forceinline__ void ReadState(const Stage<kKind, kChunk>& stage,
                                          float (&state)[kTiles][4], float (&u)[kChunk / 8][4],
                                          float (&y)[kChunk / 8][4]) {
#pragma unroll
  for (int two = 0; two < kTiles / 2; ++two) {
    uint32_t a[2][4];
    TakeAsLeft(state[2 * two], 1.0f, 1.0f, a[0]);
    TakeAsLeft(state[2 * two + 1], 1.0f, 1.0f, a[1]);
    DecayTiles(stage, two, state);
    if constexpr (Corrects(kKind)) {
      MultiplyTokens<kChunk>(a, stage.known, 16 * two, u);
    }
    MultiplyTokens<kChunk>(a, stage.queries, 16 * two, y);
  }
}

// y.T += u.T @ pairs.T. Pairs of a token with a later one are 0, and tiles of them are left out.
template <int kChunk>
__device__ __forceinline__ void AddPairs(const float (&corrections)[kChunk / 8][4],
                                         const float* pairs, float (&y)[kChunk / 8][4]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const float2* halves = reinterpret_cast<const float2*>(pairs);
#pragma unroll
  for (int j = 0; j < kChunk / 8; ++j) {
    uint32_t a[4];
    TakeAsLeft(corrections[j], 1.0f, 1.0f, a);
#pragma unroll
    for (int i = j; i < kChunk / 8; ++i) {
      const float2 pair = halves[2 * PairPlace(kChunk, 8 * i + g, 2 * j + q / 2) + q % 2];
      MultiplyAddTf32(y[i], a, __float_as_uint(pair.x), __float_as_uint(pair.y));
    }
  }
}

// S.T += (decay_to_end u).T @ k.
template <Recurrence kKind, int kChunk>
__device__ __forceinline__ void WriteState(const float (&corrections)[kChunk / 8][4],
                                           const Stage<kKind, kChunk>& stage,
                                           float (&state)[kTiles][4]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const float4* units = reinterpret_cast<const float4*>(stage.keys);
#pragma unroll
  for (int j = 0; j < kChunk / 8; ++j) {
    const int token = 8 * j + 2 * q;
    const float2 decay = *reinterpret_cast<const float2*>(stage.decays + kChunk + token);
    uint32_t a[4];
    TakeAsLeft(corrections[j], decay.x, decay.y, a);
#pragma unroll
    for (int two = 0; two < kTiles / 2; ++two) {
      const float4 b = units[KeyPlace(token / 2, two, g)];
      MultiplyAddTf32(state[2 * two], a, __float_as_uint(b.x), __float_as_uint(b.y));
      MultiplyAddTf32(state[2 * two + 1], a, __float_as_uint(b.z), __float_as_uint(b.w));
    }
  }
}

// Calls visit(tile, s, place) for all pairs of neighboring columns of a state [d, e] that a lane
// has and that exist. Elements s and 2 + s of the tile are at `place` and behind it.
template <typename Function>
__device__ __forceinline__ void VisitRows(const ChunkSizes& c, float* state, int column,
                                          Function visit) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int row = StateRow(i, 2 * q + s);
      if (row < c.d && column < c.e) {
        visit(i, s, reinterpret_cast<float2*>(state + static_cast<int64_t>(row) * c.e + column));
      }
    }
  }
}

// Calls visit(two, s, place) for all runs of four numbers of a column of a state [e, d] that a lane
// has and that exist. They are elements 2 s and 2 s + 1 of tile 2 two, and then of the next tile.
template <typename Function>
__device__ __forceinline__ void VisitColumns(const ChunkSizes& c, float* state, int column,
                                             Function visit) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int two = 0; two < kTiles / 2; ++two) {
    const int row = StateRow(2 * two, 2 * q);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (row < c.d && column + s < c.e) {
        visit(two, s,
              reinterpret_cast<float4*>(state + static_cast<int64_t>(column + s) * c.d + row));
      }
    }
  }
}

// Loads what a lane has of a state. What does not exist is 0.
template <Recurrence kKind>
__device__ __forceinline__ void LoadState(const ChunkSizes& c, float* own, int column,
                                          float (&state)[kTiles][4]) {
  if constexpr (Corrects(kKind)) {
    VisitRows(c, own, column, [&](int i, int s, const float2* place) {
      state[i][s] = place->x;
      state[i][2 + s] = place->y;
    });
  } else {
    VisitColumns(c, own, column, [&](int two, int s, const float4* place) {
      const float4 four = *place;
      state[2 * two][2 * s] = four.x;
      state[2 * two][2 * s + 1] = four.y;
      state[2 * two + 1][2 * s] = four.z;
      state[2 * two + 1][2 * s + 1] = four.w;
    });
  }
}

template <Recurrence kKind>
__device__ __forceinline__ void StoreState(const ChunkSizes& c, float* own, int column,
                                           const float (&state)[kTiles][4]) {
  if constexpr (Corrects(kKind)) {
    VisitRows(c, own, column, [&](int i, int s, float2* place) {
      *place = make_float2(state[i][s], state[i][2 + s]);
    });
  } else {
    VisitColumns(c, own, column, [&](int two, int s, float4* place) {
      *place = make_float4(state[2 * two][2 * s], state[2 * two][2 * s + 1],
                           state[2 * two + 1][2 * s], state[2 * two + 1][2 * s + 1]);
    });
  }
}

// Calls visit(tile, s, place) for the tokens of a chunk that a lane has and that exist. `first` is
// the lane's column of the chunk's first token, and `present` the number of its tokens.
template <int kChunk, typename T, typename Function>
__device__ __forceinline__ void VisitTokens(T* first, int stride, int present, Function visit) {
  using Pair = std::conditional_t<std::is_const_v<T>, const float2, float2>;
  const int q = threadIdx.x % 4;
  T* own = first + 2 * q * static_cast<int64_t>(stride);
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(own));  // otherwise sixteen addresses would stay in registers
#endif
  const auto place = [&](int i, int s) {
    return reinterpret_cast<Pair*>(own + static_cast<int64_t>(8 * i + s) * stride);
  };
  if (present == kChunk) {  // as nearly always; no lane then has to decide for each token
#pragma unroll
    for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
      for (int s = 0; s < 2; ++s) visit(i, s, place(i, s));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (8 * i + s < present - 2 * q) visit(i, s, place(i, s));
    }
  }
}

// The columns of values, and then of corrections of the delta rule, that a lane has.
template <int kChunk>
struct Corrections {
  float of[kChunk / 8][4];

  __device__ __forceinline__ void Load(const float* values, int stride, int present) {
#pragma unroll
    for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) of[i][j] = 0.0f;
    }
    VisitTokens<kChunk>(values, stride, present, [&](int i, int s, const float2* place) {
      of[i][s] = place->x;
      of[i][2 + s] = place->y;
    });
  }
};

// Blocks of one head follow each other. With two stages, the next chunk is copied during a chunk.
template <Recurrence kKind, int kChunk>
__global__ void __launch_bounds__(32 * (kMaxWarps + kCopyWarps), 1)
    ChunkScan(const ChunkSizes c, const ScanBuffers p, const ChunkBuffers w, const int warps,
              const int stages) {
  if constexpr (kChunk > kMostChunkTokens) return;
  constexpr bool kSkips = !Corrects(kKind);  // the results have D values too
  NVFP4_DYNAMIC_SHARED(shared);
  Stage<kKind, kChunk>* const all = reinterpret_cast<Stage<kKind, kChunk>*>(shared);
  const int heads = c.key_heads * c.shared, thread = threadIdx.x, warp = thread / 32;
  const int q = thread % 4;
  const int parts = (c.e + warps * kColumns - 1) / (warps * kColumns);
  const int unit = blockIdx.x / parts, part = blockIdx.x - unit * parts;
  const int row = unit / heads, head = unit - row * heads;
  const int64_t all_chunks = (c.t + kChunk - 1) / kChunk, tokens = RowTokens(c.t, p.lengths, row);
  const int chunks = static_cast<int>((tokens + kChunk - 1) / kChunk);
  const int copy_thread = thread - 32 * warps;
  const int left = (part * warps + warp) * kColumns, column = left + 2 * (thread % 32 / 4);
  const bool computes = copy_thread < 0 && left < c.e;
  const int64_t first = unit * all_chunks, first_of_key = unit / c.shared * all_chunks;

  float* const own = p.state + static_cast<int64_t>(unit) * c.d * c.e;
  const int64_t start = (row * c.t * heads + head) * c.e + column;
  float* y = p.y + start;
  const float* values = p.values + start;
  const int stride = heads * c.e;
  const float skipped = kSkips ? p.D[head] : 0.0f;
  // How many tokens are left from the lane's chunk on; none for columns that do not exist.
  int64_t remaining = column < c.e ? tokens : 0;
  const auto present = [&] { return static_cast<int>(min(remaining, int64_t{kChunk})); };
  float state[kTiles][4] = {};
  Corrections<kChunk> next;
  if (computes) {
    LoadState<kKind>(c, own, column, state);
    if constexpr (!kSkips) next.Load(values, stride, present());
  }
#pragma unroll 1
  for (int step = 0; step < chunks + stages - 1; ++step) {
    if (copy_thread >= 0 && step < chunks) {
      CopyStage(all[step & (stages - 1)], w, first + step, first_of_key + step, copy_thread);
      WaitCopies<0>();
    }
    if (stages == 1) __syncthreads();
    const int chunk = step - (stages - 1);
    if (computes && chunk >= 0) {
      const Stage<kKind, kChunk>& stage = all[chunk & (stages - 1)];
      // Mamba-2 needs its values only behind the products with the state, during which they arrive.
      Corrections<kChunk> u = next;
      if constexpr (kSkips) u.Load(values, stride, present());
      float sums[kChunk / 8][4] = {};
      ReadState(stage, state, u.of, sums);
#pragma unroll
      for (int i = 0; i < kChunk / 8; ++i) {
        const float2 decay = *reinterpret_cast<const float2*>(stage.decays + 8 * i + 2 * q);
        sums[i][0] *= decay.x;
        sums[i][1] *= decay.y;
        sums[i][2] *= decay.x;
        sums[i][3] *= decay.y;
      }
      AddPairs<kChunk>(u.of, stage.pairs, sums);
      VisitTokens<kChunk>(y, stride, present(), [&](int i, int s, float2* place) {
        float2 result = make_float2(sums[i][s], sums[i][2 + s]);
        if constexpr (kSkips) {
          result.x += skipped * u.of[i][s];
          result.y += skipped * u.of[i][2 + s];
        }
        *place = result;
      });
      // Those of the delta rule for the next chunk arrive during the products that write the state.
      y += static_cast<int64_t>(kChunk) * stride;
      values += static_cast<int64_t>(kChunk) * stride;
      remaining -= min(remaining, int64_t{kChunk});
      if constexpr (!kSkips) next.Load(values, stride, present());
      WriteState(u.of, stage, state);
    }
    __syncthreads();
  }
  if (computes) StoreState<kKind>(c, own, column, state);
}

template <Recurrence kKind>
int64_t ScanBytes(int chunk, int stages) {
  using Large = Stage<kKind, kLargeChunk>;
  using Small = Stage<kKind, kSmallChunk>;
  return stages * static_cast<int64_t>(chunk == kLargeChunk ? sizeof(Large) : sizeof(Small));
}

// Returns the tokens of a chunk on the current device. This kernel decides, because it needs more
// shared memory than the first one. The code of 9.0 and later has large chunks (kMostChunkTokens),
// and code for 8.0 may run on newer devices too.
template <Recurrence kKind>
int ScanChunk() {
  const bool large = ScanBytes<kKind>(kLargeChunk, 2) <= BlockSharedBytes() &&
                     MayOverlap(ChunkScan<kKind, kLargeChunk>);
  return large ? kLargeChunk : kSmallChunk;
}

template <Recurrence kKind, int kChunk>
cudaError_t LaunchScanOf(cudaStream_t stream, const ChunkSizes& c, const ScanBuffers& p,
                         const ChunkBuffers& w) {
  const int64_t units = c.b * c.key_heads * c.shared;
  const auto parts = [&](int warps) { return CeilDiv(c.e, warps * kColumns); };
  // Two small blocks read the L2 cache twice as often as a large one, but each has a multiprocessor
  // of its own. On an H200, 8192 tokens took 348 us instead of 438 (delta rule, 32 heads with 128 x
  // 128), and 317 instead of 391 (Mamba-2, 64 heads with 128 x 64).
  const bool small = units * parts(kMaxWarps / 2) <= MultiprocessorCount();
  const int warps = small ? kMaxWarps / 2 : kMaxWarps;
  const int stages = ScanBytes<kKind>(kChunk, 2) <= BlockSharedBytes() ? 2 : 1;
  const dim3 grid(static_cast<unsigned>(units * parts(warps)));
  return LaunchWide(stream, grid, 32 * (warps + kCopyWarps),
                    static_cast<int>(ScanBytes<kKind>(kChunk, stages)), false,
                    ChunkScan<kKind, kChunk>, c, p, w, warps, stages);
}

// Launches the kernel with large or small chunks.
template <Recurrence kKind>
cudaError_t LaunchScan(cudaStream_t stream, const ChunkSizes& c, const ScanBuffers& p,
                       const ChunkBuffers& w, int chunk) {
  const auto launch =
      chunk == kLargeChunk ? LaunchScanOf<kKind, kLargeChunk> : LaunchScanOf<kKind, kSmallChunk>;
  return launch(stream, c, p, w);
}

}  // namespace
}  // namespace nvfp4
