// The gated delta rule with a decay for each channel of a key, for prompts, first kernel: what the
// tokens of each chunk contribute.
//
// With the decays a_i of token i, D_ij, the diagonal matrix of the products of a_{j+1} to a_i, and
// D_i, that of a_1 to a_i of the chunk:
//
//   pairs_ij = q_i . D_ij k_j for i >= j
//   L_ij = beta_i (k_i . D_ij k_j) for i > j,  T = (I + L)^-1
//   wanted = T beta v,  known = -T beta D k
//
// If the call says so, keys are first scaled to length 1, and queries to the length `scale`.
//
// D_ij does not leave the sum over channels, so no product of the raw keys gives all pairs. A
// quotient of D_i and D_j would overflow. Pairs are therefore computed level by level, as
// numerics/chunk_decay.py describes: a chunk has parts of 1, 2, 4 and so on tokens. A decay from
// one part to the next one is the product of that to the edge between them, and that from the edge.
// One level has one matrix product, of rows from odd parts with rows from even parts. The decays
// are products of numbers of at most 1, so that nothing overflows and no digits are lost.
//
// A block handles one chunk of one head, a slice of the channels at a time. A warp has 8 tokens, as
// left operands with 8 rows of keys and 8 rows of queries. For levels inside the 8 tokens, the
// right operands are the same registers. For larger levels, warps of even parts write their rows to
// shared memory. A product is the sum of three TensorFloat-32 products of high and low parts, which
// is nearly float32. The lengths of keys and queries are known behind the last slice. Pairs are
// scaled then, and the second kernel scales the rest.
//
// Small chunks have fewer tokens than the warps. There two groups of warps have every second slice,
// and add their sums at the end.
//
// Bottleneck: latency. Issue slots are half full, and a multiprocessor has two blocks, because
// their registers suffice for no more. On an H200, 8192 tokens of 32 heads with 128 x 128 take 438
// us. To move their 1.1 GB takes 270 us.
//
// Padding behind the tokens of a row is not read, and its results become zeros. A block whose chunk
// is all padding does nothing else, so a row costs its tokens.
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

constexpr int kRows = 8;          // tokens of a warp
constexpr int kSlice = 32;        // channels that are handled at once
constexpr int kOwn = kSlice / 4;  // channels of a thread in a slice

// How the warps divide a chunk.
template <int kChunk>
struct Division {
  static constexpr int kParts = kChunk / kRows;        // warps with tokens of their own
  static constexpr int kGroups = kWarps / kParts;      // of such warps
  static constexpr int kLevels = kParts == 8 ? 3 : 2;  // whose parts have the tokens of whole warps
  static constexpr int kTiles = kParts - 1;            // of 8 x 8 pairs, at most, in these levels
};

// What a warp knows of the pairs of its tokens. Elements 0 and 1 of a tile are pairs of a key, and
// elements 2 and 3 those of a query.
template <int kChunk>
struct Sums {
  float own[3][4];  // pairs of tokens of the warp, in levels of 1, 2 and 4 tokens
  float tiles[Division<kChunk>::kTiles][4];  // pairs with earlier tokens, level after level
  float key_square, query_square, pair;      // of a token alone
};

// What warps exchange in the loop over slices, in two buffers that take turns.
template <int kChunk>
struct Exchange {
  float earlier[2][Division<kChunk>::kGroups][Division<kChunk>::kLevels][kChunk / 2 * kSlice];
  float totals[2][Division<kChunk>::kGroups][Division<kChunk>::kParts][kSlice];
};

// A slice that arrives. Each thread has units of its own, so that no barrier is needed.
struct Stage {
  float4 keys[2][kThreads], queries[2][kThreads], logs[2][kThreads];
};

template <int kChunk>
struct Workspace {
  Stage stage;
  float keys[kChunk * kChunkWidth];  // a tile (TilePlace), decayed from the start of the chunk
  union {
    Exchange<kChunk> exchange;
    Sums<kChunk> sums[kThreads / 2];  // of the second group
    System<kChunk> system;
  };
  RowFactors<kChunk> factors;
  float key_scales[kChunk];
};

// A thread's channels of one token. Channels 4 h to 4 h + 3 are neighbors in memory.
struct Tokens {
  float keys[kOwn], queries[kOwn];
  // Decays from the start of the token's part to the token, and from the token to the part's end.
  float from_start[kOwn], to_end[kOwn];
};

