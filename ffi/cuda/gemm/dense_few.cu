// Computes y[r] = W @ x[r] + bias with float32 sums for at most 64 rows, in one launch: routers,
// the head, and linear layers that are not quantized or that have FP8 weights.
//
//   x     [rows, k]  bf16 or f16
//   W     [n, k]     the type of x; or f32, if x is bf16; or E4M3
//   bias  [n]        the type of x, or f32; it may be left out
//   y     [rows, n]  f32, or rounded to the type of x
//
// The bias is added in float32 to the sum, after all scales, and the result is rounded once.
//
// E4M3 weights have scales, which are f32: one for each weight row, or one for each 128 of k of a
// row. Those of the rows of x may be left out, or be one for all rows:
//
//   y[r, j] = (sum_i W[j, i] x[r, i]) * row_scale[r] * weight_scale[j]
//   y[r, j] = (sum_g weight_scale[j, g] * (sum_i W[j, 128 g + i] x[r, 128 g + i])) * row_scale[r]
//
// A block computes an output tile: some weight rows, and all rows of x. Its eight warps form teams,
// which divide k between them.
//
//   weight rows  slabs of a warp  teams      a piece of k  layers
//   16           1                8          256           small ones, such as routers; f32 weights
//   64           1                2 of four  128           others of up to 16 rows
//   128          2                2 of four  64            others of more rows
//
// The first form has the most output tiles, so that a small layer occupies many multiprocessors.
// But each output tile reads all of x from the L2 cache. The other forms read x less often. In the
// last one, a warp multiplies each fragment of x by two slabs of 16 weight rows. Clusters along k
// give each multiprocessor work.
//
// A block brings x and W to shared memory by cp.async, a few pieces ahead. The memory of a piece is
// reused in turn (a ring of stages), so that k has no bound. Registers hold no weights in flight.
//
// Both operands of an MMA may use the same permutation of k. A lane therefore takes eight
// contiguous elements of a row as its part of two MMAs, which cover 32 of k together. In 16 bits
// this is one load of 16 bytes.
//
// E4M3 weights become pairs of the type of x in registers, exactly (e4m3_pairs.cuh). x may hold
// rounded activations, which are E4M3 numbers in a wider type.
//
// A float32 weight is the sum of three bf16 numbers, which are its bits 23 to 16, 15 to 8 and 7 to
// 0. Three MMAs give the exact products. The weights must be finite. If x is infinite, an output
// may be NaN instead of an infinity.
//
// Partial sums are added in the order of the teams, then in that of the blocks of a cluster. The
// bits of a row depend on the other rows of a call only where their number changes the form.
//
// The kernel may start before the preceding one ends. If that kernel may have written the weights,
// this one only prefetches them into the L2 cache before it waits. Otherwise it brings the first
// pieces to shared memory.
//
// One row of a small layer has a kernel of its own (dense_vector.cu). On an H200, so have layers of
// 512 to 33792 outputs (linear_sm90.cu), unless their weights are f32.
//
// Bottleneck: latency for a router; otherwise reading weights.
//
// Needs: sm_80; k a multiple of 8, or of 16 if weights are E4M3.
// Tests: tests/emulation/test_dense_few.py, tests/gpu/test_dense_few.py.
#include "cuda/gemm/dense_few.cuh"

#include <algorithm>
#include <type_traits>

#include "cuda/gemm/add_sums.cuh"
#include "cuda/gemm/dense_vector.cuh"
#include "cuda/gemm/e4m3_pairs.cuh"
#include "cuda/gemm/linear_sm90.cuh"
#include "cuda/gemm/piece_ring.cuh"
#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "nvfp4.h"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSlabRows = 16;
constexpr int kStepK = 32;            // of two MMAs
constexpr int kMaxStages = 4;         // of the ring
constexpr int kRingBytes = 96 << 10;  // any device gives a block 99 KiB
constexpr int32_t kMaxRanks = 8;      // every device with clusters has those of eight blocks
constexpr int kMostRows = static_cast<int>(kMostDenseRows);
static_assert(kMostRows + 128 <= kThreads, "a thread brings a scale");
constexpr int kSmall = 16, kMedium = 64, kLarge = 128;  // weight rows of an output tile

// How weights are stored: in the type of x, in f32, or in E4M3 with a scale for each row, or with
// one for each kGroup of k of a row.
enum class WeightKind { kLikeX, kF32, kE4M3, kGroupedE4M3 };

