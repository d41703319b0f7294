// Computes causal attention on mma.sync, for every device since 8.0, in bf16 and f16.
//
//   q [b, t, n, d], k [b, m, s, d], v [b, m, s, dv], positions [b, t] -> y [b, t, n, dv]
//
// A block computes a tile of rows, which are the queries of one key head (attention.cuh), and
// visits the tiles of keys that one of them sees. It therefore reads the filled part of a cache and
// not its room. Scores stay in registers: a running maximum and sum of exponentials rescale the
// output, which is never written before it is complete (arXiv:1805.02867, arXiv:2307.08691).
//
//   step  wait for a tile of keys and values; start the copies of a later one
//         scores = q @ k.T; mask them where the tile is not visible as a whole
//         weights = exp2(scores - maximum); output = output * shrink + weights @ v
//
// Copies are cp.async in a ring of stages. The 16-byte units of a row are swizzled, so that
// ldmatrix reads eight rows without bank conflicts. Keys that no row sees are zeros.
//
// A tile has one of two forms:
//
// Many rows: each warp has 16 or 32 rows and all keys of a tile. With 32 rows, a fragment of keys
// or values that ldmatrix reads serves twice as many MMAs.
//
// Few rows, for decoding, which reads keys once: 16 rows. Each warp has 16 keys of a tile and its
// own softmax. The warps join their results at the end, each for its part of the channels. With
// three stages, the first two tiles arrive together. Devices with less memory have two stages. If
// those do not fit either, wide rows have half as many warps and keys.
//
// If the tiles of rows do not fill a device, several blocks share the keys of a tile.
//
// Bottleneck: tensor cores and shared memory in a prefill; memory bandwidth in decoding.
//
// Needs: widths that are multiples of 8 up to 256. Test:
// tests/emulation/test_emulation_attention.py.
#include "cuda/attention/attention.cuh"
#include "cuda/attention/merge_parts.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"

namespace nvfp4 {
namespace {

struct AttentionGrid {
  AttentionCall call;
  AttentionBuffers buffers;
  Parts parts;
  float factor;      // of a score, in units of log2(e)
  int32_t group;     // query heads of a key head
  int32_t rows;      // rows of a key head
  int32_t tiles;     // tiles of rows
  int32_t splits;    // blocks that share the keys of a tile
  int32_t num_keys;  // s
};

// The sizes of a block. Widths are padded with zeros to kWidth and kValueWidth.
template <int kWidthSize, int kValueWidthSize, int kRowWarpCount, int kGroupCount,
          int kKeyWarpCount, int kKeyCount, int kStageCount = 2>
struct Form {
  static constexpr int kStages = kStageCount;
  static constexpr int kWidth = kWidthSize, kValueWidth = kValueWidthSize;
  static constexpr int kRowWarps = kRowWarpCount, kKeyWarps = kKeyWarpCount;
  static constexpr int kGroups = kGroupCount;  // groups of 16 rows of a warp
  static constexpr int kWarpRows = 16 * kGroups;
  static constexpr bool kSplits = kGroups == 1;  // whether blocks may share the keys of a tile
  static constexpr int kThreads = 32 * kRowWarps * kKeyWarps;
  static constexpr int kRows = kWarpRows * kRowWarps;
  static constexpr int kKeys = kKeyCount;                           // keys of a tile
  static constexpr int kWarpKeys = kKeys / kKeyWarps;               // those of one warp
  static constexpr int kScoredKeys = kGroups > 1 ? 32 : kWarpKeys;  // with scores in registers
  static constexpr int kQueryBytes = kRows * kWidth * 2;
  static constexpr int kKeyBytes = kKeys * kWidth * 2;
  static constexpr int kStageBytes = kKeyBytes + kKeys * kValueWidth * 2;
  // The warps that share rows pass their results in the memory of the stages.
  static constexpr int kPassedBytes = kKeyWarps > 1 ? kKeyWarps * 16 * kValueWidth * 4 : 0;
  static constexpr int kStageMemory =
      kStages * kStageBytes > kPassedBytes ? kStages* kStageBytes : kPassedBytes;
  static constexpr int kBytes = kQueryBytes + kStageMemory;
  // Tiles of 8 channels of the output that a warp stores.
  static constexpr int kOwnTiles = kValueWidth / 8 / kKeyWarps;
  static constexpr bool kQueriesInRegisters = kWidth * kGroups <= 128;
  static_assert(kValueWidth <= kWidth, "the output is staged in the memory of the queries");
  static_assert(kThreads >= kRows, "a thread finds the keys of one row");
  static_assert(kKeyWarps == 1 || kGroups == 1, "JoinWarps passes 16 rows");
  static_assert(kValueWidth / 8 % kKeyWarps == 0, "the warps have equal parts of the channels");
};

// Which keys the rows of a tile see.
template <typename F>
struct RowRanges {
  KeyRange of_row[F::kRows];
  // For each group of 16 rows: the keys that any row sees, and those that all rows see. Rows that
  // do not exist, and padding, count for neither.
  KeyRange any[F::kRows / 16], all[F::kRows / 16];

