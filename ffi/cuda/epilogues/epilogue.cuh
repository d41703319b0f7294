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

#include <cfloat>

#include "cuda/epilogues/activations.cuh"
#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/instructions/ampere.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/quantizers/round_block.cuh"

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

// What a lane knows of its two weight rows, low and high; of rows that are padding, anything.
struct LaneRows {
  float scale[2];  // global scales
  float bias[2];
};

// First weight row of a warp; of a gated layer the first pair of gate and up.
__device__ __forceinline__ int FirstRow(const ExpertGemm& p, int m_tile, int warp) {
  return p.gated() ? m_tile * (kTileM / 2) + warp * 8 : m_tile * kTileM + warp * 16;
}

// Which of one or two global scales is that of weight row `row` of `all_rows`.
__device__ __forceinline__ int PartOf(const ExpertGemm& p, int row, int all_rows) {
  if (p.parts == 1) return 0;
  const bool alternate = p.gated() && p.activation.interleaved;
  return alternate ? row & 1 : static_cast<int>(2 * row >= all_rows);
}

// Only starts the loads: what is done with them here would wait for each.
__device__ __forceinline__ LaneRows LoadLaneRows(const ExpertGemm& p, int expert, int m_tile,
                                                 int warp) {
  const int all_rows = p.gated() ? 2 * p.columns : p.columns;
  const int low = FirstRow(p, m_tile, warp) + static_cast<int>(threadIdx.x % 32 / 4);
  const int high = p.gated() ? low + p.columns : low + 8;
  const int of[2] = {min(low, all_rows - 1), min(high, all_rows - 1)};
  const float* scales = p.weight.global_scale + static_cast<int64_t>(expert) * p.parts;
  LaneRows rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.scale[i] = scales[PartOf(p, of[i], all_rows)];
    rows.bias[i] = 0.0f;
  }
  if (p.weight.bias != nullptr) {
    const float* bias = p.weight.bias + static_cast<int64_t>(expert) * p.bias_rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.bias[i] = bias[of[i]];
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

// What is done to sums. Most products are of the first three kinds, which are written out where
// that pays; the last has every other case, and is a rolled loop, since ten copies of erfc for
// every eight rows would be a megabyte of code.
enum class Finish { kPlain, kSilu, kRelu2, kAny };

__host__ __device__ __forceinline__ Finish ChooseFinish(const ExpertGemm& p) {
  if (p.left.row_scale != nullptr) return Finish::kAny;
  if (!p.activate) return Finish::kPlain;
  const Activation kind = p.activation.kind;
  if (kind == Activation::kSilu && p.activation.gated && !p.activation.interleaved &&
      p.activation.limit > FLT_MAX) {
    return Finish::kSilu;
  }
  return kind == Activation::kRelu2 && !p.activation.gated ? Finish::kRelu2 : Finish::kAny;
}

// Whether the epilogues can round outputs to NVFP4 on their way. Where gate and up alternate,
// neighbouring outputs come from different tiles.
inline bool CanRoundOutputs(const ActivationParameters& activation) {
  return !(activation.gated && activation.interleaved);
}

// Outputs of two sorted rows, rounded: of the low weight row and of the high one, which is void
// where the two were a gate and an up row.
struct OutputPairs {
  uint32_t low;
  uint32_t high;
};

// What a lane does with one weight tile's sums, to outputs of type T.
template <typename T>
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
      // low * sigmoid(low) * high, off by no more than |low| * 2^-23 of it: to 16-bit outputs that
      // is nothing, and a third of the instructions.
      const float sigmoid = FastReciprocal(1.0f + FastExp2(low * -1.4426950408889634f));
      low = low * sigmoid * high;
    } else if constexpr (kFinish == Finish::kRelu2) {
      low = ActivateGate({Activation::kRelu2, false, false, 1.0f, 0.0f, p.activation.limit}, low);
      high = ActivateGate({Activation::kRelu2, false, false, 1.0f, 0.0f, p.activation.limit}, high);
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

  // Of the fragment of sorted rows row to row + 7.
  template <Finish kFinish>
  __device__ __forceinline__ OutputPairs Finished(int row, float a, float b, float c,
                                                  float d) const {
    if constexpr (kFinish == Finish::kAny) {
      const float even = RowScale(row + 2 * q), odd = RowScale(row + 2 * q + 1);
      a *= even, b *= odd, c *= even, d *= odd;
    }
    float low[2] = {a * rows.scale[0] + rows.bias[0], b * rows.scale[0] + rows.bias[0]};
    float high[2] = {c * rows.scale[1] + rows.bias[1], d * rows.scale[1] + rows.bias[1]};
    Activate<kFinish>(low[0], high[0]);
    Activate<kFinish>(low[1], high[1]);
    return {MakePair<T>(low[0], low[1]), MakePair<T>(high[0], high[1])};
  }

  // Of sorted row row + g, which goes to output row `place`.
  __device__ __forceinline__ void Store(int row, int32_t place, const OutputPairs& pairs) const {
    const uint32_t left = Transpose(pairs.low);
    const uint32_t right = p.gated() ? 0 : Transpose(pairs.high);
    if (row + g >= tile.rows) return;
    uint16_t* out =
        static_cast<uint16_t*>(p.output.values) + static_cast<int64_t>(place) * p.columns;
    if (p.gated() && p.activation.interleaved) {
      out[first / 2 + q] = static_cast<uint16_t>(left);
      out[(p.columns + first) / 2 + q] = static_cast<uint16_t>(left >> 16);
      return;
    }
    StorePair(out, first + 2 * q, p.columns, left);
    if (!p.gated()) StorePair(out, first + 8 + 2 * q, p.columns, right);
  }

  // Rounds the 16 columns from `first` on, of which `left` and `right` are eight each, and stores
  // those of sorted row row + g.
  __device__ __forceinline__ void StoreRounded(int row, uint32_t left, uint32_t right,
                                               float input_scale) const {
    uint32_t pairs[2] = {Transpose(left), Transpose(right)};
    RoundSpreadBlock<T, 4>(input_scale, pairs);
    if (row + g >= tile.rows) return;
    uint16_t* out = static_cast<uint16_t*>(p.output.values) +
                    static_cast<int64_t>(tile.row + row + g) * p.columns + first + 2 * q;
    *reinterpret_cast<uint32_t*>(out) = pairs[0];
    *reinterpret_cast<uint32_t*>(out + 8) = pairs[1];
  }
};