constexpr int kGroup = 128;
static_assert(kGroup == kDenseGroup, "as launch.h says");
template <WeightKind kKind>
constexpr bool kIsFloat = kKind == WeightKind::kF32;
template <WeightKind kKind>
constexpr bool kIsGrouped = kKind == WeightKind::kGroupedE4M3;
template <WeightKind kKind>
constexpr bool kIsE4M3 = kKind == WeightKind::kE4M3 || kIsGrouped<kKind>;
template <WeightKind kKind>
using ElementOf = std::conditional_t<kIsFloat<kKind>, float,
                                     std::conditional_t<kIsE4M3<kKind>, uint8_t, uint16_t>>;

// The sizes of a form of the kernel for up to 8 * kEights rows.
template <WeightKind kKind, int kTile, int kEights>
struct Form {
  static constexpr int kTileRows = kTile, kMostEights = kEights;
  static constexpr int kPieceK = kTile == kSmall ? 256 : kTile == kMedium ? 128 : 64;
  static constexpr int kWarpSlabs = kTile == kLarge ? 2 : 1;
  static constexpr int kTileSlabs = kTile / kSlabRows;
  static constexpr int kTeams = kWarps * kWarpSlabs / kTileSlabs;
  static constexpr int kTeamSteps = kPieceK / kStepK / kTeams;
  static constexpr int kWeightBytes = kTile * kPieceK * static_cast<int>(sizeof(ElementOf<kKind>));
  static constexpr int kRowBytes = kPieceK * 2;  // of x
  // A stage has the scales that weight rows have in a piece, if there are several; then weights,
  // and x. Otherwise all scales lie behind the ring: those of rows of x, and those of weight rows.
  static constexpr int kGroups = kPieceK > kGroup ? kPieceK / kGroup : 1;
  static constexpr int kStageScales = kIsGrouped<kKind> ? kTile * kGroups : 0;
  static constexpr int kScales = !kIsE4M3<kKind> ? 0 : kMostRows + (kIsGrouped<kKind> ? 0 : kTile);
  static constexpr int kWeightsAt = kStageScales * static_cast<int>(sizeof(float));
  static constexpr int kRowsAt = kWeightsAt + kWeightBytes;
  static constexpr int kMaxStageBytes = kRowsAt + 8 * kEights * kRowBytes;
  static constexpr int kStages =
      kRingBytes / kMaxStageBytes < kMaxStages ? kRingBytes / kMaxStageBytes : kMaxStages;
  static constexpr int kPartialBytes =
      kTeams * kEights * kTileSlabs * 32 * static_cast<int>(sizeof(float4));
  static_assert(kStages >= 2, "a piece is in flight while another one is used");
  static_assert(kPartialBytes <= kRingBytes, "the partial sums take the place of the ring");
  static_assert(kTeamSteps >= 1, "each team has a part of each piece");

  // Rows of x that a stage has room for. The first eight rows past the last one are copies of it.
  __host__ __device__ static constexpr int64_t RowsKept(int64_t rows) {
    return kEights == 1 ? rows : 8 * kEights;
  }
};

// Rows lie in shared memory without padding. Reads of a quarter of a warp name 64 bytes of two
// rows, or every other 16 bytes of a half of two rows if a lane reads eight float32. Those of half
// a warp name 32 bytes of four rows, if a lane reads eight E4M3. Other rows have the chunks of 16
// bytes in another order, so that the reads use all banks.
template <typename E, int kPieceK>
__device__ __forceinline__ int FlipOf(int row) {
  if constexpr (sizeof(E) == 1) return kPieceK == 64 ? row / 2 % 2 * 32 : row % 4 * 32;
  return row % 2 * (sizeof(E) == 2 ? 64 : 16);
}

// The arguments of the kernel besides the pointers.
struct FewSizes {
  int32_t rows, n, k;
  int32_t ranks;
  int32_t rank_pieces;
  bool rounds;         // whether y has the type of x instead of f32
  int32_t row_scales;  // 0, 1, or those of all rows
  int32_t scales_at;   // where the scales behind the ring lie in shared memory
  int32_t groups;      // scales of a weight row
  int32_t bias_at;     // where the bias lies in shared memory
  int32_t bias_size;   // bytes of an element of the bias: 0 without one, 2 in the type of x, or 4
  bool weight_is_unchanged;  // since the previous kernel
};