  // Return those keys for `count` groups from `first` on.
  __device__ __forceinline__ KeyRange Any(int first, int count) const {
    KeyRange range = any[first];
    for (int group = first + 1; group < first + count; ++group) {
      range = {min(range.begin, any[group].begin), max(range.end, any[group].end)};
    }
    return range;
  }
  __device__ __forceinline__ KeyRange All(int first, int count) const {
    KeyRange range = all[first];
    for (int group = first + 1; group < first + count; ++group) {
      range = {max(range.begin, all[group].begin), min(range.end, all[group].end)};
    }
    return range;
  }
};

template <typename F>
__device__ __forceinline__ void FindRanges(const AttentionGrid& p, int row_in_batch, int first_row,
                                           RowRanges<F>* ranges) {
  const int index = static_cast<int>(threadIdx.x);
  if (index < (F::kRows + 31) / 32 * 32) {
    const int row = first_row + index;
    KeyRange range = {0, 0};
    if (index < F::kRows && row < p.rows) {
      const int64_t query = row_in_batch * p.call.shape.t + row / p.group;
      range = VisibleKeys(p.buffers.positions[query], p.num_keys, p.call.window, p.call.chunk);
    }
    const bool counts = range.begin < range.end;
    if (index < F::kRows) ranges->of_row[index] = range;
    KeyRange any = {counts ? range.begin : p.num_keys, counts ? range.end : 0};
    KeyRange all = {counts ? range.begin : 0, counts ? range.end : p.num_keys};
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {  // half a warp has one group
      any.begin = min(any.begin, __shfl_xor_sync(kAllLanes, any.begin, step));
      any.end = max(any.end, __shfl_xor_sync(kAllLanes, any.end, step));
      all.begin = max(all.begin, __shfl_xor_sync(kAllLanes, all.begin, step));
      all.end = min(all.end, __shfl_xor_sync(kAllLanes, all.end, step));
    }
    if (index < F::kRows && index % 16 == 0) {
      ranges->any[index / 16] = any;
      ranges->all[index / 16] = all;
    }
  }
}

// Which keys a block visits: `count` tiles from `begin` on. Keys from `end` on count as zeros.
struct KeyTiles {
  int begin, end, count;
};

template <typename F>
__device__ __forceinline__ KeyTiles FindTiles(const AttentionGrid& p, int split,
                                              const RowRanges<F>& ranges) {
  const KeyRange seen = ranges.Any(0, F::kRows / 16);
  const int tiles = max(seen.end - seen.begin + F::kKeys - 1, 0) / F::kKeys;
  const int each = max((tiles + p.splits - 1) / p.splits, kSplitKeys / F::kKeys);
  const int first = min(split * each, tiles);
  return {seen.begin + first * F::kKeys, seen.end, min(tiles - first, each)};
}

// Prefetches the keys and values that a block copies first into the L2 cache. All blocks together
// would fill that cache with more of them.
template <typename F>
__device__ __forceinline__ void PrefetchKeys(const AttentionGrid& p, int head,
                                             const KeyTiles& keys) {
  const AttentionShape& shape = p.call.shape;
  const int64_t first = head * shape.s + keys.begin;
  const int tiles = max(min(keys.count, F::kStages - 1), 0);
  const int count = min(tiles * F::kKeys, keys.end - keys.begin);
  const int width = static_cast<int>(shape.d) * 2, value_width = static_cast<int>(shape.dv) * 2;
  const auto thread = static_cast<int>(threadIdx.x);
  PrefetchLines(static_cast<const uint8_t*>(p.buffers.k) + first * width, count * width, thread,
                F::kThreads);
  PrefetchLines(static_cast<const uint8_t*>(p.buffers.v) + first * value_width, count * value_width,
                thread, F::kThreads);
}

// The rows of one warp, in groups of 16. A thread has rows g and g + 8 of each group, with lane =
// 4 g + q.
template <typename T, typename F>
struct WarpRows {
  static constexpr int kSteps = F::kWidth / 16;
  static constexpr int kKeyTiles = F::kScoredKeys / 8;
  static constexpr int kValueTiles = F::kValueWidth / 8;
  using Scores = float[F::kGroups][kKeyTiles][4];

