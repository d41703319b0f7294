// From float32 sums in fragments to outputs in memory: scales, biases, activation, rounding.
//
// Sums are those of one 64-row weight tile, warp w of four: lane 4 g + q holds, for each eight
// sorted rows 8 j to 8 j + 7, sums[4 j + {0, 1}] of its low weight row for sorted rows 2 q and
// 2 q + 1, and sums[4 j + {2, 3}] of its high weight row (see weight_tile.cuh). In a gated layer
// low is a gate row and high its up row, so that the activation stays in registers; where gate
// and up alternate in the checkpoint (swigluoai) the pair is in the neighbouring lane.
// movmatrix turns eight weight rows by eight sorted rows around, so that lane 4 g + q stores
// columns 2 q and 2 q + 1 of sorted row g.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "activations.cuh"
#include "elements.cuh"
#include "expert_gemm.cuh"
#include "instructions.cuh"

namespace nvfp4 {

template <typename T>
__device__ __forceinline__ uint32_t MakePair(float first, float second);
template <>
__device__ __forceinline__ uint32_t MakePair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t MakePair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t MakePair(DataType type, float first, float second) {
  return type == DataType::kBF16 ? MakePair<__nv_bfloat16>(first, second)
                                 : MakePair<__half>(first, second);
}

// What a lane knows of its two weight rows, low and high.
struct LaneRows {
  float scale[2];
  float bias[2];
};

// First weight row of a warp; of a gated layer the first pair of gate and up.
__device__ __forceinline__ int FirstRow(const ExpertGemm& p, int m_tile, int warp) {
  return p.gated() ? m_tile * (kTileM / 2) + warp * 8 : m_tile * kTileM + warp * 16;
}

__device__ __forceinline__ LaneRows LoadLaneRows(const ExpertGemm& p, int expert, int m_tile,
                                                 int warp, float unit) {
  const int low = FirstRow(p, m_tile, warp) + static_cast<int>(threadIdx.x % 32 / 4);
  const int all_rows = p.gated() ? 2 * p.columns : p.columns;
  const bool alternate = p.gated() && p.activation.interleaved;
  LaneRows rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = i == 0 ? low : p.gated() ? low + p.columns : low + 8;
    rows.scale[i] = rows.bias[i] = 0.0f;
    if (row >= all_rows) continue;  // padding
    int part = 0;                   // row * parts / all_rows
    if (p.parts == 2) part = alternate ? row & 1 : static_cast<int>(2 * row >= all_rows);
    if (p.parts > 2) part = static_cast<int>(static_cast<int64_t>(row) * p.parts / all_rows);
    rows.scale[i] = unit * p.weight.global_scale[static_cast<int64_t>(expert) * p.parts + part];
    if (p.weight.bias != nullptr) {
      rows.bias[i] = p.weight.bias[static_cast<int64_t>(expert) * p.bias_rows + row];
    }
  }
  return rows;
}

// Columns `column` and `column` + 1 of a row of `columns`; `column` is even, rows of odd length are
// aligned to two bytes only.
__device__ __forceinline__ void StorePair(uint16_t* row, int column, int columns, uint32_t pair) {
  if (columns % 2 == 0) {
    if (column < columns) *reinterpret_cast<uint32_t*>(row + column) = pair;
    return;
  }
  if (column < columns) row[column] = static_cast<uint16_t>(pair);
  if (column + 1 < columns) row[column + 1] = static_cast<uint16_t>(pair >> 16);
}

// The output rows of a tile's sorted rows: that of row 32 i + lane is in of[i], so that a tile
// needs a load for 32 rows.
template <int kRows>
struct Places {
  int32_t of[(kRows + 31) / 32];

  __device__ __forceinline__ Places(const ExpertGemm& p, const RowTile& tile) {
#pragma unroll
    for (int i = 0; i < (kRows + 31) / 32; ++i) {
      const int row = 32 * i + static_cast<int>(threadIdx.x % 32);
      of[i] = tile.row + row;
      if (p.output.slots != nullptr && row < tile.rows) of[i] = p.output.slots[of[i]];
    }
  }
};

// What a tile's epilogue is made of. Most products are of the first two kinds, which are written
// out for every eight sorted rows; the third has every other case and is one rolled loop, since
// ten copies of erfc for every eight rows would be a megabyte of code.
enum class Finish { kPlain, kSilu, kAny };

__device__ __forceinline__ Finish ChooseFinish(const ExpertGemm& p) {
  if (p.left.row_scale != nullptr) return Finish::kAny;
  if (!p.activate) return Finish::kPlain;
  const bool silu = p.activation.kind == Activation::kSilu;
  return silu && p.activation.gated && !p.activation.interleaved ? Finish::kSilu : Finish::kAny;
}

// One weight tile's way to memory, for one lane.
struct TileStore {
  const ExpertGemm& p;
  const RowTile& tile;
  const LaneRows rows;
  const int first;  // weight row, or pair, of the warp
  const int g, q;

  __device__ __forceinline__ float RowScale(int row) const {
    return p.left.row_scale != nullptr && row < tile.rows ? p.left.row_scale[tile.row + row] : 1.0f;
  }