// Starts the copies of kPieceK of k, from k `first` on, of `rows` rows to shared memory. Rows from
// `filled` on, and what lies past the end of k, become zeros.
template <typename E, int kPieceK>
__device__ __forceinline__ void BringPiece(const void* source, int rows, int filled, int first,
                                           int k, uint32_t target) {
  constexpr int kChunk = 16 / sizeof(E), kChunks = kPieceK / kChunk, kStride = kThreads / kChunks;
  static_assert(kStride % 4 == 0, "all rows of a thread have the same flip");
  const int thread = ReadThread();  // otherwise addresses would take registers of the sums
  const int chunk = thread & (kChunks - 1), at = first + chunk * kChunk;
  int row = static_cast<int>(static_cast<unsigned>(thread) / kChunks);
  const E* from = static_cast<const E*>(source) + static_cast<int64_t>(row) * k + at;
  uint32_t to = target + row * (kPieceK * sizeof(E)) + (chunk * 16 ^ FlipOf<E, kPieceK>(row));
  if (at >= k) filled = 0;
#pragma unroll 2
  for (; row < rows; row += kStride) {
    CopyOrZero(to, from, row < filled ? 16 : 0);
    from += static_cast<int64_t>(kStride) * k;
    to += kStride * kPieceK * sizeof(E);
  }
}

// Starts the copies of the scales that kRows weight rows have in a piece, from group `first` on.
template <int kRows, int kGroups>
__device__ __forceinline__ void BringGroups(const float* scales, int filled, int first, int groups,
                                            uint32_t target) {
  const int thread = ReadThread(), row = thread / kGroups, group = first + thread % kGroups;
  if (thread >= kRows * kGroups) return;
  const bool exists = row < filled && group < groups;
  Copy4OrZero(target + thread * 4,
              scales + (exists ? static_cast<int64_t>(row) * groups + group : 0), exists ? 4 : 0);
}

// Prefetches `count` elements of k, from k `first` on, of `rows` weight rows into the L2 cache.
template <typename E>
__device__ __forceinline__ void PrefetchRows(const E* rows_begin, int rows, int first, int count,
                                             int k) {
  constexpr int kLine = 128 / sizeof(E);
  const int lines = (min(count, k - first) + kLine - 1) / kLine;
  for (int i = static_cast<int>(threadIdx.x); i < rows * lines; i += kThreads) {
    PrefetchLine(rows_begin + static_cast<int64_t>(i / lines) * k + first + i % lines * kLine);
  }
}

// A lane's part of two MMAs over kStepK of k for a slab of weights: eight elements of rows g and
// g + 8, as kParts numbers each whose sum they are.
template <typename T, WeightKind kKind>
struct WeightFragment {
  static constexpr int kParts = kIsFloat<kKind> ? 3 : 1;
  uint32_t words[kParts][2][4];

  // Loads a step from a piece. `row` is row g in shared memory, `lower_bytes` before row g + 8.
  // note(lower, words) gets E4M3 weights.
  template <typename Function>
  __device__ __forceinline__ void Load(const uint8_t* row, int lower_bytes, int step, int q,
                                       int flip, const Function& note) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const uint8_t* begin = row + lower * lower_bytes;
      if constexpr (kIsE4M3<kKind>) {
        const uint2 loaded = *reinterpret_cast<const uint2*>(begin + ((step * 32 + q * 8) ^ flip));
        DecodeFour<T>(loaded.x, words[0][lower][0], words[0][lower][1]);
        DecodeFour<T>(loaded.y, words[0][lower][2], words[0][lower][3]);
        note(lower, loaded);
      } else if constexpr (kParts == 1) {
        const uint4 loaded = *reinterpret_cast<const uint4*>(begin + ((step * 64 + q * 16) ^ flip));
        Set(0, lower, loaded.x, loaded.y, loaded.z, loaded.w);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int offset = (step * 128 + q * 32 + half * 16) ^ flip;
          const float4 loaded = *reinterpret_cast<const float4*>(begin + offset);
          Split(lower, 2 * half, loaded.x, loaded.y);
          Split(lower, 2 * half + 1, loaded.z, loaded.w);
        }
      }
    }
  }

  // Returns the fragment a of an MMA.
  __device__ __forceinline__ void Fragment(int part, int half, uint32_t (&a)[4]) const {
    a[0] = words[part][0][2 * half];
    a[1] = words[part][1][2 * half];
    a[2] = words[part][0][2 * half + 1];
    a[3] = words[part][1][2 * half + 1];
  }

 private:
  __device__ __forceinline__ void Set(int part, int lower, uint32_t x, uint32_t y, uint32_t z,
                                      uint32_t w) {
    words[part][lower][0] = x;
    words[part][lower][1] = y;
    words[part][lower][2] = z;
    words[part][lower][3] = w;
  }

  // Each part takes the upper 16 bits of what the parts before it have left. The subtraction is
  // exact.
  __device__ __forceinline__ void Split(int lower, int word, float first, float second) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t low = FloatBits(first) & 0xffff0000u, high = FloatBits(second) & 0xffff0000u;
      words[part][lower][word] = low >> 16 | high;
      first -= BitsFloat(low);
      second -= BitsFloat(high);
    }
  }
};