// Left operands of which the elements are keys and queries in turn, as high and low parts.
struct Left {
  uint32_t high[4], low[4];
};
struct Right {
  uint32_t high[2], low[2];
};

// Returns the high part of a number, which TensorFloat-32 represents.
__device__ __forceinline__ uint32_t HighPart(float value) {
  return __float_as_uint(value) & 0xffffe000u;
}

// Returns the high part of what the high part leaves.
__device__ __forceinline__ uint32_t LowPart(float value, uint32_t high) {
  return HighPart(value - __uint_as_float(high));
}

// Returns the operand of product `step` of a slice, which has channels 2 step and 2 step + 1 of
// each thread.
__device__ __forceinline__ Left TakeLeft(const Tokens& own, const float (&decays)[kOwn], int step) {
  Left left;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = 2 * step + i / 2;
    const float value = (i % 2 == 0 ? own.keys[channel] : own.queries[channel]) * decays[channel];
    left.high[i] = HighPart(value);
    left.low[i] = LowPart(value, left.high[i]);
  }
  return left;
}

__device__ __forceinline__ void MultiplySplit(float (&sums)[4], const Left& left,
                                              const Right& right) {
  MultiplyAddTf32(sums, left.low, right.high[0], right.high[1]);
  MultiplyAddTf32(sums, left.high, right.low[0], right.low[1]);
  MultiplyAddTf32(sums, left.high, right.high[0], right.high[1]);
}

// Returns the token of a thread in its chunk.
template <int kChunk>
__device__ __forceinline__ int TokenOfThread() {
  return ReadThread() / 4 % kChunk;
}

// Returns the first channel of a thread in the slices that follow `first`, one for each group.
template <int kChunk>
__device__ __forceinline__ int OwnChannel(int first) {
  const int thread = ReadThread();
  return first + thread / 32 / Division<kChunk>::kParts * kSlice + 4 * (thread % 4);
}

// Starts copies of a thread's channels of its token to its units of the stage. `chunk` is the place
// of the chunk's first token. What does not exist becomes 0.
template <int kChunk>
__device__ __forceinline__ void RequestTokens(Stage& stage, const DeltaRuleCall& c,
                                              const DeltaRuleBuffers& p, int64_t chunk, int first,
                                              int present) {
  const int channel = OwnChannel<kChunk>(first), token = TokenOfThread<kChunk>();
  const int within = token * c.key_heads * c.d, width = token < present ? c.d : 0;
  const int thread = ReadThread();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool some = channel + 16 * half < width;
    const int64_t from = some ? chunk + (within + channel + 16 * half) : 0;
    const int bytes = some ? 16 : 0;
    CopyOrZero(SharedAddress(&stage.keys[half][thread]), p.k + from, bytes);
    CopyOrZero(SharedAddress(&stage.queries[half][thread]), p.q + from, bytes);
    CopyOrZero(SharedAddress(&stage.logs[half][thread]), p.g + from, bytes);
  }
  CommitCopies();
}

// Takes the tokens of a slice that the same thread requested. What does not exist has keys and
// queries of 0 and decays of 1.
__device__ __forceinline__ Tokens TakeTokens(const Stage& stage) {
  Tokens own;
  const int thread = ReadThread();
  WaitCopies<0>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 k = stage.keys[half][thread], q = stage.queries[half][thread];
    const float4 g = stage.logs[half][thread];
    const float keys[4] = {k.x, k.y, k.z, k.w}, queries[4] = {q.x, q.y, q.z, q.w};
    const float logs[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own.keys[4 * half + i] = keys[i];
      own.queries[4 * half + i] = queries[i];
      own.from_start[4 * half + i] = expf(logs[i]);
      own.to_end[4 * half + i] = 1.0f;
    }
  }
  return own;
}

