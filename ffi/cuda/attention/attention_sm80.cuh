// The kernel for causal attention on mma.sync, for every device since 8.0, in bf16 and f16.
//
//   q [b, t, n, d], k [b, m, s, d], v [b, m, s, dv], positions [b, t] -> y [b, t, n, dv]
//
// A block computes a tile of rows, which are the queries of one key head (attention.cuh), and
// visits the tiles of keys that one of them sees. It therefore reads the filled part of a cache and
// not its room. Scores stay in registers: a running maximum and sum of exponentials rescale the
// output, which is never written before it is complete (arXiv:1805.02867, arXiv:2307.08691).
//
//   step  wait for a tile of keys and values; start the copies of a later one.
//         scores = q @ k.T; mask them where the tile is not visible as a whole.
//         weights = exp2(scores - maximum); output = output * shrink + weights @ v
//
// Copies are cp.async in a ring of stages. The 16-byte units of a row are swizzled, so that
// ldmatrix reads eight rows without bank conflicts. Keys that no row sees are zeros.
//
// If the tiles of rows do not fill a device, several blocks share the keys of a tile.
//
// The kernel may also prepare the heads of single tokens (token_heads.cuh).
//
// attention_sm80.cu and attention_fp8.cu choose the forms of tiles.
#pragma once

#include <algorithm>
#include <cfloat>

#include "cuda/attention/attention.cuh"
#include "cuda/attention/merge_parts.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/attention/token_heads.cuh"
#include "cuda/attention/warp_rows.cuh"
#include "cuda/instructions/hopper.cuh"