// The sums of a warp: a fragment for each slab and each eight rows of x, in one or two chains of
// MMAs. An MMA waits for the preceding one on the same fragment, so that a single fragment has two
// chains. The lower parts of float32 weights have their own chain, because each addition to a large
// sum rounds it.
template <WeightKind kKind, int kSlabs, int kEights>
struct WarpSums {
  static constexpr bool kParts = kIsFloat<kKind>;
  static constexpr int kChains = kParts || (!kIsGrouped<kKind> && kSlabs * kEights == 1) ? 2 : 1;
  float sums[kChains][kSlabs][kEights][4] = {};
  NanRows<kIsE4M3<kKind>> nans;

  // Returns the chain of an MMA.
  static constexpr __device__ __forceinline__ int Chain(int part, int half) {
    return kParts ? (part > 0 ? 1 : 0) : kChains == 2 ? half : 0;
  }

  __device__ __forceinline__ float4 Sum(int slab, int eight) const {
    float total[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[i] = sums[0][slab][eight][i];
      if constexpr (kChains == 2) total[i] += sums[1][slab][eight][i];
    }
    return make_float4(total[0], total[1], total[2], total[3]);
  }
};

// Which part of an output tile a warp computes. It is found again where it is used, because
// registers are scarce in between.
template <typename F>
struct WarpPlace {
  int32_t lane, team, group;

  __device__ __forceinline__ explicit WarpPlace(int thread)
      : lane(thread % 32), team(thread / 32 % F::kTeams), group(thread / 32 / F::kTeams) {}

  // Returns row g of the warp's first slab.
  __device__ __forceinline__ int weight_row() const {
    return group * F::kWarpSlabs * kSlabRows + lane / 4;
  }
  // Returns where the warp's fragment of a slab and eight rows lies among those of all teams.
  __device__ __forceinline__ int fragment(int slab, int eight) const {
    return (team * F::kMostEights + eight) * F::kTileSlabs + group * F::kWarpSlabs + slab;
  }
};

// The scales that the weight rows of a warp have in a step, if they have several.
template <typename F>
struct StepScales {
  static constexpr int kUsed = F::kStageScales > 0 ? F::kWarpSlabs : 0;
  float scales[kUsed > 0 ? kUsed : 1][2];

  // `row` is row g of the warp's first slab.
  __device__ __forceinline__ StepScales(const uint8_t* stage, int row, int step) {
#pragma unroll
    for (int slab = 0; slab < kUsed; ++slab) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int own_row = row + slab * kSlabRows + 8 * lower, group = step * kStepK / kGroup;
        scales[slab][lower] = reinterpret_cast<const float*>(stage)[own_row * F::kGroups + group];
      }
    }
  }

  // sums += scale * own for a fragment.
  __device__ __forceinline__ void AddScaled(const float (&own)[4], int slab,
                                            float (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += scales[slab][i / 2] * own[i];
  }
};

// sums += W @ x for a team's part of the piece in `stage`.
template <typename T, WeightKind kKind, typename F, typename Sums>
__device__ __forceinline__ void MultiplyPiece(const uint8_t* stage, int rows_of_x, Sums& warp) {
  constexpr int kWeightRow = F::kPieceK * static_cast<int>(sizeof(ElementOf<kKind>));
  const WarpPlace<F> at(ReadThread());
  // Rows of x past the last one are a copy of it, or what memory holds. No output depends on them.
  const int row_of_x = F::kMostEights == 1 ? min(at.lane / 4, rows_of_x - 1) : at.lane / 4;
  const int weight_flip = FlipOf<ElementOf<kKind>, F::kPieceK>(at.weight_row());
  const int row_flip = FlipOf<T, F::kPieceK>(row_of_x), q = at.lane % 4;
  const uint8_t* weights = stage + F::kWeightsAt + at.weight_row() * kWeightRow;
  const uint8_t* rows = stage + F::kRowsAt + row_of_x * F::kRowBytes;
#pragma unroll
  for (int i = 0; i < F::kTeamSteps; ++i) {
    const int step = at.team * F::kTeamSteps + i;
    WeightFragment<T, kKind> fragments[F::kWarpSlabs];
#pragma unroll
    for (int slab = 0; slab < F::kWarpSlabs; ++slab) {
      fragments[slab].Load(
          weights + slab * kSlabRows * kWeightRow, 8 * kWeightRow, step, q, weight_flip,
          [&](int lower, const uint2& words) { warp.nans.Note(slab, lower, words); });
    }
    const StepScales<F> scales(stage, at.weight_row(), step);
#pragma unroll
    for (int eight = 0; eight < F::kMostEights; ++eight) {
      const uint8_t* row = rows + eight * 8 * F::kRowBytes;
      const uint4 x = *reinterpret_cast<const uint4*>(row + ((step * 64 + q * 16) ^ row_flip));
      float own[F::kWarpSlabs][4] = {};  // of this step, if it has scales
#pragma unroll
      for (int part = 0; part < WeightFragment<T, kKind>::kParts; ++part) {
#pragma unroll
        for (int slab = 0; slab < F::kWarpSlabs; ++slab) {
          const auto target = [&](int half) -> float (&)[4] {
            return kIsGrouped<kKind> ? own[slab] : warp.sums[Sums::Chain(part, half)][slab][eight];
          };
          uint32_t a[4];
          fragments[slab].Fragment(part, 0, a);
          MultiplyAdd<T>(target(0), a, x.x, x.y);
          fragments[slab].Fragment(part, 1, a);
          MultiplyAdd<T>(target(1), a, x.z, x.w);
        }
      }
      if constexpr (kIsGrouped<kKind>) {
#pragma unroll
        for (int slab = 0; slab < F::kWarpSlabs; ++slab) {
          scales.AddScaled(own[slab], slab, warp.sums[0][slab][eight]);
        }
      }
    }
  }
}