// Multiplies the tokens of a warp with each other in the level of kSize tokens, and makes the
// decays those of parts of twice as many.
template <int kSize>
__device__ __forceinline__ void MultiplyOwn(Tokens& own, float (&sums)[4]) {
  const int lane = ReadThread() % 32, token = lane / 4, part = token / kSize;
  const bool odd = part % 2 == 1;
  float decays[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) decays[i] = odd ? own.from_start[i] : own.to_end[i];
#pragma unroll
  for (int step = 0; step < kOwn / 2; ++step) {
    const Left left = TakeLeft(own, decays, step);
    MultiplySplit(sums, left, {{left.high[0], left.high[2]}, {left.low[0], left.low[2]}});
  }
  // The decay over the neighboring part is that to its last token.
  const int source = 4 * ((part ^ 1) * kSize + kSize - 1) + lane % 4;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float other = __shfl_sync(kAllLanes, own.from_start[i], source);
    own.from_start[i] *= odd ? other : 1.0f;
    own.to_end[i] *= odd ? 1.0f : other;
  }
}

// Returns the place of 16 bytes, unit `unit` of `row`, in a tile with rows of kSlice floats. Two
// neighboring rows have other banks for four units.
__device__ __forceinline__ int SlicePlace(int row, int unit) {
  return row * (kSlice / 4) + (unit ^ 4 * (row & 1));
}

// Multiplies decays by those over `count` warps' tokens from `first` on.
template <int kParts>
__device__ __forceinline__ void MultiplyTotals(const float (&totals)[kParts][kSlice], int first,
                                               int count, float (&decays)[kOwn]) {
  const int q = ReadThread() % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float4 total = reinterpret_cast<const float4*>(totals[first + i])[4 * half + q];
      decays[4 * half] *= total.x;
      decays[4 * half + 1] *= total.y;
      decays[4 * half + 2] *= total.z;
      decays[4 * half + 3] *= total.w;
    }
  }
}

// Writes the rows of an even part of kSize warps for those of the odd part behind it.
template <int kSize>
__device__ __forceinline__ void WriteEarlier(const Tokens& own, float* rows, int part) {
  const int lane = ReadThread() % 32, row = (part / (2 * kSize) * kSize + part % kSize) * kRows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 keys = make_float4(own.keys[4 * half] * own.to_end[4 * half],
                                    own.keys[4 * half + 1] * own.to_end[4 * half + 1],
                                    own.keys[4 * half + 2] * own.to_end[4 * half + 2],
                                    own.keys[4 * half + 3] * own.to_end[4 * half + 3]);
    reinterpret_cast<float4*>(rows)[SlicePlace(row + lane / 4, 4 * half + lane % 4)] = keys;
  }
}

// Multiplies the tokens of a warp in an odd part of kSize warps with those of the part before it.
template <int kSize, int kTiles>
__device__ __forceinline__ void MultiplyEarlier(const Tokens& own, const float* rows, int part,
                                                float (&sums)[kTiles][4]) {
  const int lane = ReadThread() % 32, g = lane / 4, q = lane % 4;
  const int row = part / (2 * kSize) * kSize * kRows;
  const float4* const units = reinterpret_cast<const float4*>(rows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Left left[2] = {TakeLeft(own, own.from_start, 2 * half),
                          TakeLeft(own, own.from_start, 2 * half + 1)};
#pragma unroll
    for (int tile = 0; tile < kSize; ++tile) {
      const float4 four = units[SlicePlace(row + tile * kRows + g, 4 * half + q)];
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        Right right;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          right.high[i] = HighPart(values[2 * step + i]);
          right.low[i] = LowPart(values[2 * step + i], right.high[i]);
        }
        MultiplySplit(sums[kSize - 1 + tile], left[step], right);
      }
    }
  }
}

// One level that is larger than a warp's tokens: parts of kSize warps. First, warps of even parts
// write their rows.
template <int kChunk, int kSize>
__device__ __forceinline__ void WriteLevel(Tokens& own, float* rows,
                                           const float (&totals)[Division<kChunk>::kParts][kSlice],
                                           int part) {
  if (part / kSize % 2 == 1) return;
  WriteEarlier<kSize>(own, rows, part);
  MultiplyTotals(totals, (part / kSize + 1) * kSize, kSize, own.to_end);
}

// Then warps of odd parts multiply.
template <int kChunk, int kSize>
__device__ __forceinline__ void MultiplyLevel(
    Tokens& own, const float* rows, const float (&totals)[Division<kChunk>::kParts][kSlice],
    int part, Sums<kChunk>& sums) {
  if (part / kSize % 2 == 0) return;
  MultiplyEarlier<kSize>(own, rows, part, sums.tiles);
  MultiplyTotals(totals, (part / kSize - 1) * kSize, kSize, own.from_start);
}