  const uint8_t* queries;  // in shared memory, of all rows
  uint32_t q[F::kGroups][F::kQueriesInRegisters ? kSteps : 1][4];
  float values[F::kGroups][kValueTiles][4] = {};
  float largest[F::kGroups][2];  // scores without the factor
  float sums[F::kGroups][2] = {};

  __device__ __forceinline__ explicit WarpRows(const uint8_t* own) : queries(own) {
#pragma unroll
    for (int group = 0; group < F::kGroups; ++group) {
      largest[group][0] = largest[group][1] = -INFINITY;
    }
  }

  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void LoadQuery(int group, int step, uint32_t (&words)[4]) const {
    const uint32_t offset = UnitOffset<F::kWidth>(Lane() % 16, Lane() / 16);
    LoadMatrices(queries + group * 16 * F::kWidth * 2 + StepOffset(offset, step), words);
  }

  __device__ __forceinline__ void LoadQueries() {
    if constexpr (F::kQueriesInRegisters) {
#pragma unroll
      for (int group = 0; group < F::kGroups; ++group) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) LoadQuery(group, step, q[group][step]);
      }
    }
  }

  // scores = queries @ keys.T; `keys` are those of this warp.
  __device__ __forceinline__ void Score(const uint8_t* keys, Scores& scores) {
    const int lane = Lane();
    const uint32_t offset = UnitOffset<F::kWidth>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      constexpr bool kLoaded = F::kQueriesInRegisters;
      if constexpr (!kLoaded) {
#pragma unroll
        for (int group = 0; group < F::kGroups; ++group) LoadQuery(group, step, q[group][0]);
      }
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        uint32_t k[4];
        LoadMatrices(keys + pair * 16 * F::kWidth * 2 + StepOffset(offset, step), k);
#pragma unroll
        for (int group = 0; group < F::kGroups; ++group) {
          const uint32_t (&own)[4] = q[group][kLoaded ? step : 0];
          MultiplyAdd<T>(scores[group][2 * pair], own, k[0], k[1]);
          MultiplyAdd<T>(scores[group][2 * pair + 1], own, k[2], k[3]);
        }
      }
    }
  }

  // Masks the scores of keys from `first_key` on that a row does not see.
  __device__ __forceinline__ static void Mask(const KeyRange* ranges, int first_key,
                                              Scores& scores) {
    const int g = Lane() / 4, q = Lane() % 4;
#pragma unroll
    for (int group = 0; group < F::kGroups; ++group) {
      const KeyRange range[2] = {ranges[16 * group + g], ranges[16 * group + g + 8]};
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first_key + 8 * tile + 2 * q + i % 2;
          if (key < range[i / 2].begin || key >= range[i / 2].end) {
            scores[group][tile][i] = -INFINITY;
          }
        }
      }
    }
  }

  // Turns scores into weights under the new maximum, and rescales what was summed before.
  __device__ __forceinline__ void Weigh(float factor, Scores& scores) {
#pragma unroll
    for (int group = 0; group < F::kGroups; ++group) WeighGroup(factor, group, scores[group]);
  }

  __device__ __forceinline__ void WeighGroup(float factor, int group,
                                             float (&scores)[kKeyTiles][4]) {
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[group][half];
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        most = fmaxf(most, fmaxf(scores[tile][2 * half], scores[tile][2 * half + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      // Until a row sees its first key, its maximum is -inf, and -inf - -inf would be NaN.
      const float base = most == -INFINITY ? 0.0f : most * factor;
      shrink[half] = FastExp2(fmaf(largest[group][half], factor, -base));
      largest[group][half] = most;
      float sum = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[tile][i] = FastExp2(fmaf(scores[tile][i], factor, -base));
          sum += scores[tile][i];
        }
      }
      sums[group][half] = fmaf(sums[group][half], shrink[half], sum);
    }
    // The maximum of a row rarely grows after its first tiles.
    if (__ballot_sync(kAllLanes, shrink[0] != 1.0f || shrink[1] != 1.0f) == 0) return;
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[group][tile][i] *= shrink[i / 2];
    }
  }

  // values += weights @ rows of v; `rows` are those of this warp's keys.
  __device__ __forceinline__ void AddValues(const uint8_t* rows, const Scores& weights) {
    const uint32_t offset = UnitOffset<F::kValueWidth>(Lane() % 16, Lane() / 16);
#pragma unroll
    for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
      uint32_t a[F::kGroups][4];
#pragma unroll
      for (int group = 0; group < F::kGroups; ++group) {
        const float (&low)[4] = weights[group][2 * pair];
        const float (&high)[4] = weights[group][2 * pair + 1];
        a[group][0] = MakePair<T>(low[0], low[1]);
        a[group][1] = MakePair<T>(low[2], low[3]);
        a[group][2] = MakePair<T>(high[0], high[1]);
        a[group][3] = MakePair<T>(high[2], high[3]);
      }
#pragma unroll
      for (int step = 0; step < kValueTiles / 2; ++step) {
        uint32_t v[4];
        LoadTransposed(rows + pair * 16 * F::kValueWidth * 2 + StepOffset(offset, step), v);
#pragma unroll
        for (int group = 0; group < F::kGroups; ++group) {
          MultiplyAdd<T>(values[group][2 * step], a[group], v[0], v[1]);
          MultiplyAdd<T>(values[group][2 * step + 1], a[group], v[2], v[3]);
        }
      }
    }
  }

  // Adds the sums of the four threads of a row.
  __device__ __forceinline__ void JoinThreads() {
#pragma unroll
    for (int group = 0; group < F::kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[group][half] += __shfl_xor_sync(kAllLanes, sums[group][half], 1);
        sums[group][half] += __shfl_xor_sync(kAllLanes, sums[group][half], 2);
      }
    }
  }
};

