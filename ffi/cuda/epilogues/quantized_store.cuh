// Turns float32 sums in fragments into NVFP4 codes and block scales. The activations of GEMM 1
// become the left operand of GEMM 2, without a pass over memory in between.
//
// A block of 16 outputs that share a scale comes from one slab of 16 weight rows. In a gated layer,
// it comes from slabs 2 w and 2 w + 1 (see fp4_64x64_gated in numerics/layouts.py). Both slabs are
// in the same warp. After Transpose, the four lanes of g have the block of sorted row g. A lane has
// columns 2 q and 2 q + 1, and the two columns 8 further.
//
// Values are rounded to T first. The bits are those of storing the values and launching
// QuantizeRows.
#pragma once

#include "cuda/epilogues/finish.cuh"
#include "cuda/quantizers/round_block.cuh"

namespace nvfp4 {

template <typename T>
struct QuantizedStore {
  const ExpertGemm& p;
  const RowTile& tile;
  const float input_scale;
  const int g, q;

  // Stores the block of columns from `column` on, of sorted row row + g. Each lane gives two pairs
  // of the block. The last block of a row also stores the zeros that pad the row.
  __device__ __forceinline__ void Store(int row, int column, uint32_t left, uint32_t right) const {
    const uint32_t pairs[2] = {left, right};
    uint32_t words[2] = {0, 0};
    const uint8_t byte = QuantizeSpreadBlock<T, 4>(
        input_scale, pairs, [&](int j, Rounded value, uint32_t sign, float) {
          words[j / 2] |= (CodeE2M1(value) & 7 | sign >> 12) << (8 * q + j % 2 * 4);
        });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] |= __shfl_xor_sync(0xffffffffu, words[i], 1);
      words[i] |= __shfl_xor_sync(0xffffffffu, words[i], 2);
    }
    if (q != 0 || row + g >= tile.rows) return;
    const int64_t row_blocks = PadK(p.columns) / kBlock;
    const int64_t block = (tile.row + row + g) * row_blocks + column / kBlock;
    static_cast<uint2*>(p.output.values)[block] = make_uint2(words[0], words[1]);
    p.output.block_scale[block] = byte;
    if (column + kBlock != p.columns) return;
    for (int64_t pad = 1; pad < row_blocks - column / kBlock; ++pad) {
      static_cast<uint2*>(p.output.values)[block + pad] = make_uint2(0, 0);
      p.output.block_scale[block + pad] = 0;
    }
  }
};

// Quantizes the outputs of two neighboring slabs of one warp, and uses up their sums. The loop is
// not unrolled: the work on eight rows is long, and MMAs of other warps can hide it.
template <Finish kFinish, typename T, int kSize>
__device__ __forceinline__ void QuantizeSlabs(const TileStore<T> (&slabs)[2],
                                              const QuantizedStore<T>& store,
                                              float (&sums)[2][kSize]) {
  const ExpertGemm& p = store.p;
#pragma unroll 1
  for (int row = 0; row < store.tile.rows; row += 8) {
    OutputPairs pairs[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      pairs[s] =
          slabs[s].template Finished<kFinish>(row, sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
#pragma unroll
      for (int i = 4; i < kSize; ++i) sums[s][i - 4] = sums[s][i];
    }
    if (p.gated()) {
      store.Store(row, slabs[0].first, Transpose(pairs[0].low), Transpose(pairs[1].low));
      continue;
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (slabs[s].first >= p.columns) break;  // padding, for the whole warp
      store.Store(row, slabs[s].first, Transpose(pairs[s].low), Transpose(pairs[s].high));
    }
  }
}

// Quantizes the outputs of slabs `warp` and warp + 1 of a weight tile; `warp` is even.
template <typename T, int kSize>
__device__ __forceinline__ void QuantizeTile(const ExpertGemm& p, const RowTile& tile, int m_tile,
                                             int warp, const LaneRows (&rows)[2], float unit,
                                             float (&sums)[2][kSize]) {
  if (FirstRow(p, m_tile, warp) >= p.columns) return;  // padding, for the whole warp
  const TileStore<T> slabs[2] = {MakeTileStore<T>(p, tile, rows[0], m_tile, warp, unit),
                                 MakeTileStore<T>(p, tile, rows[1], m_tile, warp + 1, unit)};
  const QuantizedStore<T> store = {p, tile, p.output.input_scale[tile.expert], slabs[0].g,
                                   slabs[0].q};
  switch (ChooseFinish(p)) {
    case Finish::kSilu:
      return QuantizeSlabs<Finish::kSilu>(slabs, store, sums);
    case Finish::kRelu2:
      return QuantizeSlabs<Finish::kRelu2>(slabs, store, sums);
    case Finish::kPlain:
    case Finish::kAny:
      return QuantizeSlabs<Finish::kAny>(slabs, store, sums);
  }
}

}  // namespace nvfp4