// Adds the pairs of one slice of the channels. Afterwards the decays are those from the start of
// the chunk, and to its end.
template <int kChunk>
__device__ __forceinline__ void MultiplySlice(Exchange<kChunk>& exchange, Tokens& own, int buffer,
                                              Sums<kChunk>& sums) {
  const int thread = ReadThread(), lane = thread % 32, warp = thread / 32;
  const int part = warp % Division<kChunk>::kParts, group = warp / Division<kChunk>::kParts;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    sums.key_square += own.keys[i] * own.keys[i];
    sums.query_square += own.queries[i] * own.queries[i];
    sums.pair += own.keys[i] * own.queries[i];
  }
  MultiplyOwn<1>(own, sums.own[0]);
  MultiplyOwn<2>(own, sums.own[1]);
  MultiplyOwn<4>(own, sums.own[2]);
  auto& totals = exchange.totals[buffer][group];
  auto& earlier = exchange.earlier[buffer][group];
  if (lane / 4 == kRows - 1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<float4*>(totals[part])[4 * half + lane % 4] =
          make_float4(own.from_start[4 * half], own.from_start[4 * half + 1],
                      own.from_start[4 * half + 2], own.from_start[4 * half + 3]);
    }
  }
  __syncthreads();
  WriteLevel<kChunk, 1>(own, earlier[0], totals, part);
  WriteLevel<kChunk, 2>(own, earlier[1], totals, part);
  if constexpr (kChunk == kLargeChunk) WriteLevel<kChunk, 4>(own, earlier[2], totals, part);
  __syncthreads();
  MultiplyLevel<kChunk, 1>(own, earlier[0], totals, part, sums);
  MultiplyLevel<kChunk, 2>(own, earlier[1], totals, part, sums);
  if constexpr (kChunk == kLargeChunk)
    MultiplyLevel<kChunk, 4>(own, earlier[2], totals, part, sums);
}

// Writes what the second kernel needs of a slice, and the keys for WriteCorrections. `channel` is
// the thread's first one.
template <int kChunk>
__device__ __forceinline__ void WriteSlice(const Tokens& own, float* tile, float* queries,
                                           float* keys, int channel) {
  const int token = TokenOfThread<kChunk>();
  const bool second = token % 2 == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int unit = channel / 4 + 4 * half;
    float faded[4], read[4], write[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      faded[i] = own.keys[4 * half + i] * own.from_start[4 * half + i];
      read[i] = own.queries[4 * half + i] * own.from_start[4 * half + i];
      write[i] = own.keys[4 * half + i] * own.to_end[4 * half + i];
    }
    reinterpret_cast<float4*>(tile)[TilePlace(token, unit)] =
        make_float4(faded[0], faded[1], faded[2], faded[3]);
    reinterpret_cast<float4*>(queries)[TokenPlace(token, unit)] =
        RoundFour(make_float4(read[0], read[1], read[2], read[3]));
    // A unit of KeyPlace has the keys of two tokens at two rows of the state. The threads of the
    // two tokens have a unit each.
    const float first_sent = second ? write[0] : write[1],
                other_sent = second ? write[2] : write[3];
    const float first_got = __shfl_xor_sync(kAllLanes, first_sent, 4);
    const float other_got = __shfl_xor_sync(kAllLanes, other_sent, 4);
    const float4 both = second ? make_float4(first_got, write[1], other_got, write[3])
                               : make_float4(write[0], first_got, write[2], other_got);
    const int two = unit / 4, n = unit % 4 * 2 + token % 2;
    reinterpret_cast<float4*>(keys)[KeyPlace(token / 2, two, n)] = RoundFour(both);
  }
}

// Adds the sums of the second group of warps to those of the first one.
template <int kChunk>
__device__ __forceinline__ void AddGroups(Workspace<kChunk>& w, Sums<kChunk>& sums) {
  const int thread = ReadThread();
  __syncthreads();
  if (thread >= kThreads / 2) w.sums[thread - kThreads / 2] = sums;
  __syncthreads();
  if (thread >= kThreads / 2) return;
  const Sums<kChunk>& others = w.sums[thread];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int level = 0; level < 3; ++level) sums.own[level][i] += others.own[level][i];