// Calls store(row, pairs) for each eight sorted rows of the tile, the sums passing through the
// first four: in little code. Uses up `sums`.
template <typename T, int kSize, typename Function>
__device__ __forceinline__ void FinishRolled(const TileStore<T>& tile_store, float (&sums)[kSize],
                                             const Function& store) {
#pragma unroll 1
  for (int row = 0; row < tile_store.tile.rows; row += 8) {
    store(row, tile_store.template Finished<Finish::kAny>(row, sums[0], sums[1], sums[2], sums[3]));
#pragma unroll
    for (int i = 4; i < kSize; ++i) sums[i - 4] = sums[i];
  }
}

// `unit` is what the engine's sums have to be multiplied by.
template <typename T>
__device__ __forceinline__ TileStore<T> MakeTileStore(const ExpertGemm& p, const RowTile& tile,
                                                      const LaneRows& rows, int m_tile, int warp,
                                                      float unit = kProductUnit<T>) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (p.left.input_scale != nullptr) unit *= p.left.input_scale[tile.expert];
  const LaneRows scaled = {{unit * rows.scale[0], unit * rows.scale[1]},
                           {rows.bias[0], rows.bias[1]}};
  return {p, tile, scaled, FirstRow(p, m_tile, warp), lane / 4, lane % 4};
}

// Stores the outputs of the tile's sorted rows, straight from registers; uses up `sums`. All lanes
// of the warp take part.
template <typename T, int kSize>
__device__ __forceinline__ void StoreTile(const ExpertGemm& p, const RowTile& tile, int m_tile,
                                          int warp, float (&sums)[kSize]) {
  if (FirstRow(p, m_tile, warp) >= p.columns) return;  // padding, for the whole warp
  const LaneRows rows = LoadLaneRows(p, tile.expert, m_tile, warp);
  const TileStore<T> store = MakeTileStore<T>(p, tile, rows, m_tile, warp);
  FinishRolled(store, sums, [&](int row, const OutputPairs& pairs) {
    int32_t place = tile.row + row + store.g;
    if (p.output.slots != nullptr && row + store.g < tile.rows) place = p.output.slots[place];
    store.Store(row, place, pairs);
  });
}

// Output rows of the rows of a tile: lane l of a warp has those of rows l + 32 i.
template <int kRows>
struct OutputPlaces {
  int32_t places[(kRows + 31) / 32];

  // `slots` are those of the tile's rows, or null.
  __device__ __forceinline__ OutputPlaces(const int32_t* slots, const RowTile& tile) {
#pragma unroll
    for (int i = 0; i < (kRows + 31) / 32; ++i) {
      const int row = 32 * i + static_cast<int>(threadIdx.x % 32);
      places[i] = slots != nullptr && row < tile.rows ? slots[row] : tile.row + row;
    }
  }
};