namespace nvfp4 {

struct AttentionGrid {
  AttentionCall call;
  AttentionBuffers buffers;
  Parts parts;
  float factor;      // of a score, in units of log2(e); E4M3 keys have k_scale besides
  int32_t group;     // query heads of a key head
  int32_t rows;      // rows of a key head
  int32_t tiles;     // tiles of rows
  int32_t splits;    // blocks that share the keys of a tile
  int32_t num_keys;  // s
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

// What scores are multiplied by, in units of log2(e), and what outputs are multiplied by.
struct Scales {
  float score, value;
};

// Returns the scales of key head `head`.
template <typename F>
__device__ __forceinline__ Scales FindScales(const AttentionGrid& p, int head) {
  if constexpr (F::kE4M3) {
    const float score = p.factor * __ldg(p.buffers.k_scale + head);
    // With a factor of 0, masked scores would be -inf * 0, which is NaN. NaN stays NaN.
    return {score < FLT_MIN ? FLT_MIN : score, __ldg(p.buffers.v_scale + head)};
  } else {
    return {p.factor, 1.0f};
  }
}

// Which keys a block visits: `count` tiles from `begin` on. Keys from `end` on count as zeros.
struct VisitedKeys {
  int begin, end, count;
};

template <typename F>
__device__ __forceinline__ VisitedKeys FindTiles(const AttentionGrid& p, int split,
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
                                             const VisitedKeys& keys) {
  const AttentionShape& shape = p.call.shape;
  const int64_t first = head * shape.s + keys.begin;
  const int tiles = max(min(keys.count, F::kStages - 1), 0);
  const int count = min(tiles * F::kKeys, keys.end - keys.begin);
  constexpr int kSize = sizeof(typename F::Key);
  const int width = static_cast<int>(shape.d) * kSize;
  const int value_width = static_cast<int>(shape.dv) * kSize;
  const auto thread = static_cast<int>(threadIdx.x);
  PrefetchLines(static_cast<const uint8_t*>(p.buffers.k) + first * width, count * width, thread,
                F::kThreads);
  PrefetchLines(static_cast<const uint8_t*>(p.buffers.v) + first * value_width, count * value_width,
                thread, F::kThreads);
}

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
__device__ __forceinline__ void StoreOutputs(const AttentionGrid& p, const TilePlace& at,
                                             const Scales& scales, int group, int group_row,
                                             int first_tile, uint8_t* memory,
                                             const WarpRows<T, F>& rows) {
  using Rows = WarpRows<T, F>;
  const int lane = Rows::Lane(), g = lane / 4, q = lane % 4;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.first_row + group_row + g + 8 * half;
    float total = rows.sums[group][half];
    if (p.buffers.sinks != nullptr && row < p.rows) {
      const float sink = __ldg(p.buffers.sinks + at.head * p.group + row % p.group);
      total += FastExp2(sink * kLog2E - rows.largest[group][half] * scales.score);
    }
    inverse[half] = total > 0.0f ? FastReciprocal(total) * scales.value : 0.0f;
  }
  __syncwarp();  // the last fragments of queries have been read
#pragma unroll
  for (int tile = 0; tile < F::kOwnTiles; ++tile) {
    const int column = Rows::Column(tile);
    const int unit = first_tile + column / kUnit + (F::kE4M3 ? q / 2 : 0);
    const int in_unit =
        column % kUnit + (F::kE4M3 ? Rows::kChannels * (q % 2) : Rows::kChannels * q);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = MakePair<T>(rows.values[group][tile][2 * half] * inverse[half],
                                        rows.values[group][tile][2 * half + 1] * inverse[half]);
      memcpy(memory + UnitOffset<F::kValueWidth>(g + 8 * half, unit) + 2 * in_unit, &pair,
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
__device__ __forceinline__ void StorePart(const AttentionGrid& p, const Scales& scales, int group,
                                          int64_t first_row, int rows_left, int first_tile,
                                          const WarpRows<T, F>& rows) {
  const int lane = WarpRows<T, F>::Lane(), g = lane / 4, q = lane % 4;
  const int width = static_cast<int>(p.call.shape.dv);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (g + 8 * half >= rows_left) continue;
    const int64_t row = first_row + g + 8 * half;
    if (q == 0 && first_tile == 0) {
      p.parts.sums[row] = {rows.largest[group][half] * scales.score, rows.sums[group][half]};
    }
    float* target = p.parts.values + row * width + 8 * first_tile + WarpRows<T, F>::kChannels * q;
#pragma unroll
    for (int tile = 0; tile < F::kOwnTiles; ++tile) {
      const float (&own)[4] = rows.values[group][tile];
      if (8 * (first_tile + tile) < width) {
        *reinterpret_cast<float2*>(target + WarpRows<T, F>::Column(tile)) =
            make_float2(own[2 * half] * scales.value, own[2 * half + 1] * scales.value);
      }
    }
  }
}

// W: the type of the weights of norms of heads that the kernel prepares.
template <typename T, typename F, typename W>
__global__ void __launch_bounds__(F::kThreads, 1)
    AttentionSm80(const AttentionGrid p, const InputHeads heads) {
  constexpr bool kPrepares = !std::is_same_v<W, NoHeads>;
  using Token = std::conditional_t<kPrepares, TokenHeads<T, W, F>, NoHeads>;
  NVFP4_DYNAMIC_SHARED(shared);
  __shared__ RowRanges<F> ranges;
  __shared__ PartSum shown[F::kKeyWarps > 1 ? 16 : 1][F::kKeyWarps];
  __shared__ typename Token::Fresh fresh;
  const bool starts_early = kPrepares ? heads.unchanged : p.call.positions_are_unchanged;
  if (!starts_early) WaitForPrecedingKernel();
  const AttentionShape& shape = p.call.shape;
  // The last tile of rows sees most keys and starts first. All heads of a tile follow each other.
  const int key_heads = static_cast<int>(shape.b * shape.m);
  const int head_index = static_cast<int>(blockIdx.x) % key_heads;
  const int part = static_cast<int>(blockIdx.x) / key_heads;
  const int split = part % p.splits, tile = p.tiles - 1 - part / p.splits;
  const int num_heads = static_cast<int>(shape.m);
  const TilePlace at = {head_index / num_heads, head_index % num_heads, tile * F::kRows};

  FindRanges<F>(p, at.row_in_batch, at.first_row, &ranges);
  if constexpr (kPrepares) Token::Clear(shared, &fresh);
  __syncthreads();
  const VisitedKeys keys = FindTiles<F>(p, split, ranges);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row_warp = warp / F::kKeyWarps, key_warp = warp % F::kKeyWarps;
  const uint32_t memory = SharedAddress(shared);
  const int width = static_cast<int>(shape.d), value_width = static_cast<int>(shape.dv);
  using Key = typename F::Key;
  const auto* all_k = static_cast<const Key*>(p.buffers.k) + head_index * shape.s * shape.d;
  const auto* all_v = static_cast<const Key*>(p.buffers.v) + head_index * shape.s * shape.dv;
  const auto copy = [&](int index) {
    if (index < keys.count) {
      const int first = keys.begin + index * F::kKeys, count = keys.end - first;
      const uint32_t stage = memory + F::kQueryBytes + index % F::kStages * F::kStageBytes;
      const Consecutive<F::kThreads, kTogether<F::kRowBytes>, Key> k(all_k + first * shape.d,
                                                                     width);
      const Consecutive<F::kThreads, kTogether<F::kValueBytes>, Key> v(all_v + first * shape.dv,
                                                                       value_width);
      CopyRows<F::kKeys, F::kWidth, F::kThreads>(stage, width, count, k);
      CopyRows<F::kKeys, F::kValueWidth, F::kThreads>(stage + F::kKeyBytes, value_width, count, v);
    }
    CommitCopies();
  };
  const auto copy_first = [&] {
#pragma unroll
    for (int stage = 0; stage < F::kStages - 1; ++stage) copy(stage);
  };
  const auto wait_and_start_next = [&] {
    if (starts_early) WaitForPrecedingKernel();
    StartNextKernel();
  };
  const int64_t part_row =
      (static_cast<int64_t>(head_index) * p.splits + split) * p.rows + at.first_row;
  if (F::kSplits && p.splits > 1 && keys.count <= 0) {
    wait_and_start_next();
    const int row = static_cast<int>(threadIdx.x);
    if (row < F::kRows && at.first_row + row < p.rows) p.parts.sums[part_row + row] = {0.0f, 0.0f};
    return;
  }
  if constexpr (kPrepares) {
    copy_first();
    const Token token(heads, at.row_in_batch, at.head, p.group);
    const int place = token.position() - keys.begin;
    const bool visits = place >= 0 && place < min(keys.end - keys.begin, keys.count * F::kKeys);
    if (threadIdx.x == 0) fresh.place = visits ? place : -1;
    uint8_t* const raw = shared + F::kQueryBytes + (F::kStages - 1) * F::kStageBytes;
    static_assert(Token::kRawBytes <= F::kStageBytes, "the last stage is not filled yet");
    // The first pass takes the place of the wait. It prepares numbers that do not matter, one head
    // for each warp, and brings the code of the second pass into the instruction cache.
#pragma unroll 1
    for (int pass = starts_early ? 0 : 1; pass < 2; ++pass) {
      int count = min(p.group, F::kThreads / 32);
      if (pass == 1) {
        wait_and_start_next();
        token.Bring(raw);
        count = p.group + 2;
        __syncthreads();
      }
      token.Prepare(count, raw, pass == 1 && visits, shared, &fresh);
      if (pass == 0) __syncthreads();  // all warps have read what the heads take the place of
    }
  } else {
    if (F::kSplits && starts_early) PrefetchKeys<F>(p, head_index, keys);
    wait_and_start_next();
    const auto* q = static_cast<const uint16_t*>(p.buffers.q);
    CopyRows<F::kRows, F::kWidth, F::kThreads>(memory, width, p.rows - at.first_row, [&](int row) {
      return q + RowOffset(p, at, at.first_row + row, width);
    });
    copy_first();
  }

  const Scales scales = FindScales<F>(p, at.head);
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
    if (index == 0) {
      if constexpr (F::kE4M3) {
        SpreadQueries<F>(shared);
        __syncthreads();
      }
      rows.LoadQueries();
    }
    uint8_t* const stage = shared + F::kQueryBytes + index % F::kStages * F::kStageBytes;
    if constexpr (kPrepares) {
      const int row = fresh.place - index * F::kKeys;
      if (row >= 0 && row < F::kKeys) {
        Token::PutInto(row, fresh, stage, stage + F::kKeyBytes);
        __syncthreads();
      }
    }
#pragma unroll 1
    for (int own = 0; own < F::kWarpKeys; own += F::kScoredKeys) {
      const int in_tile = key_warp * F::kWarpKeys + own;
      const int first = keys.begin + index * F::kKeys + in_tile;
      if (first >= any.end || first + F::kScoredKeys <= any.begin) continue;  // no row sees these
      typename WarpRows<T, F>::Scores scores = {};
      rows.Score(stage + in_tile * F::kRowBytes, scores);
      if (first < all.begin || first + F::kScoredKeys > all.end) {
        rows.Mask(ranges.of_row + warp_row, first, scores);
      }
      rows.Weigh(scales.score, scores);
      rows.AddValues(stage + F::kKeyBytes + in_tile * F::kValueBytes, scores);
    }
  }
  WaitCopies<0>();
  rows.JoinThreads();
  if constexpr (F::kKeyWarps > 1) {
    JoinWarps<T, F>(scales.score, shared + F::kQueryBytes, shown, &rows);
  }
  rows.OrderChannels();
  const int first_tile = key_warp * F::kOwnTiles;
#pragma unroll
  for (int group = 0; group < F::kGroups; ++group) {
    const int row = warp_row + 16 * group;
    if (F::kSplits && p.splits > 1) {
      const int rows_left = p.rows - at.first_row - row;
      StorePart<T, F>(p, scales, group, part_row + row, rows_left, first_tile, rows);
    } else {
      uint8_t* const own = queries + group * 16 * F::kWidth * 2;
      StoreOutputs<T, F>(p, at, scales, group, row, first_tile, own, rows);
    }
  }
}

template <typename T, typename F, typename W = NoHeads>
cudaError_t LaunchForm(cudaStream_t stream, AttentionGrid grid) {
  const AttentionShape& shape = grid.call.shape;
  grid.tiles = static_cast<int32_t>(CeilDiv(grid.rows, F::kRows));
  const int64_t blocks = shape.b * shape.m * grid.tiles * grid.splits;
  return LaunchWide(stream, dim3(static_cast<unsigned>(blocks)), F::kThreads, F::kBytes,
                    /*overlaps=*/true, AttentionSm80<T, F, W>, grid,
                    grid.buffers.heads == nullptr ? InputHeads{} : *grid.buffers.heads);
}

// The most shared memory of any multiprocessor. A block needs kOtherBytes besides F::kBytes: static
// shared memory, rounded up, and what the driver reserves.
constexpr int kMostSharedBytes = 228 << 10, kOtherBytes = 2 << 10;

// Whether `blocks` blocks of form F fit into a multiprocessor of the current device.
template <typename F>
bool Fits(int blocks) {
  return F::kBytes <= MultiprocessorSharedBytes() / blocks - kOtherBytes;
}

template <typename Forms, typename T>
cudaError_t LaunchTyped(cudaStream_t stream, const AttentionGrid& grid) {
  const int64_t d = grid.call.shape.d, dv = grid.call.shape.dv;
  if (std::max(d, dv) <= 64) return Forms::template Launch<T, 64, 64>(stream, grid);
  if (std::max(d, dv) <= 128) return Forms::template Launch<T, 128, 128>(stream, grid);
  if (d <= kNarrowKeys && dv <= kNarrowValues) {
    return Forms::template Launch<T, kNarrowKeys, kNarrowValues>(stream, grid);
  }
  return Forms::template Launch<T, 256, 256>(stream, grid);
}

// Computes attention with the forms of tiles that Forms::Launch chooses for padded widths.
template <typename Forms>
cudaError_t LaunchForms(cudaStream_t stream, const AttentionCall& call,
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
  const auto launch =
      call.type == DataType::kBF16 ? LaunchTyped<Forms, __nv_bfloat16> : LaunchTyped<Forms, __half>;
  NVFP4_RETURN_IF_CUDA_ERROR(launch(stream, grid));
  if (grid.splits == 1) return cudaSuccess;
  return LaunchMergeParts(stream, call, buffers, grid.parts, grid.splits);
}

}  // namespace nvfp4