// Joins the results of the warps that share the rows of a tile. Each warp gets the result for its
// own tiles of channels, as its first values. `memory` has kPassedBytes and `shown` one place for
// each row of each warp.
template <typename T, typename F>
__device__ __forceinline__ void JoinWarps(float factor, uint8_t* memory,
                                          PartSum (*shown)[F::kKeyWarps], WarpRows<T, F>* rows) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float4* passed = reinterpret_cast<float4*>(memory);
  constexpr int kTiles = WarpRows<T, F>::kValueTiles;
  if (lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shown[lane / 4 + 8 * half][warp] = {rows->largest[0][half], rows->sums[0][half]};
    }
  }
  __syncthreads();  // no warp reads stages any more
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PartSum* others = shown[lane / 4 + 8 * half];
    float most = others[0].largest;
#pragma unroll
    for (int i = 1; i < F::kKeyWarps; ++i) most = fmaxf(most, others[i].largest);
    const float base = most == -INFINITY ? 0.0f : most * factor;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < F::kKeyWarps; ++i) {
      sum = fmaf(others[i].sum, FastExp2(fmaf(others[i].largest, factor, -base)), sum);
    }
    shrink[half] = FastExp2(fmaf(rows->largest[0][half], factor, -base));
    rows->largest[0][half] = most;
    rows->sums[0][half] = sum;
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float (&own)[4] = rows->values[0][tile];
    passed[(warp * kTiles + tile) * 32 + lane] =
        make_float4(own[0] * shrink[0], own[1] * shrink[0], own[2] * shrink[1], own[3] * shrink[1]);
  }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < F::kOwnTiles; ++tile) {
    float (&own)[4] = rows->values[0][tile];
    own[0] = own[1] = own[2] = own[3] = 0.0f;
#pragma unroll
    for (int i = 0; i < F::kKeyWarps; ++i) {
      const float4 other = passed[(i * kTiles + warp * F::kOwnTiles + tile) * 32 + lane];
      own[0] += other.x;
      own[1] += other.y;
      own[2] += other.z;
      own[3] += other.w;
    }
  }
}