// sums -> outputs in straight code for each eight rows: nothing waits for what is before it.
template <Finish kFinish, typename T, int kSize, int kRows>
__device__ __forceinline__ void StoreUnrolled(const TileStore<T>& store,
                                              const OutputPlaces<kRows>& places,
                                              const float (&sums)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize / 4; ++j) {
    if (8 * j >= store.tile.rows) break;
    const int32_t place = __shfl_sync(0xffffffffu, places.places[j / 4], 8 * j % 32 + store.g);
    store.Store(8 * j, place,
                store.template Finished<kFinish>(8 * j, sums[4 * j], sums[4 * j + 1],
                                                 sums[4 * j + 2], sums[4 * j + 3]));
  }
}

// Rounds and stores eight sorted rows of two slabs of 16 weight rows that follow each other. A
// block of 16 is a slab; of a gated layer it is the eight outputs of each. `sums` are four of each
// slab.
template <Finish kFinish, typename T>
__device__ __forceinline__ void StoreRoundedRows(const TileStore<T> (&stores)[2], float input_scale,
                                                 int row, const float* first, const float* second) {
  const ExpertGemm& p = stores[0].p;
  const OutputPairs pairs[2] = {
      stores[0].template Finished<kFinish>(row, first[0], first[1], first[2], first[3]),
      stores[1].template Finished<kFinish>(row, second[0], second[1], second[2], second[3])};
  if (p.gated()) {
    if (stores[0].first < p.columns) {
      stores[0].StoreRounded(row, pairs[0].low, pairs[1].low, input_scale);
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (stores[s].first < p.columns) {
      stores[s].StoreRounded(row, pairs[s].low, pairs[s].high, input_scale);
    }
  }
}

template <Finish kFinish, typename T, int kSize>
__device__ __forceinline__ void StoreRoundedUnrolled(const TileStore<T> (&stores)[2],
                                                     float input_scale,
                                                     const float (&sums)[2][kSize]) {
#pragma unroll
  for (int j = 0; j < kSize / 4; ++j) {
    if (8 * j >= stores[0].tile.rows) break;
    StoreRoundedRows<kFinish>(stores, input_scale, 8 * j, sums[0] + 4 * j, sums[1] + 4 * j);
  }
}

// Of a whole tile, whose outputs are not listed; uses up `sums`.
template <typename T, int kSize>
__device__ __forceinline__ void StoreRoundedSlabs(const TileStore<T> (&stores)[2],
                                                  float (&sums)[2][kSize]) {
  const ExpertGemm& p = stores[0].p;
  const float input_scale = p.output.input_scale[stores[0].tile.expert];
  switch (ChooseFinish(p)) {
    case Finish::kSilu:
      return StoreRoundedUnrolled<Finish::kSilu>(stores, input_scale, sums);
    case Finish::kRelu2:
      return StoreRoundedUnrolled<Finish::kRelu2>(stores, input_scale, sums);
    case Finish::kPlain:
    case Finish::kAny:
#pragma unroll 1
      for (int row = 0; row < stores[0].tile.rows; row += 8) {
        StoreRoundedRows<Finish::kAny>(stores, input_scale, row, sums[0], sums[1]);
#pragma unroll
        for (int i = 4; i < kSize; ++i) {
          sums[0][i - 4] = sums[0][i];
          sums[1][i - 4] = sums[1][i];
        }
      }
  }
}

// As StoreTile, with the loads done before.
template <typename T, int kSize, int kRows>
__device__ __forceinline__ void StoreLoadedTile(const ExpertGemm& p, const RowTile& tile,
                                                int m_tile, int warp, const LaneRows& rows,
                                                const OutputPlaces<kRows>& places,
                                                float (&sums)[kSize],
                                                float unit = kProductUnit<T>) {
  if (FirstRow(p, m_tile, warp) >= p.columns) return;  // padding, for the whole warp
  const TileStore<T> store = MakeTileStore<T>(p, tile, rows, m_tile, warp, unit);
  switch (ChooseFinish(p)) {
    case Finish::kPlain:
      return StoreUnrolled<Finish::kPlain>(store, places, sums);
    case Finish::kSilu:
      return StoreUnrolled<Finish::kSilu>(store, places, sums);
    case Finish::kRelu2:
      return StoreUnrolled<Finish::kRelu2>(store, places, sums);
    case Finish::kAny:
      return FinishRolled(store, sums, [&](int row, const OutputPairs& pairs) {
        int32_t place = tile.row + row + store.g;
        if (p.output.slots != nullptr && row + store.g < tile.rows) place = p.output.slots[place];
        store.Store(row, place, pairs);
      });
  }
}

}  // namespace nvfp4
