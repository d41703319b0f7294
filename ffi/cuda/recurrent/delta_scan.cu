// The gated delta rule for prompts, second kernel: carries the state S of each value head from
// chunk to chunk. For each chunk of 64 tokens:
//
//   u = wanted - known @ S
//   y = decay_i q_i @ S + pairs @ u
//   S = decay S + k.T @ (decay_to_end u)
//
// A warp owns 16 columns of one state, and nothing but the loads is shared between warps. It
// computes with transposed matrices, S.T [16, 128] and u.T [16, 64]: their sums in registers are
// then also the left operands of the next products, in TensorFloat-32, and never pass through
// shared memory. The state itself stays float32. A block has 2 or 4 such warps of one head, and 2
// warps that copy the tiles of the next chunk to shared memory in the meantime. With 32 heads of
// 128 columns, 2 such warps a block make 128 blocks.
//
// In a fragment of m16n8k8, the sums of a lane are columns 2q and 2q + 1, and the left operand
// wants k at q and q + 4. The order of k does not matter as long as both operands have the same
// one, so column 2q of the sums is k = q, and column 2q + 1 is k = q + 4. Column n of tile i of S.T
// is row 32 (i / 4) + 4 n + i % 4 of S. A lane thereby reads 4 tiles of the right operand at once.
//
// Prediction for 4096 tokens of 32 heads with 128 x 128 on an H200: 12.9 + 2.4 GFLOP, and 330 MB of
// tiles, results and wanted values, which take 80 us at 4 TB/s. A warp issues 420 products for a
// chunk; at one in 6.5 cycles, which mma.sync reaches, 64 chunks take 100 us. As two warps fill
// only half of a multiprocessor's tensor cores, the products bound: about 120 us.
//
// Needs: d and e at most 128 and multiples of 4. cuda_mixer_bindings.cc checks these. Tests:
// tests/emulation/test_emulation_delta_rule.py, tests/gpu/test_cuda_delta_rule.py.
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/delta_rule.cuh"

