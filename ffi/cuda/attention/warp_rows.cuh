// The rows of one warp of attention on mma.sync, with their scores and outputs in registers.
//
// Keys and values have 16 bits, or 8 bits as a cache in E4M3 has them. E4M3 numbers become pairs of
// the type of the queries in registers, exactly (e4m3_pairs.cuh). They never lie in shared memory
// as 16-bit numbers, which would take twice as many reads and a barrier. ldmatrix moves 16-bit
// words, so that it gives a thread two neighboring channels, where a fragment has one:
//
//   keys    Of each 16 channels, lane q gets channels 4q to 4q + 3. The first two are the channels
//           2q and 2q + 1 of the MMA, and the others its channels 2q + 8 and 2q + 9. SpreadQueries
//           gives the queries the same order.
//   values  Of each 16 channels, lane 4g + q gets channels 2g and 2g + 1, of keys 2q and 2q + 1.
//           The even channels are the columns of one MMA, and the odd ones those of the next.
//           Each thread then has the sums of channels 4q to 4q + 3, which OrderChannels sorts.
#pragma once

#include <type_traits>

#include "cuda/attention/tiles.cuh"
#include "cuda/gemm/e4m3_pairs.cuh"
#include "cuda/instructions/mma.cuh"

namespace nvfp4 {

// The sizes of a block. Widths are padded with zeros to kWidth and kValueWidth.
template <int kWidthSize, int kValueWidthSize, int kRowWarpCount, int kGroupCount,
          int kKeyWarpCount, int kKeyCount, int kStageCount = 2, bool kIsE4M3 = false>
struct Form {
  static constexpr bool kE4M3 = kIsE4M3;                     // whether keys and values are E4M3
  using Key = std::conditional_t<kE4M3, uint8_t, uint16_t>;  // or value
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
  static constexpr int kRowBytes = kWidth * sizeof(Key), kValueBytes = kValueWidth * sizeof(Key);
  static constexpr int kKeyBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = kKeyBytes + kKeys * kValueBytes;
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
  static_assert(!kE4M3 || kOwnTiles % 2 == 0, "OrderChannels exchanges the sums of two tiles");
};

// The rows of one warp, in groups of 16. A thread has rows g and g + 8 of each group, with lane =
// 4 g + q.
template <typename T, typename F>
struct WarpRows {
  static constexpr int kSteps = F::kWidth / 16;
  static constexpr int kKeyTiles = F::kScoredKeys / 8;
  static constexpr int kValueTiles = F::kValueWidth / 8;
  using Scores = float[F::kGroups][kKeyTiles][4];

  const uint8_t* queries;  // in shared memory, of all rows
  uint32_t q[F::kGroups][F::kQueriesInRegisters ? kSteps : F::kE4M3 ? 2 : 1][4];
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
    if constexpr (F::kE4M3) {
      const uint32_t changed = ScoreE4M3<false>(keys, scores);
      if (HaveNan(changed)) ScoreE4M3<true>(keys, scores);
    } else {
      ScorePairs(keys, scores);
    }
  }

  __device__ __forceinline__ void ScorePairs(const uint8_t* keys, Scores& scores) {
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

  // The same for E4M3 keys. If kOnlyNan, each key counts as NaN in the channels where it is NaN,
  // and as zero elsewhere. Returns what NoteNan noted.
  template <bool kOnlyNan>
  __device__ __forceinline__ uint32_t ScoreE4M3(const uint8_t* keys, Scores& scores) {
    const uint32_t offset = ByteOffset<F::kWidth>(Lane() % 16, Lane() / 16);
    uint32_t changed = 0;
#pragma unroll
    for (int two = 0; two < kSteps / 2; ++two) {  // steps of 16 channels
      constexpr bool kLoaded = F::kQueriesInRegisters;
      if constexpr (!kLoaded) {
#pragma unroll
        for (int group = 0; group < F::kGroups; ++group) {
          LoadQuery(group, 2 * two, q[group][0]);
          LoadQuery(group, 2 * two + 1, q[group][1]);
        }
      }
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        uint32_t k[4];  // 8 keys and 8 others in the first step, then in the second one
        LoadMatrices(keys + pair * 16 * F::kWidth + StepOffset<F::kWidth>(offset, two), k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t low, high;
          NoteNan(k[i], changed);
          DecodeFour<T, kOnlyNan>(k[i], low, high);
#pragma unroll
          for (int group = 0; group < F::kGroups; ++group) {
            const uint32_t (&own)[4] = q[group][(kLoaded ? 2 * two : 0) + i / 2];
            MultiplyAdd<T>(scores[group][2 * pair + i % 2], own, low, high);
          }
        }
      }
    }
    return changed;
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

  // The weights of 16 keys, as the left operand of MMAs.
  struct PairWeights {
    uint32_t a[F::kGroups][4];

    __device__ __forceinline__ PairWeights(const Scores& weights, int pair) {
#pragma unroll
      for (int group = 0; group < F::kGroups; ++group) {
        const float (&low)[4] = weights[group][2 * pair];
        const float (&high)[4] = weights[group][2 * pair + 1];
        a[group][0] = MakePair<T>(low[0], low[1]);
        a[group][1] = MakePair<T>(low[2], low[3]);
        a[group][2] = MakePair<T>(high[0], high[1]);
        a[group][3] = MakePair<T>(high[2], high[3]);
      }
    }
  };

  // values += weights @ rows of v; `rows` are those of this warp's keys.
  __device__ __forceinline__ void AddValues(const uint8_t* rows, const Scores& weights) {
    if constexpr (F::kE4M3) {
      const uint32_t changed = AddE4M3<false>(rows, weights);
      if (HaveNan(changed)) AddE4M3<true>(rows, weights);
    } else {
      AddPairs(rows, weights);
    }
  }

  __device__ __forceinline__ void AddPairs(const uint8_t* rows, const Scores& weights) {
    const uint32_t offset = UnitOffset<F::kValueWidth>(Lane() % 16, Lane() / 16);
#pragma unroll
    for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
      const PairWeights own(weights, pair);
#pragma unroll
      for (int step = 0; step < kValueTiles / 2; ++step) {
        uint32_t v[4];
        LoadTransposed(rows + pair * 16 * F::kValueWidth * 2 + StepOffset(offset, step), v);
#pragma unroll
        for (int group = 0; group < F::kGroups; ++group) {
          MultiplyAdd<T>(values[group][2 * step], own.a[group], v[0], v[1]);
          MultiplyAdd<T>(values[group][2 * step + 1], own.a[group], v[2], v[3]);
        }
      }
    }
  }