// Where a tile of rows lies: row_in_batch of the batch, key head `head`, rows from `first_row` on.
struct TilePlace {
  int row_in_batch, head, first_row;
};

// Returns the first value of `row`, of those of `head`, in an array [b, t, n, width].
__device__ __forceinline__ int64_t RowOffset(const AttentionGrid& p, const TilePlace& at, int row,
                                             int64_t width) {
  const AttentionShape& shape = p.call.shape;
  const int query = row / p.group, member = row - query * p.group;
  return ((at.row_in_batch * shape.t + query) * shape.n + at.head * p.group + member) * width;
}

// Stores the outputs of a group of a warp's rows, from `group_row` of the tile on, and from tile
// `first_tile` of the channels on. They pass through the memory of its queries, so that each thread
// stores 16 bytes.
template <typename T, typename F>
__device__ __forceinline__ void StoreOutputs(const AttentionGrid& p, const TilePlace& at, int group,
                                             int group_row, int first_tile, uint8_t* memory,
                                             const WarpRows<T, F>& rows) {
  const int lane = WarpRows<T, F>::Lane(), g = lane / 4, q = lane % 4;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.first_row + group_row + g + 8 * half;
    float total = rows.sums[group][half];
    if (p.buffers.sinks != nullptr && row < p.rows) {
      const float sink = __ldg(p.buffers.sinks + at.head * p.group + row % p.group);
      total += FastExp2(sink * kLog2E - rows.largest[group][half] * p.factor);
    }
    inverse[half] = total > 0.0f ? FastReciprocal(total) : 0.0f;
  }
  __syncwarp();  // the last fragments of queries have been read
#pragma unroll
  for (int tile = 0; tile < F::kOwnTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = MakePair<T>(rows.values[group][tile][2 * half] * inverse[half],
                                        rows.values[group][tile][2 * half + 1] * inverse[half]);
      memcpy(memory + UnitOffset<F::kValueWidth>(g + 8 * half, first_tile + tile) + 4 * q, &pair,
             sizeof(pair));
    }
  }
  __syncwarp();
  const int width = static_cast<int>(p.call.shape.dv);
  constexpr int kUnits = F::kOwnTiles;  // a unit has the channels of a tile
#pragma unroll 1
  for (int index = lane; index < 16 * kUnits; index += 32) {
    const int own = index / kUnits, unit = first_tile + index % kUnits;
    const int row = at.first_row + group_row + own;
    if (row >= p.rows || unit * kUnit >= width) continue;
    T* target = static_cast<T*>(p.buffers.y) + RowOffset(p, at, row, width) + unit * kUnit;
    *reinterpret_cast<uint4*>(target) =
        *reinterpret_cast<const uint4*>(memory + UnitOffset<F::kValueWidth>(own, unit));
  }
}