namespace nvfp4 {
namespace {

constexpr int kColumns = 16;            // columns of the state for each warp
constexpr int kMaxWarps = 4;            // that compute, in a block
constexpr int kCopyWarps = 2;           // that copy
constexpr int kTiles = kRuleWidth / 8;  // of the transposed state

static_assert(kTiles % 4 == 0, "a lane reads 4 tiles of the right operand at once");

// One chunk in shared memory. The rows of `known`, `queries` and `keys` are tiles (TilePlace).
template <int kChunk>
struct Stage {
  float known[kChunk * kRuleWidth];
  float queries[kChunk * kRuleWidth];
  float keys[kChunk * kRuleWidth];
  float pairs[kChunk * kChunk];
  float decays[2 * kChunk];
};

// Returns the place of 16 bytes in the tile of pairs. Its reads are 8 bytes wide, which takes
// another order of the units.
template <int kChunk>
__device__ __forceinline__ int PairPlace(int row, int unit) {
  return row * (kChunk / 4) + (unit ^ 2 * (row & 3));
}

// Which head and which columns a block or a warp has.
struct Head {
  int64_t row;  // of the batch
  int32_t head, key_head;
};

template <int kChunk>
__device__ void CopyStage(Stage<kChunk>& stage, const DeltaRuleCall& c, const DeltaRuleBuffers& p,
                          const ChunkBuffers& w, const Head& h, int64_t number, int64_t first,
                          int thread, int threads) {
  const int64_t stride = static_cast<int64_t>(c.key_heads) * c.d;
  const int64_t offset = (h.row * c.t + first) * stride + h.key_head * c.d, present = c.t - first;
  CopyTile(SharedAddress(stage.known), w.known + number * kChunk * kRuleWidth, kRuleWidth, kChunk,
           kChunk, kRuleWidth, thread, threads);
  CopyTile(SharedAddress(stage.queries), p.q + offset, stride, kChunk, present, c.d, thread,
           threads);
  CopyTile(SharedAddress(stage.keys), p.k + offset, stride, kChunk, present, c.d, thread, threads);
  const float* pairs = w.pairs + number * kChunk * kChunk;
  for (int i = thread; i < kChunk * kChunk / 4; i += threads) {
    const int row = i / (kChunk / 4), unit = i % (kChunk / 4);
    Copy(SharedAddress(stage.pairs) + 16 * PairPlace<kChunk>(row, unit), pairs + 4 * i);
  }
  const float* decays = w.decays + number * 2 * kChunk;
  for (int i = thread; i < 2 * kChunk / 4; i += threads) {
    Copy(SharedAddress(stage.decays) + 16 * i, decays + 4 * i);
  }
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

// Returns a right operand. `kRounded` says that its elements are in TensorFloat-32 already.
template <bool kRounded>
__device__ __forceinline__ uint32_t RightOperand(float value) {
  return kRounded ? __float_as_uint(value) : RoundToTf32(value);
}

// sums += S.T @ tile.T, where the rows of the tile are tokens.
template <int kChunk, bool kRounded>
__device__ __forceinline__ void ReadState(const float (&state)[kTiles][4], const float* tile,
                                          float (&sums)[kChunk / 8][4]) {
  constexpr int kBatch = 4;  // tiles of tokens whose sums take turns
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const float4* units = reinterpret_cast<const float4*>(tile);
#pragma unroll
  for (int four = 0; four < kTiles / 4; ++four) {
    uint32_t a[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) TakeAsLeft(state[4 * four + k], 1.0f, 1.0f, a[k]);
#pragma unroll
    for (int first = 0; first < kChunk / 8; first += kBatch) {
      uint32_t even[kBatch][4], odd[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int token = 8 * (first + i) + g;
        const float4 x = units[TilePlace(token, 8 * four + 2 * q)];
        const float4 y = units[TilePlace(token, 8 * four + 2 * q + 1)];
        const float evens[4] = {x.x, x.y, x.z, x.w}, odds[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          even[i][k] = RightOperand<kRounded>(evens[k]);
          odd[i][k] = RightOperand<kRounded>(odds[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          MultiplyAddTf32(sums[first + i], a[k], even[i][k], odd[i][k]);
        }
      }
    }
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
      const float2 pair = halves[2 * PairPlace<kChunk>(8 * i + g, 2 * j + q / 2) + q % 2];
      MultiplyAddTf32(y[i], a, __float_as_uint(pair.x), __float_as_uint(pair.y));
    }
  }
}

// S.T += (decay_to_end u).T @ k.
template <int kChunk>
__device__ __forceinline__ void WriteState(const float (&corrections)[kChunk / 8][4],
                                           const float* keys, const float* decays_to_end,
                                           float (&state)[kTiles][4]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const float4* units = reinterpret_cast<const float4*>(keys);
#pragma unroll
  for (int j = 0; j < kChunk / 8; ++j) {
    const int token = 8 * j + 2 * q;
    const float2 decay = *reinterpret_cast<const float2*>(decays_to_end + token);
    uint32_t a[4];
    TakeAsLeft(corrections[j], decay.x, decay.y, a);
#pragma unroll
    for (int four = 0; four < kTiles / 4; ++four) {
      const float4 x = units[TilePlace(token, 8 * four + g)];
      const float4 y = units[TilePlace(token + 1, 8 * four + g)];
      MultiplyAddTf32(state[4 * four], a, RoundToTf32(x.x), RoundToTf32(y.x));
      MultiplyAddTf32(state[4 * four + 1], a, RoundToTf32(x.y), RoundToTf32(y.y));
      MultiplyAddTf32(state[4 * four + 2], a, RoundToTf32(x.z), RoundToTf32(y.z));
      MultiplyAddTf32(state[4 * four + 3], a, RoundToTf32(x.w), RoundToTf32(y.w));
    }
  }
}

// Calls visit(tile, s, place) for all pairs of neighboring columns of the state that a lane has and
// that exist. Elements s and 2 + s of the tile are at `place` and behind it.
template <typename Function>
__device__ __forceinline__ void VisitState(const DeltaRuleCall& c, float* state, int column,
                                           Function visit) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int row = 32 * (i / 4) + 4 * (2 * q + s) + i % 4;
      if (row < c.d && column < c.e) {
        visit(i, s, reinterpret_cast<float2*>(state + static_cast<int64_t>(row) * c.e + column));
      }
    }
  }
}

// Calls visit(tile, s, place) for the tokens of a chunk that a lane has and that exist.
template <int kChunk, typename Function>
__device__ __forceinline__ void VisitTokens(const DeltaRuleCall& c, float* y, int64_t first,
                                            int column, Function visit) {
  const int q = threadIdx.x % 4;
  const int64_t stride = static_cast<int64_t>(c.key_heads) * c.shared * c.e;
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int64_t token = first + 8 * i + 2 * q + s;
      if (token < c.t && column < c.e) {
        visit(i, s, reinterpret_cast<float2*>(y + token * stride + column));
      }
    }
  }
}