  // The same for values in E4M3, as ScoreE4M3.
  template <bool kOnlyNan>
  __device__ __forceinline__ uint32_t AddE4M3(const uint8_t* rows, const Scores& weights) {
    const uint32_t offset = ByteOffset<F::kValueWidth>(Lane() % 16, Lane() / 16);
    uint32_t changed = 0;
#pragma unroll
    for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
      const PairWeights own(weights, pair);
#pragma unroll
      for (int step = 0; step < kValueTiles / 4; ++step) {  // 32 channels
        uint32_t v[4];  // 8 keys and 8 others of 16 channels, then of the next 16
        LoadTransposed(rows + pair * 16 * F::kValueWidth + StepOffset<F::kValueWidth>(offset, step),
                       v);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          NoteNan(v[2 * i], changed);
          NoteNan(v[2 * i + 1], changed);
          const uint32_t even[2] = {DecodeAlternate<T, kOnlyNan, 0>(v[2 * i]),
                                    DecodeAlternate<T, kOnlyNan, 0>(v[2 * i + 1])};
          const uint32_t odd[2] = {DecodeAlternate<T, kOnlyNan, 1>(v[2 * i]),
                                   DecodeAlternate<T, kOnlyNan, 1>(v[2 * i + 1])};
#pragma unroll
          for (int group = 0; group < F::kGroups; ++group) {
            float (&sums)[kValueTiles][4] = values[group];
            MultiplyAdd<T>(sums[4 * step + 2 * i], own.a[group], even[0], even[1]);
            MultiplyAdd<T>(sums[4 * step + 2 * i + 1], own.a[group], odd[0], odd[1]);
          }
        }
      }
    }
    return changed;
  }

  // Whether any lane has noted a NaN.
  __device__ __forceinline__ static bool HaveNan(uint32_t changed) {
    return __ballot_sync(kAllLanes, (changed & kNanBits) != 0) != 0;
  }

  // Sorts the sums for E4M3 values, so that each thread has two neighboring channels in each tile.
  __device__ __forceinline__ void OrderChannels() {
    if constexpr (F::kE4M3) {
#pragma unroll
      for (int group = 0; group < F::kGroups; ++group) {
#pragma unroll
        for (int tile = 0; tile < F::kOwnTiles; tile += 2) {
          float (&even)[4] = values[group][tile], (&odd)[4] = values[group][tile + 1];
          const float second = even[1], fourth = even[3];
          even[1] = odd[0];
          even[3] = odd[2];
          odd[0] = second;
          odd[2] = fourth;
        }
      }
    }
  }

  // In tile `tile` of a warp's sums, lane q has the channels Column(tile) + kChannels * q and the
  // next one.
  static constexpr int kChannels = F::kE4M3 ? 4 : 2;
  __device__ __forceinline__ static constexpr int Column(int tile) {
    return F::kE4M3 ? tile / 2 * 16 + tile % 2 * 2 : 8 * tile;
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

// Gives the channels of all queries the order of E4M3 keys: of each 16, words 0, 2, 4 and 6 come
// first, then the others. A word has two channels.
template <typename F>
__device__ __forceinline__ void SpreadQueries(uint8_t* queries) {
  constexpr int kPairs = F::kWidth / 16;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < F::kRows * kPairs; index += F::kThreads) {
    const int row = index / kPairs, unit = index % kPairs * 2;
    uint4* first = reinterpret_cast<uint4*>(queries + UnitOffset<F::kWidth>(row, unit));
    uint4* second = reinterpret_cast<uint4*>(queries + UnitOffset<F::kWidth>(row, unit + 1));
    const uint4 low = *first, high = *second;
    *first = make_uint4(low.x, low.z, high.x, high.z);
    *second = make_uint4(low.y, low.w, high.y, high.w);
  }
}

}  // namespace nvfp4