// Starts the copies of all scales to shared memory: first those of rows, which are 1 if there are
// none, then those of the output tile's weight rows.
__device__ __forceinline__ void BringScales(const DenseFewBuffers& buffers, const FewSizes& p,
                                            int first_column, int columns, uint8_t* scales) {
  const int thread = ReadThread(), column = first_column + thread - kMostRows;
  const uint32_t target = SharedAddress(scales) + thread * 4;
  if (thread >= kMostRows + columns) return;
  if (thread >= kMostRows) {
    const bool exists = column < p.n;
    Copy4OrZero(target, buffers.weight_scale + (exists ? column : 0), exists ? 4 : 0);
  } else if (p.row_scales == 0) {
    reinterpret_cast<float*>(scales)[thread] = 1.0f;
  } else {
    const int row = p.row_scales == 1 || thread >= p.rows ? 0 : thread;
    Copy4OrZero(target, buffers.row_scale + row, 4);
  }
}

// Starts the copies of the bias of an output tile's `columns` weight rows to shared memory, as it
// is stored. A copy has 4 bytes, which may be two elements. What lies past the end of n becomes
// zeros.
__device__ __forceinline__ void BringBias(const void* bias, const FewSizes& p, int first_column,
                                          int columns, uint8_t* target) {
  const int at = ReadThread() * 4, begin = first_column * p.bias_size;
  if (at >= columns * p.bias_size) return;
  const int bytes = max(min(p.n * p.bias_size - begin - at, 4), 0);
  Copy4OrZero(SharedAddress(target) + at,
              static_cast<const uint8_t*>(bias) + (bytes > 0 ? begin + at : 0), bytes);
}

// Adds the bias of its two columns to a fragment of sums. The sum is not fused with the product
// that precedes it, so that its bits are those of an addition to a stored result.
template <typename T>
__device__ __forceinline__ void AddBias(const FewSizes& p, const uint8_t* bias, int column,
                                        float4& sums) {
  const auto read = [&](int at) {
    return p.bias_size == 4 ? reinterpret_cast<const float*>(bias)[at]
                            : ToFloat(reinterpret_cast<const T*>(bias)[at]);
  };
  const float first = read(column), second = read(column + 8);
  sums.x = __fadd_rn(sums.x, first), sums.y = __fadd_rn(sums.y, first);
  sums.z = __fadd_rn(sums.z, second), sums.w = __fadd_rn(sums.w, second);
}

// Multiplies a fragment of sums by the scales of its rows, and then by those of its columns, if
// these have one each.
template <bool kColumns>
__device__ __forceinline__ void Scale(const float* scales, int row, int column, float4& sums) {
  const float2 rows = *reinterpret_cast<const float2*>(scales + row);
  sums.x *= rows.x, sums.y *= rows.y, sums.z *= rows.x, sums.w *= rows.y;
  if constexpr (kColumns) {
    const float first = scales[kMostRows + column], second = scales[kMostRows + column + 8];
    sums.x *= first, sums.y *= first, sums.z *= second, sums.w *= second;
  }
}

// Stores a fragment of sums: two rows of x, `first` and the next one, by two columns.
template <typename Y>
__device__ __forceinline__ void StoreFragment(const FewSizes& p, Y* y, int first, int column,
                                              const float4& sums) {
  Y* at = y + static_cast<int64_t>(first) * p.n + column;
  const bool two = first + 1 < p.rows;
  if (first >= p.rows) return;
  if (column < p.n) {
    at[0] = FromFloat<Y>(sums.x);
    if (two) at[p.n] = FromFloat<Y>(sums.y);
  }
  if (column + 8 < p.n) {
    at[8] = FromFloat<Y>(sums.z);
    if (two) at[p.n + 8] = FromFloat<Y>(sums.w);
  }
}