// Handles one chunk. `y` is the result of the row's first token, in which "wanted" lies.
template <int kChunk>
__device__ __forceinline__ void ApplyChunk(const DeltaRuleCall& c, const Stage<kChunk>& stage,
                                           float* y, int64_t first, int column,
                                           float (&state)[kTiles][4]) {
  const int q = threadIdx.x % 4;
  float corrections[kChunk / 8][4] = {}, sums[kChunk / 8][4] = {};
  VisitTokens<kChunk>(c, y, first, column, [&](int i, int s, const float2* place) {
    corrections[i][s] = place->x;
    corrections[i][2 + s] = place->y;
  });
  ReadState<kChunk, true>(state, stage.known, sums);
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      corrections[i][j] -= sums[i][j];
      sums[i][j] = 0.0f;
    }
  }
  ReadState<kChunk, false>(state, stage.queries, sums);
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
    const float2 decay = *reinterpret_cast<const float2*>(stage.decays + 8 * i + 2 * q);
    sums[i][0] *= decay.x;
    sums[i][1] *= decay.y;
    sums[i][2] *= decay.x;
    sums[i][3] *= decay.y;
  }
  AddPairs<kChunk>(corrections, stage.pairs, sums);
  VisitTokens<kChunk>(c, y, first, column, [&](int i, int s, float2* place) {
    *place = make_float2(sums[i][s], sums[i][2 + s]);
  });
  const float kept = stage.decays[kChunk - 1];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) state[i][j] *= kept;
  }
  WriteState<kChunk>(corrections, stage.keys, stage.decays + kChunk, state);
}

// Blocks of one head follow each other. With two stages, the next chunk is copied during a chunk.
template <int kChunk>
__global__ void __launch_bounds__(32 * (kMaxWarps + kCopyWarps))
    DeltaScan(const DeltaRuleCall c, const DeltaRuleBuffers p, const ChunkBuffers w,
              const int warps, const int stages) {
  NVFP4_DYNAMIC_SHARED(shared);
  Stage<kChunk>* const all = reinterpret_cast<Stage<kChunk>*>(shared);
  const int heads = c.key_heads * c.shared, thread = threadIdx.x, warp = thread / 32;
  const int parts = (c.e + warps * kColumns - 1) / (warps * kColumns);
  const int unit = blockIdx.x / parts, part = blockIdx.x - unit * parts;
  const Head h = {unit / heads, unit % heads, unit % heads / c.shared};
  const int64_t chunks = (c.t + kChunk - 1) / kChunk;
  const int copy_thread = thread - 32 * warps;
  const int left = (part * warps + warp) * kColumns, column = left + 2 * (thread % 32 / 4);
  const bool computes = copy_thread < 0 && left < c.e;

  float* const own = p.state + static_cast<int64_t>(unit) * c.d * c.e;
  float* const y = p.y + (h.row * c.t * heads + h.head) * c.e;
  float state[kTiles][4] = {};
  if (computes) {
    VisitState(c, own, column, [&](int i, int s, const float2* place) {
      state[i][s] = place->x;
      state[i][2 + s] = place->y;
    });
  }
#pragma unroll 1
  for (int64_t step = 0; step < chunks + stages - 1; ++step) {
    if (copy_thread >= 0 && step < chunks) {
      CopyStage<kChunk>(all[step % stages], c, p, w, h, unit * chunks + step, step * kChunk,
                        copy_thread, 32 * kCopyWarps);
      WaitCopies<0>();
    }
    if (stages == 1) __syncthreads();
    const int64_t chunk = step - (stages - 1);
    if (computes && chunk >= 0) {
      ApplyChunk<kChunk>(c, all[chunk % stages], y, chunk * kChunk, column, state);
    }
    __syncthreads();
  }
  if (computes) {
    VisitState(c, own, column, [&](int i, int s, float2* place) {
      *place = make_float2(state[i][s], state[i][2 + s]);
    });
  }
}

template <int kChunk>
cudaError_t LaunchDeltaScanOf(cudaStream_t stream, const DeltaRuleCall& c,
                              const DeltaRuleBuffers& p, const ChunkBuffers& w) {
  const int64_t units = c.b * c.key_heads * c.shared;
  // Blocks of more warps read less, and blocks of fewer warps fill more multiprocessors.
  const auto parts = [&](int warps) { return CeilDiv(c.e, warps * kColumns); };
  const int warps =
      units * parts(kMaxWarps / 2) <= MultiprocessorCount() ? kMaxWarps / 2 : kMaxWarps;
  const int stages = DeltaScanBytes(kChunk, 2) <= BlockSharedBytes() ? 2 : 1;
  const dim3 grid(static_cast<unsigned>(units * parts(warps)));
  return LaunchWide(stream, grid, 32 * (warps + kCopyWarps),
                    static_cast<int>(DeltaScanBytes(kChunk, stages)), false, DeltaScan<kChunk>, c,
                    p, w, warps, stages);
}

}  // namespace

int64_t DeltaScanBytes(int chunk, int stages) {
  return stages * static_cast<int64_t>(chunk == 64 ? sizeof(Stage<64>) : sizeof(Stage<32>));
}

cudaError_t LaunchDeltaScan(cudaStream_t stream, const DeltaRuleCall& call,
                            const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                            int chunk) {
  const auto launch = chunk == 64 ? LaunchDeltaScanOf<64> : LaunchDeltaScanOf<32>;
  return launch(stream, call, buffers, chunks);
}

}  // namespace nvfp4