// Stores the results of one part of the keys for a group of a warp's rows, from tile `first_tile`
// of the channels on.
template <typename T, typename F>
__device__ __forceinline__ void StorePart(const AttentionGrid& p, int group, int64_t first_row,
                                          int rows_left, int first_tile,
                                          const WarpRows<T, F>& rows) {
  const int lane = WarpRows<T, F>::Lane(), g = lane / 4, q = lane % 4;
  const int width = static_cast<int>(p.call.shape.dv);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (g + 8 * half >= rows_left) continue;
    const int64_t row = first_row + g + 8 * half;
    if (q == 0 && first_tile == 0) {
      p.parts.sums[row] = {rows.largest[group][half] * p.factor, rows.sums[group][half]};
    }
    float* target = p.parts.values + row * width + 8 * first_tile + 2 * q;
#pragma unroll
    for (int tile = 0; tile < F::kOwnTiles; ++tile) {
      if (8 * (first_tile + tile) < width) {
        *reinterpret_cast<float2*>(target + 8 * tile) =
            make_float2(rows.values[group][tile][2 * half], rows.values[group][tile][2 * half + 1]);
      }
    }
  }
}

template <typename T, typename F>
__global__ void __launch_bounds__(F::kThreads, 1) AttentionSm80(const AttentionGrid p) {
  NVFP4_DYNAMIC_SHARED(shared);
  __shared__ RowRanges<F> ranges;
  __shared__ PartSum shown[F::kKeyWarps > 1 ? 16 : 1][F::kKeyWarps];
  if (!p.call.positions_are_older) WaitForPrecedingKernel();
  const AttentionShape& shape = p.call.shape;
  // The last tile of rows sees most keys and starts first. All heads of a tile follow each other.
  const int heads = static_cast<int>(shape.b * shape.m);
  const int head_index = static_cast<int>(blockIdx.x) % heads;
  const int part = static_cast<int>(blockIdx.x) / heads;
  const int split = part % p.splits, tile = p.tiles - 1 - part / p.splits;
  const int num_heads = static_cast<int>(shape.m);
  const TilePlace at = {head_index / num_heads, head_index % num_heads, tile * F::kRows};

  FindRanges<F>(p, at.row_in_batch, at.first_row, &ranges);
  __syncthreads();
  const KeyTiles keys = FindTiles<F>(p, split, ranges);
  if (p.call.positions_are_older) {
    if constexpr (F::kSplits) PrefetchKeys<F>(p, head_index, keys);
    WaitForPrecedingKernel();
  }
  StartNextKernel();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row_warp = warp / F::kKeyWarps, key_warp = warp % F::kKeyWarps;
  const int64_t part_row =
      (static_cast<int64_t>(head_index) * p.splits + split) * p.rows + at.first_row;
  if (F::kSplits && p.splits > 1 && keys.count <= 0) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < F::kRows && at.first_row + row < p.rows) p.parts.sums[part_row + row] = {0.0f, 0.0f};
    return;
  }

  const uint32_t memory = SharedAddress(shared);
  const auto* q = static_cast<const uint16_t*>(p.buffers.q);
  const int width = static_cast<int>(shape.d), value_width = static_cast<int>(shape.dv);
  CopyRows<F::kRows, F::kWidth, F::kThreads>(memory, width, p.rows - at.first_row, [&](int row) {
    return q + RowOffset(p, at, at.first_row + row, width);
  });
  const auto* all_k = static_cast<const uint16_t*>(p.buffers.k) + head_index * shape.s * shape.d;
  const auto* all_v = static_cast<const uint16_t*>(p.buffers.v) + head_index * shape.s * shape.dv;
  const auto copy = [&](int index) {
    if (index < keys.count) {
      const int first = keys.begin + index * F::kKeys, count = keys.end - first;
      const uint32_t stage = memory + F::kQueryBytes + index % F::kStages * F::kStageBytes;
      const uint16_t* k = all_k + first * shape.d;
      const uint16_t* v = all_v + first * shape.dv;
      CopyRows<F::kKeys, F::kWidth, F::kThreads>(stage, width, count,
                                                 Consecutive<F::kThreads>(k, width));
      CopyRows<F::kKeys, F::kValueWidth, F::kThreads>(stage + F::kKeyBytes, value_width, count,
                                                      Consecutive<F::kThreads>(v, value_width));
    }
    CommitCopies();
  };