#pragma unroll
    for (int tile = 0; tile < Division<kChunk>::kTiles; ++tile) {
      sums.tiles[tile][i] += others.tiles[tile][i];
    }
  }
  sums.key_square += others.key_square;
  sums.query_square += others.query_square;
  sums.pair += others.pair;
}

// Returns the sum over the four lanes of a token.
__device__ __forceinline__ float SumOfToken(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// Writes the pairs of queries to `pairs`, and L to the system.
template <int kChunk>
struct PairWriter {
  Workspace<kChunk>& w;
  float* pairs;
  int token;                     // of the thread
  float key_scale, query_scale;  // of the token; that of keys is times beta

  // Writes a thread's part of a tile with the 8 tokens from `first` on.
  __device__ __forceinline__ void Write(int first, const float (&sums)[4]) const {
    const int q = ReadThread() % 4, column = first + 2 * q;
    const float left = w.key_scales[column], right = w.key_scales[column + 1];
    reinterpret_cast<float2&>(w.system.below.At(token, column)) =
        make_float2(sums[0] * key_scale * left, sums[1] * key_scale * right);
    WritePair(column, sums[2] * query_scale * left, sums[3] * query_scale * right);
  }

  __device__ __forceinline__ void WritePair(int column, float left, float right) const {
    float* const place = pairs + 4 * PairPlace(kChunk, token, column / 4) + column % 4;
    *reinterpret_cast<float2*>(place) =
        make_float2(__uint_as_float(RoundToTf32(left)), __uint_as_float(RoundToTf32(right)));
  }
};

// Writes the pairs of a level of parts of kSize warps.
template <int kChunk, int kSize>
__device__ __forceinline__ void WriteTiles(const PairWriter<kChunk>& writer,
                                           const Sums<kChunk>& sums, int part) {
  if (part / kSize % 2 == 0) return;
  const int first = (part / kSize - 1) * kSize * kRows;
#pragma unroll
  for (int tile = 0; tile < kSize; ++tile) {
    writer.Write(first + tile * kRows, sums.tiles[kSize - 1 + tile]);
  }
}

// Writes all pairs of a warp.
template <int kChunk>
__device__ __forceinline__ void WritePairs(const PairWriter<kChunk>& writer,
                                           const Sums<kChunk>& sums, int part) {
  constexpr int kParts = Division<kChunk>::kParts;
  const int lane = ReadThread() % 32, row = lane / 4;
  WriteTiles<kChunk, 1>(writer, sums, part);
  WriteTiles<kChunk, 2>(writer, sums, part);
  if constexpr (kParts == 8) WriteTiles<kChunk, 4>(writer, sums, part);
  // Two tokens of the warp are in neighboring parts of the level of the highest bit that differs.
  float own[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * (lane % 4) + i % 2, differ = row ^ column;
    const float pair = differ >= 4 ? sums.own[2][i] : differ >= 2 ? sums.own[1][i] : sums.own[0][i];
    own[i] = row > column ? pair : 0.0f;
    if (row == column && i >= 2) own[i] = sums.pair;
  }
  writer.Write(part * kRows, own);
#pragma unroll
  for (int later = 1; later < kParts; ++later) {
    if (later > part) writer.WritePair(later * kRows + 2 * (lane % 4), 0.0f, 0.0f);
  }
}

// The blocks of the chunks of one head follow each other.
template <int kChunk>
__global__ void __launch_bounds__(kThreads, kChunk == kLargeChunk ? 2 : 1)
    ChannelDeltaPrepare(const DeltaRuleCall c, const DeltaRuleBuffers p,
                        const ChunkBuffers chunks) {
  if constexpr (kChunk > kMostChunkTokens) return;
  NVFP4_DYNAMIC_SHARED(shared);
  Workspace<kChunk>& w = *reinterpret_cast<Workspace<kChunk>*>(shared);
  const int count = static_cast<int>((c.t + kChunk - 1) / kChunk), thread = ReadThread();
  const int unit = blockIdx.x / count, chunk = blockIdx.x - unit * count;
  const int row = unit / c.key_heads, head = unit - row * c.key_heads;
  const int64_t first = static_cast<int64_t>(chunk) * kChunk, token = row * c.t + first;
  // At most 0 if all is padding.
  const int present =
      static_cast<int>(min(RowTokens(c.t, p.lengths, row) - first, int64_t{kChunk}));
  if (present < kChunk) {
    const int64_t begin = max(present, 0), end = min(c.t - first, int64_t{kChunk});
    const int64_t results = static_cast<int64_t>(c.key_heads) * c.e;
    WriteZeros(p.y + token * results + static_cast<int64_t>(head) * c.e, results, c.e, begin, end);
    if (present <= 0) return;
  }
  using Own = Division<kChunk>;
  const int lane = thread % 32, warp = thread / 32, part = warp % Own::kParts;
  const int group = warp / Own::kParts, own_token = part * kRows + lane / 4;
  const int64_t scalar = (token + own_token) * c.key_heads + head;
  if (group == 0 && lane % 4 == 0)
    w.factors.values[own_token] = own_token < present ? p.beta[scalar] : 0.0f;
  const int64_t number = blockIdx.x;  // of the chunk among those of all heads
  float* const decays = chunks.decays + number * (2 * kChunk + kChunkWidth);
  Sums<kChunk> sums = {};
  const int64_t place = (token * c.key_heads + head) * c.d;
  constexpr int kStep = kSlice * Own::kGroups;  // channels of all groups
  RequestTokens<kChunk>(w.stage, c, p, place, 0, present);
#pragma unroll 1
  for (int first_channel = 0; first_channel < kChunkWidth; first_channel += kStep) {
    Tokens own = TakeTokens(w.stage);
    const int next = first_channel + kStep;
    if (next < kChunkWidth) RequestTokens<kChunk>(w.stage, c, p, place, next, present);
    MultiplySlice(w.exchange, own, first_channel / kStep % 2, sums);
    const int64_t tile = number * kChunk * kChunkWidth;
    const int channel = OwnChannel<kChunk>(first_channel);
    WriteSlice<kChunk>(own, w.keys, chunks.queries + tile, chunks.keys + tile, channel);
    if (TokenOfThread<kChunk>() == kChunk - 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float4*>(decays + 2 * kChunk + channel + 16 * half) =
            make_float4(own.from_start[4 * half], own.from_start[4 * half + 1],
                        own.from_start[4 * half + 2], own.from_start[4 * half + 3]);
      }
    }
  }
  if constexpr (Own::kGroups == 2) AddGroups(w, sums);
  float key_scale = 1.0f, query_scale = 1.0f;
  if (c.normalize) {
    key_scale = ReciprocalRoot(SumOfToken(sums.key_square) + kTiny);
    query_scale = ReciprocalRoot(SumOfToken(sums.query_square) + kTiny) * c.scale;
  }
  sums.pair = SumOfToken(sums.pair);
  if (group == 0 && lane % 4 == 0) {
    w.key_scales[own_token] = key_scale;
    w.factors.keys[own_token] = -w.factors.values[own_token] * key_scale;
    decays[own_token] = query_scale;
    decays[kChunk + own_token] = key_scale;
  }
  __syncthreads();
  if (group == 0) {
    float* const pairs = chunks.pairs + number * kChunk * kChunk;
    const float rate = w.factors.values[own_token];
    WritePairs<kChunk>({w, pairs, own_token, rate * key_scale, query_scale}, sums, part);
  }
  WriteCorrections(w.system, w.keys, w.factors, c, p, chunks, head, number, token, present);
}

template <int kChunk>
cudaError_t LaunchChannelDeltaPrepareOf(cudaStream_t stream, const DeltaRuleCall& c,
                                        const DeltaRuleBuffers& p, const ChunkBuffers& chunks) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(c.t, kChunk) * c.b * c.key_heads));
  return LaunchWide(stream, grid, kThreads, sizeof(Workspace<kChunk>), false,
                    ChannelDeltaPrepare<kChunk>, c, p, chunks);
}

}  // namespace

cudaError_t LaunchChannelDeltaPrepare(cudaStream_t stream, const DeltaRuleCall& call,
                                      const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                                      int chunk) {
  const auto launch = chunk == kLargeChunk ? LaunchChannelDeltaPrepareOf<kLargeChunk>
                                           : LaunchChannelDeltaPrepareOf<kSmallChunk>;
  return launch(stream, call, buffers, chunks);
}

}  // namespace nvfp4