// Adds the partial sums of the teams and of the blocks of the cluster, and stores them. `partials`
// has a fragment for each team, each eight rows of x, and each slab of the output tile. `scales`
// are read with E4M3 weights, and `bias` is if there is one.
template <typename T, typename F, int kEights>
__device__ __forceinline__ void FinishTile(const FewSizes& p, void* y, int rank, int tile,
                                           float4* partials, const float* scales,
                                           const uint8_t* bias) {
  constexpr int kFragments = kEights * F::kTileSlabs;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int used = (p.rows + 7) / 8 * F::kTileSlabs;
  const auto store = [&](int fragment, float4 total) {
    const int row = fragment / F::kTileSlabs * 8 + lane % 4 * 2;
    const int own_column = fragment % F::kTileSlabs * kSlabRows + lane / 4;
    const int column = tile * F::kTileRows + own_column;
    if constexpr (F::kScales > 0) {
      Scale<(F::kScales > kMostRows)>(scales, row, own_column, total);
    }
    if (p.bias_size > 0) {
      AddBias<T>(p, bias, own_column, total);
    }
    if (p.rounds) {
      StoreFragment(p, static_cast<T*>(y), row, column, total);
    } else {
      StoreFragment(p, static_cast<float*>(y), row, column, total);
    }
  };
#pragma unroll 1
  for (int fragment = warp; fragment < used; fragment += kWarps) {
    float4 total = partials[fragment * 32 + lane];
#pragma unroll
    for (int team = 1; team < F::kTeams; ++team) {
      Add(total, partials[(team * kFragments + fragment) * 32 + lane]);
    }
    if (p.ranks == 1) {
      store(fragment, total);
    } else {
      partials[fragment * 32 + lane] = total;
    }
  }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (p.ranks == 1) return;
  SyncCluster();
  const int ranks = p.ranks;
#pragma unroll 1
  for (int fragment = rank + ranks * warp; fragment < used; fragment += ranks * kWarps) {
    const uint32_t address = SharedAddress(partials + fragment * 32 + lane);
    float4 total = LoadPeer16(address, 0);
#pragma unroll 4
    for (int peer = 1; peer < ranks; ++peer) Add(total, LoadPeer16(address, peer));
    store(fragment, total);
  }
  LeaveCluster();  // until then, other blocks may read the shared memory of this one
#endif
}

// How many blocks run at once on a multiprocessor. Those with float32 weights and many rows need
// more registers than that.
constexpr int BlocksPerSm(int tile) { return tile == kMedium ? 3 : 2; }

