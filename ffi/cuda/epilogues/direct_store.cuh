// Stores finished outputs from registers directly to global memory.
//
// movmatrix transposes eight weight rows by eight sorted rows. Lane 4 g + q then stores columns 2 q
// and 2 q + 1 of sorted row g.
#pragma once

#include "cuda/epilogues/finish.cuh"

namespace nvfp4 {

// Stores columns `column` and `column` + 1 of a row of `columns`; `column` is even. If `columns` is
// odd, rows are aligned to two bytes only, so that the columns are stored one by one.
__device__ __forceinline__ void StorePair(uint16_t* row, int column, int columns, uint32_t pair) {
  if (columns % 2 == 0) {
    if (column < columns) *reinterpret_cast<uint32_t*>(row + column) = pair;
    return;
  }
  if (column < columns) row[column] = static_cast<uint16_t>(pair);
  if (column + 1 < columns) row[column + 1] = static_cast<uint16_t>(pair >> 16);
}

// Stores the outputs of sorted row row + g to output row `place`.
template <typename T>
__device__ __forceinline__ void StoreRows(const TileStore<T>& store, int row, int32_t place,
                                          const OutputPairs& pairs) {
  const ExpertGemm& p = store.p;
  const int first = store.first, q = store.q;
  const uint32_t left = Transpose(pairs.low);
  const uint32_t right = p.gated() ? 0 : Transpose(pairs.high);
  if (row + store.g >= store.tile.rows) return;
  uint16_t* out = static_cast<uint16_t*>(p.output.values) + static_cast<int64_t>(place) * p.columns;
  if (p.gated() && p.activation.interleaved) {
    out[first / 2 + q] = static_cast<uint16_t>(left);
    out[(p.columns + first) / 2 + q] = static_cast<uint16_t>(left >> 16);
    return;
  }
  StorePair(out, first + 2 * q, p.columns, left);
  if (!p.gated()) StorePair(out, first + 8 + 2 * q, p.columns, right);
}

// Stores the outputs of the sorted rows of a tile, and uses up `sums`. All lanes of the warp must
// call it.
template <typename T, int kSize>
__device__ __forceinline__ void StoreTile(const ExpertGemm& p, const RowTile& tile, int m_tile,
                                          int warp, float (&sums)[kSize]) {
  if (FirstRow(p, m_tile, warp) >= p.columns) return;  // padding, for the whole warp
  const LaneRows rows = LoadLaneRows(p, tile.expert, m_tile, warp);
  const TileStore<T> store = MakeTileStore<T>(p, tile, rows, m_tile, warp);
  FinishRolled(store, sums, [&](int row, const OutputPairs& pairs) {
    int32_t place = tile.row + row + store.g;
    if (p.output.slots != nullptr && row + store.g < tile.rows) place = p.output.slots[place];
    StoreRows(store, row, place, pairs);
  });
}

// The output rows of a tile: lane l of a warp has those of rows l + 32 i of the tile.
template <int kRows>
struct OutputPlaces {
  int32_t places[(kRows + 31) / 32];

  // `slots` are the slots of the tile's rows, or null.
  __device__ __forceinline__ OutputPlaces(const int32_t* slots, const RowTile& tile) {
#pragma unroll
    for (int i = 0; i < (kRows + 31) / 32; ++i) {
      const int row = 32 * i + static_cast<int>(threadIdx.x % 32);
      places[i] = slots != nullptr && row < tile.rows ? slots[row] : tile.row + row;
    }
  }

  // Returns the place of row `row` + g of the tile, where `row` is a multiple of eight.
  __device__ __forceinline__ int32_t Of(int row, int g) const {
    int32_t own = places[0];
#pragma unroll
    for (int i = 1; i < (kRows + 31) / 32; ++i) {
      if (row >= 32 * i) own = places[i];
    }
    return __shfl_sync(0xffffffffu, own, row % 32 + g);
  }
};

// Stores outputs and uses up `sums`, by code that is unrolled over groups of eight rows, so that no
// group waits for the one before.
template <Finish kFinish, typename T, int kSize, int kRows>
__device__ __forceinline__ void StoreUnrolled(const TileStore<T>& store,
                                              const OutputPlaces<kRows>& places,
                                              float (&sums)[kSize]) {
  const auto store_group = [&](int row, int i) {
    StoreRows(
        store, row, places.Of(row, store.g),
        store.template Finished<kFinish>(row, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  };
  ForGroupsOfRows<kSize>(store.tile.rows, store_group, [&](int i, int j) { sums[i] = sums[j]; });
}

// As StoreTile, for `rows` and `places` that were loaded before.
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
        StoreRows(store, row, place, pairs);
      });
  }
}

}  // namespace nvfp4