  // low and high of one sorted row -> outputs, both in the places of their weight rows; where
  // gated the output is in low.
  template <Finish kFinish>
  __device__ __forceinline__ void Activate(float& low, float& high) const {
    if constexpr (kFinish == Finish::kSilu) {
      low = ActivateGated({Activation::kSilu, true, false, 1.0f, 0.0f, p.activation.limit}, low,
                          high);
    } else if constexpr (kFinish == Finish::kAny) {
      if (!p.activate) return;
      if (!p.activation.gated) {
        low = ActivateGate(p.activation, low);
        high = ActivateGate(p.activation, high);
        return;
      }
      if (p.activation.interleaved) {
        // Even g has both gates and odd g both ups: one exchange gives each lane a pair.
        const bool odd = g & 1;
        const float other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
        low = odd ? other : low;
        high = odd ? high : other;
      }
      low = ActivateGated(p.activation, low, high);
    }
  }

  // Sorted rows row to row + 7, of which `place` is the output row of row + g.
  template <Finish kFinish>
  __device__ __forceinline__ void StoreEight(int row, int32_t place, float a, float b, float c,
                                             float d) const {
    if constexpr (kFinish == Finish::kAny) {
      const float even = RowScale(row + 2 * q), odd = RowScale(row + 2 * q + 1);
      a *= even, b *= odd, c *= even, d *= odd;
    }
    float low[2] = {a * rows.scale[0] + rows.bias[0], b * rows.scale[0] + rows.bias[0]};
    float high[2] = {c * rows.scale[1] + rows.bias[1], d * rows.scale[1] + rows.bias[1]};
    Activate<kFinish>(low[0], high[0]);
    Activate<kFinish>(low[1], high[1]);
    const bool gated = kFinish == Finish::kSilu || (kFinish == Finish::kAny && p.gated());
    const uint32_t left = Transpose(MakePair(p.output.type, low[0], low[1]));
    const uint32_t right = gated ? 0 : Transpose(MakePair(p.output.type, high[0], high[1]));
    if (row + g >= tile.rows) return;
    uint16_t* out =
        static_cast<uint16_t*>(p.output.values) + static_cast<int64_t>(place) * p.columns;
    if (kFinish == Finish::kAny && gated && p.activation.interleaved) {
      out[first / 2 + q] = static_cast<uint16_t>(left);
      out[(p.columns + first) / 2 + q] = static_cast<uint16_t>(left >> 16);
      return;
    }
    StorePair(out, first + 2 * q, p.columns, left);
    if (!gated) StorePair(out, first + 8 + 2 * q, p.columns, right);
  }

  template <Finish kFinish, int kRows, int kSize>
  __device__ __forceinline__ void StoreAll(const Places<kRows>& places,
                                           const float (&sums)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      if (8 * j >= tile.rows) break;
      StoreEight<kFinish>(8 * j, __shfl_sync(0xffffffffu, places.of[j / 4], j % 4 * 8 + g),
                          sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
    }
  }

  // The same, the sums passing through the first four.
  template <int kSize>
  __device__ __forceinline__ void StoreRolled(float (&sums)[kSize]) const {
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += 8) {
      int32_t place = tile.row + row + g;
      if (p.output.slots != nullptr && row + g < tile.rows) place = p.output.slots[place];
      StoreEight<Finish::kAny>(row, place, sums[0], sums[1], sums[2], sums[3]);
#pragma unroll
      for (int i = 4; i < kSize; ++i) sums[i - 4] = sums[i];
    }
  }
};

// Stores the tile's outputs for the sorted rows of `tile`; uses up `sums`. All lanes of the warp
// take part.
template <int kRows, int kSize>
__device__ __forceinline__ void StoreTile(const ExpertGemm& p, const RowTile& tile, int m_tile,
                                          int warp, const LaneRows& rows,
                                          const Places<kRows>& places, float (&sums)[kSize]) {
  const uint32_t lane = threadIdx.x % 32;
  const int first = FirstRow(p, m_tile, warp);
  if (first >= p.columns) return;  // padding, for the whole warp
  const TileStore store = {
      p, tile, rows, first, static_cast<int>(lane / 4), static_cast<int>(lane % 4)};
  switch (ChooseFinish(p)) {
    case Finish::kPlain:
      return store.template StoreAll<Finish::kPlain>(places, sums);
    case Finish::kSilu:
      return store.template StoreAll<Finish::kSilu>(places, sums);
    case Finish::kAny:
      return store.StoreRolled(sums);
  }
}

// The same in little code and few registers.
template <int kSize>
__device__ __forceinline__ void StoreTileRolled(const ExpertGemm& p, const RowTile& tile,
                                                int m_tile, int warp, float unit,
                                                float (&sums)[kSize]) {
  const uint32_t lane = threadIdx.x % 32;
  const int first = FirstRow(p, m_tile, warp);
  if (first >= p.columns) return;
  const LaneRows rows = LoadLaneRows(p, tile.expert, m_tile, warp, unit);
  const TileStore store = {
      p, tile, rows, first, static_cast<int>(lane / 4), static_cast<int>(lane % 4)};
  store.StoreRolled(sums);
}

}  // namespace nvfp4