template <typename T, WeightKind kKind, int kTile, int kEights>
__global__ void __launch_bounds__(kThreads, kIsFloat<kKind> ? 1 : BlocksPerSm(kTile))
    DenseFew(const DenseFewBuffers buffers, const FewSizes p) {
  using F = Form<kKind, kTile, kEights>;
  NVFP4_DYNAMIC_SHARED(shared);
  const int rank = static_cast<int>(blockIdx.x) % p.ranks;
  const int tile = static_cast<int>(blockIdx.x) / p.ranks;
  const int first_piece = rank * p.rank_pieces;
  const int pieces = max(min(p.rank_pieces, (p.k + F::kPieceK - 1) / F::kPieceK - first_piece), 0);
  const int filled = min(p.n - tile * kTile, kTile);  // weight rows of the tile that exist
  // Returns the first weight row. It is computed for each piece, because registers are scarce.
  const auto weight = [&] {
    return static_cast<const ElementOf<kKind>*>(buffers.weight) +
           static_cast<int64_t>(tile) * kTile * p.k;
  };
  const int stage_bytes = F::kRowsAt + static_cast<int>(F::RowsKept(p.rows)) * F::kRowBytes;
  const uint32_t ring = SharedAddress(shared);
  const auto bring_weight = [&](int piece, int stage) {
    BringPiece<ElementOf<kKind>, F::kPieceK>(weight(), kTile, filled,
                                             (first_piece + piece) * F::kPieceK, p.k,
                                             ring + stage * stage_bytes + F::kWeightsAt);
  };
  // The largest tile has no registers for this if groups of FP8 weights have scales.
  constexpr bool kMayBring = !(kIsGrouped<kKind> && kTile == kLarge);
  const bool brings_first = kMayBring && p.weight_is_unchanged;
  if (brings_first) {
    BringFirst<F::kStages>(pieces, bring_weight);
  } else {
    PrefetchRows(weight(), filled, first_piece * F::kPieceK, min(pieces, F::kStages) * F::kPieceK,
                 p.k);
  }
  WaitForPrecedingKernel();
  StartNextKernel();
  const auto bring = [&](int piece, int stage) {
    const uint32_t at = ring + stage * stage_bytes;
    const int first = (first_piece + piece) * F::kPieceK;
    if (!brings_first || !IsFirst<F::kStages>(piece)) bring_weight(piece, stage);
    BringPiece<T, F::kPieceK>(buffers.x, p.rows, p.rows, first, p.k, at + F::kRowsAt);
    if constexpr (kIsGrouped<kKind>) {
      BringGroups<kTile, F::kGroups>(
          buffers.weight_scale + static_cast<int64_t>(tile) * kTile * p.groups, filled,
          first / kGroup, p.groups, at);
    }
  };

  if constexpr (F::kScales > 0) {
    BringScales(buffers, p, tile * kTile, F::kScales - kMostRows, shared + p.scales_at);
  }
  if (p.bias_size > 0) {
    BringBias(buffers.bias, p, tile * kTile, kTile, shared + p.bias_at);
  }
  WarpSums<kKind, F::kWarpSlabs, kEights> sums;
  RunThroughRing<F::kStages>(pieces, bring, [&](int, int stage) {
    MultiplyPiece<T, kKind, F>(shared + stage * stage_bytes, p.rows, sums);
  });
  __syncthreads();  // the partial sums take the place of the ring
  auto* partials = reinterpret_cast<float4*>(shared);
  const WarpPlace<F> at(ReadThread());
#pragma unroll
  for (int slab = 0; slab < F::kWarpSlabs; ++slab) {
    const NanPair nan = sums.nans.Find(slab);
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      partials[at.fragment(slab, eight) * 32 + at.lane] = nan.Spread(sums.Sum(slab, eight));
    }
  }
  WaitCopies<0>();  // the scales and the bias, if there were no pieces
  __syncthreads();
  FinishTile<T, F, kEights>(p, buffers.y, rank, tile, partials,
                            reinterpret_cast<const float*>(shared + p.scales_at),
                            shared + p.bias_at);
}

// The number of fragments for `rows` rows: kEights of the kernel.
int EightsOf(int64_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8; }

template <WeightKind kKind>
using ConstantKind = std::integral_constant<WeightKind, kKind>;

// Calls function(kind), with a constant, for the kind of a call's weights.
template <typename Function>
auto WithKind(const DenseFewCall& call, const Function& function) {
  switch (call.weight_type) {
    case DataType::kF32:
      return function(ConstantKind<WeightKind::kF32>());
    case DataType::kE4M3:
      return call.scale_groups > 0 ? function(ConstantKind<WeightKind::kGroupedE4M3>())
                                   : function(ConstantKind<WeightKind::kE4M3>());
    default:
      return function(ConstantKind<WeightKind::kLikeX>());
  }
}

// Calls function(form) for the form of the kernel with `tile` weight rows.
template <WeightKind kKind, typename Function>
auto WithForm(int tile, int64_t rows, const Function& function) {
  const int eights = EightsOf(rows);
  if constexpr (!kIsFloat<kKind>) {
    if (tile == kMedium && eights == 1) return function(Form<kKind, kMedium, 1>());
    if (tile == kMedium) return function(Form<kKind, kMedium, 2>());
    if (tile == kLarge && eights <= 4) return function(Form<kKind, kLarge, 4>());
    if (tile == kLarge) return function(Form<kKind, kLarge, 8>());
  }
  if (eights == 1) return function(Form<kKind, kSmall, 1>());
  if (eights == 2) return function(Form<kKind, kSmall, 2>());
  if (eights == 4) return function(Form<kKind, kSmall, 4>());
  return function(Form<kKind, kSmall, 8>());
}

// Returns the weight rows of an output tile. The smallest tile reads x most often. It is for layers
// whose weights are few, or for so few rows that x costs less than the weights.
int TileOf(const DenseFewCall& call) {
  const int64_t small_tiles = CeilDiv(call.n, kSmall), eights = EightsOf(call.rows);
  const bool few = small_tiles * eights <= int64_t{eights == 1 ? 32 : 2} * MultiprocessorCount();
  if (few || call.weight_type == DataType::kF32) return kSmall;
  return eights <= 2 ? kMedium : kLarge;
}