#pragma unroll
  for (int stage = 0; stage < F::kStages - 1; ++stage) copy(stage);

  const int warp_row = row_warp * F::kWarpRows;
  uint8_t* const queries = shared + warp_row * F::kWidth * 2;
  WarpRows<T, F> rows(queries);
  const KeyRange any = ranges.Any(warp_row / 16, F::kGroups);
  const KeyRange all = ranges.All(warp_row / 16, F::kGroups);
#pragma unroll 1
  for (int index = 0; index < keys.count; ++index) {
    WaitCopies<F::kStages - 2>();
    __syncthreads();  // all warps have the tile, and have left the stage that is filled next
    copy(index + F::kStages - 1);
    if (index == 0) rows.LoadQueries();
    const uint8_t* stage = shared + F::kQueryBytes + index % F::kStages * F::kStageBytes;
#pragma unroll 1
    for (int own = 0; own < F::kWarpKeys; own += F::kScoredKeys) {
      const int in_tile = key_warp * F::kWarpKeys + own;
      const int first = keys.begin + index * F::kKeys + in_tile;
      if (first >= any.end || first + F::kScoredKeys <= any.begin) continue;  // no row sees these
      typename WarpRows<T, F>::Scores scores = {};
      rows.Score(stage + in_tile * F::kWidth * 2, scores);
      if (first < all.begin || first + F::kScoredKeys > all.end) {
        rows.Mask(ranges.of_row + warp_row, first, scores);
      }
      rows.Weigh(p.factor, scores);
      rows.AddValues(stage + F::kKeyBytes + in_tile * F::kValueWidth * 2, scores);
    }
  }
  WaitCopies<0>();
  rows.JoinThreads();
  if constexpr (F::kKeyWarps > 1) {
    JoinWarps<T, F>(p.factor, shared + F::kQueryBytes, shown, &rows);
  }
  const int first_tile = key_warp * F::kOwnTiles;
#pragma unroll
  for (int group = 0; group < F::kGroups; ++group) {
    const int row = warp_row + 16 * group;
    if (F::kSplits && p.splits > 1) {
      StorePart<T, F>(p, group, part_row + row, p.rows - at.first_row - row, first_tile, rows);
    } else {
      StoreOutputs<T, F>(p, at, group, row, first_tile, queries + group * 16 * F::kWidth * 2, rows);
    }
  }
}

template <typename T, typename F>
cudaError_t LaunchForm(cudaStream_t stream, AttentionGrid grid) {
  const AttentionShape& shape = grid.call.shape;
  grid.tiles = static_cast<int32_t>(CeilDiv(grid.rows, F::kRows));
  const int64_t blocks = shape.b * shape.m * grid.tiles * grid.splits;
  return LaunchWide(stream, dim3(static_cast<unsigned>(blocks)), F::kThreads, F::kBytes,
                    /*overlaps=*/true, AttentionSm80<T, F>, grid);
}

// The most shared memory of any multiprocessor. A block needs kOtherBytes besides F::kBytes: static
// shared memory, rounded up, and what the driver reserves.
constexpr int kMostSharedBytes = 228 << 10, kOtherBytes = 2 << 10;

// Whether `blocks` blocks of form F fit into a multiprocessor of the current device.
template <typename F>
bool Fits(int blocks) {
  return F::kBytes <= MultiprocessorSharedBytes() / blocks - kOtherBytes;
}

