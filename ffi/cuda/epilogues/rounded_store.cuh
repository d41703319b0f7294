// Rounds finished outputs to NVFP4 and stores them as code * block scale in 16 bits, for GEMM 2 of
// a W4A4 layer on a 16-bit engine. A block of 16 outputs is in one warp.
#pragma once

#include "cuda/epilogues/finish.cuh"
#include "cuda/quantizers/round_block.cuh"

namespace nvfp4 {

// Rounds the block of 16 columns from store.first on, and stores those of sorted row row + g.
// `left` and `right` have eight columns each.
template <typename T>
__device__ __forceinline__ void StoreRoundedBlock(const TileStore<T>& store, int row, uint32_t left,
                                                  uint32_t right, float input_scale) {
  const ExpertGemm& p = store.p;
  const RowTile& tile = store.tile;
  const int g = store.g;
  uint32_t pairs[2] = {Transpose(left), Transpose(right)};
  RoundSpreadBlock<T, 4>(input_scale, pairs);
  if (row + g >= tile.rows) return;
  uint16_t* out = static_cast<uint16_t*>(p.output.values) +
                  static_cast<int64_t>(tile.row + row + g) * p.columns + store.first + 2 * store.q;
  *reinterpret_cast<uint32_t*>(out) = pairs[0];
  *reinterpret_cast<uint32_t*>(out + 8) = pairs[1];
}

// Rounds and stores eight sorted rows of two consecutive slabs of 16 weight rows. Without a gate,
// each slab is a block of 16 outputs. In a gated layer, each slab gives eight outputs, and both
// together are a block. `first` and `second` point to four sums of each slab.
template <Finish kFinish, typename T>
__device__ __forceinline__ void StoreRoundedRows(const TileStore<T> (&stores)[2], float input_scale,
                                                 int row, const float* first, const float* second) {
  const ExpertGemm& p = stores[0].p;
  const OutputPairs pairs[2] = {
      stores[0].template Finished<kFinish>(row, first[0], first[1], first[2], first[3]),
      stores[1].template Finished<kFinish>(row, second[0], second[1], second[2], second[3])};
  if (p.gated()) {
    if (stores[0].first < p.columns) {
      StoreRoundedBlock(stores[0], row, pairs[0].low, pairs[1].low, input_scale);
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (stores[s].first < p.columns) {
      StoreRoundedBlock(stores[s], row, pairs[s].low, pairs[s].high, input_scale);
    }
  }
}

template <Finish kFinish, typename T, int kSize>
__device__ __forceinline__ void StoreRoundedUnrolled(const TileStore<T> (&stores)[2],
                                                     float input_scale, float (&sums)[2][kSize]) {
  const auto store_group = [&](int row, int i) {
    StoreRoundedRows<kFinish>(stores, input_scale, row, sums[0] + i, sums[1] + i);
  };
  ForGroupsOfRows<kSize>(stores[0].tile.rows, store_group, [&](int i, int j) {
    sums[0][i] = sums[0][j];
    sums[1][i] = sums[1][j];
  });
}

// Rounds and stores the outputs of a whole tile to consecutive rows, and uses up `sums`.
// p.output.slots is not used.
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

}  // namespace nvfp4