// Returns the blocks of a cluster: as many as divide k into the shortest parts while all blocks
// still run at once. For the smallest tile, a power of two.
int32_t RanksOf(int tile, int64_t tiles, int64_t pieces) {
  const int64_t most_blocks = int64_t{BlocksPerSm(tile)} * MultiprocessorCount();
  int32_t best = 1;
  for (int32_t ranks = 2; ranks <= kMaxRanks && tiles * ranks <= most_blocks;) {
    if (CeilDiv(pieces, ranks) < CeilDiv(pieces, best)) best = ranks;
    ranks = tile == kSmall ? 2 * ranks : ranks + 1;
  }
  return best;
}

template <typename F>
DenseFewCut CutOf(const DenseFewCall& call, bool clusters) {
  const int64_t tiles = CeilDiv(call.n, F::kTileRows), pieces = CeilDiv(call.k, F::kPieceK);
  const int32_t ranks = clusters ? RanksOf(F::kTileRows, tiles, pieces) : 1;
  const int64_t rank_pieces = CeilDiv(pieces, ranks);
  const int64_t stages = std::min<int64_t>(rank_pieces, F::kStages);
  const int64_t ring = std::max<int64_t>(
      stages * (F::kRowsAt + F::RowsKept(call.rows) * F::kRowBytes), F::kPartialBytes);
  const int64_t bytes =
      ring + F::kScales * static_cast<int64_t>(sizeof(float)) + F::kTileRows * call.bias_size;
  return {F::kTileRows, ranks, static_cast<int32_t>(rank_pieces), static_cast<int32_t>(bytes)};
}

template <typename T, WeightKind kKind>
cudaError_t LaunchTyped(cudaStream_t stream, const DenseFewCall& call,
                        const DenseFewBuffers& buffers, const DenseFewCut& cut) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(call.n, cut.tile) * cut.ranks));
  return WithForm<kKind>(cut.tile, call.rows, [&](auto form) {
    using F = decltype(form);
    const auto bias_size = static_cast<int32_t>(call.bias_size);
    const int32_t bias_at = cut.shared_bytes - F::kTileRows * bias_size;
    const FewSizes sizes = {static_cast<int32_t>(call.rows),
                            static_cast<int32_t>(call.n),
                            static_cast<int32_t>(call.k),
                            cut.ranks,
                            cut.rank_pieces,
                            call.output_type != DataType::kF32,
                            static_cast<int32_t>(call.row_scales),
                            bias_at - F::kScales * static_cast<int32_t>(sizeof(float)),
                            static_cast<int32_t>(call.scale_groups),
                            bias_at,
                            bias_size,
                            call.weight_is_unchanged};
    return LaunchClusters(stream, grid, cut.ranks, kThreads, cut.shared_bytes,
                          /*overlaps=*/true, DenseFew<T, kKind, F::kTileRows, F::kMostEights>,
                          buffers, sizes);
  });
}

}  // namespace

DenseFewCut CutDenseFew(const DenseFewCall& call, bool clusters) {
  return WithKind(call, [&](auto kind) {
    return WithForm<kind>(TileOf(call), call.rows,
                          [&](auto form) { return CutOf<decltype(form)>(call, clusters); });
  });
}

cudaError_t LaunchDenseCut(cudaStream_t stream, const DenseFewCall& call,
                           const DenseFewBuffers& buffers, const DenseFewCut& cut) {
  const bool half = call.type == DataType::kF16;
  return WithKind(call, [&](auto kind) {
    if constexpr (!kIsFloat<kind>) {
      if (half) return LaunchTyped<__half, kind>(stream, call, buffers, cut);
    }
    return LaunchTyped<__nv_bfloat16, kind>(stream, call, buffers, cut);
  });
}

cudaError_t LaunchDenseFew(cudaStream_t stream, const DenseFewCall& call,
                           const DenseFewBuffers& buffers) {
  const bool is_empty = call.rows == 0 || call.n == 0;
  const bool is_vector = !is_empty && FitsDenseVector(call);
  if (buffers.norm != nullptr && !(is_vector && FitsInputNorm(*buffers.norm))) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchAddRmsNorm(stream, buffers.norm->call, buffers.norm->buffers));
    DenseFewBuffers rest = buffers;
    rest.norm = nullptr;
    return LaunchDenseFew(stream, call, rest);
  }
  if (is_empty) return cudaSuccess;
  if (is_vector) return LaunchDenseVector(stream, call, buffers);
  if (ComputeCapabilityMajor() == 9 && FitsDenseSm90(call)) {
    return LaunchDenseSm90(stream, call, buffers);
  }
  const bool clusters = MayOverlap(DenseFew<__half, WeightKind::kLikeX, kSmall, 1>);
  return LaunchDenseCut(stream, call, buffers, CutDenseFew(call, clusters));
}

}  // namespace nvfp4