// Chooses the form of tiles with few rows. Wide rows leave room for one block on a multiprocessor,
// which has as many warps and keys as two blocks with narrow rows.
template <typename T, int kWidth, int kValueWidth>
cudaError_t LaunchFewRows(cudaStream_t stream, const AttentionGrid& grid) {
  constexpr bool kWide = kWidth > kNarrowKeys;
  constexpr int kBlocks = kWide ? 1 : 2;
  using ThreeStages = Form<kWidth, kValueWidth, 1, 1, 4, 64, 3>;
  using TwoStages = Form<kWidth, kValueWidth, 1, 1, 4, 64>;
  if constexpr (kBlocks * ThreeStages::kBytes <= kMostSharedBytes) {
    if (Fits<ThreeStages>(kBlocks)) return LaunchForm<T, ThreeStages>(stream, grid);
  }
  if constexpr (kWide) {  // 8.6, 8.9 and 12.x have at most 99 KiB of shared memory for a block
    using Small = Form<kWidth, kValueWidth, 1, 1, 2, 32>;
    if (!Fits<TwoStages>(kBlocks)) return LaunchForm<T, Small>(stream, grid);
  }
  return LaunchForm<T, TwoStages>(stream, grid);
}

// Chooses the form of the tiles. More rows in a tile read keys less often; fewer rows make more
// blocks.
template <typename T, int kWidth, int kValueWidth>
cudaError_t LaunchWidth(cudaStream_t stream, const AttentionGrid& grid) {
  if (grid.rows <= 16) return LaunchFewRows<T, kWidth, kValueWidth>(stream, grid);
  constexpr int kKeys = kWidth <= 128 ? 64 : 32;  // for a block of 99 KiB
  if constexpr (kValueWidth <= 128) {             // two groups of 256 values would spill registers
    const int64_t blocks = grid.call.shape.b * grid.call.shape.m * CeilDiv(grid.rows, 128);
    if (grid.splits == 1 && blocks >= MultiprocessorCount()) {
      return LaunchForm<T, Form<kWidth, kValueWidth, 4, 2, 1, kKeys>>(stream, grid);
    }
  }
  return LaunchForm<T, Form<kWidth, kValueWidth, 4, 1, 1, kKeys>>(stream, grid);
}

template <typename T>
cudaError_t LaunchTyped(cudaStream_t stream, const AttentionGrid& grid) {
  const int64_t d = grid.call.shape.d, dv = grid.call.shape.dv;
  if (std::max(d, dv) <= 64) return LaunchWidth<T, 64, 64>(stream, grid);
  if (std::max(d, dv) <= 128) return LaunchWidth<T, 128, 128>(stream, grid);
  if (d <= kNarrowKeys && dv <= kNarrowValues) {
    return LaunchWidth<T, kNarrowKeys, kNarrowValues>(stream, grid);
  }
  return LaunchWidth<T, 256, 256>(stream, grid);
}

}  // namespace

cudaError_t LaunchAttentionSm80(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers) {
  AttentionGrid grid = {};
  grid.call = call;
  grid.buffers = buffers;
  grid.factor = call.scale * kLog2E;
  grid.group = static_cast<int32_t>(call.shape.group());
  grid.rows = static_cast<int32_t>(call.shape.t * grid.group);
  grid.splits = static_cast<int32_t>(Splits(call.shape));
  grid.num_keys = static_cast<int32_t>(call.shape.s);
  Sections sections(buffers.workspace);
  grid.parts = TakeParts(&sections, call.shape, grid.splits);
  NVFP4_RETURN_IF_CUDA_ERROR(call.type == DataType::kBF16 ? LaunchTyped<__nv_bfloat16>(stream, grid)
                                                          : LaunchTyped<__half>(stream, grid));
  if (grid.splits == 1) return cudaSuccess;
  return LaunchMergeParts(stream, call, buffers, grid.parts, grid.splits);
}

}  // namespace nvfp4
