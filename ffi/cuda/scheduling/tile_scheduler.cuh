// The part of a product that one block of threads works on, piece by piece (see expert_rows.cuh).
#pragma once

#include "cuda/routing/expert_rows.cuh"

namespace nvfp4 {

// Steps begin to end of one sum.
struct Piece {
  RowTile tile;
  int32_t sum;
  int32_t m_block;
  int32_t begin;
  int32_t end;
};

// Blocks of weight rows that all tiles of an expert pass through before the next ones: with the
// rows of eight of them in the L2 cache, weights and rows are each read from memory about once.
constexpr uint32_t kGroupBlocks = 8;

// The tile and the block of weight rows of sum `sum`.
__device__ __forceinline__ void FindSum(const ExpertRows& rows, const TileRule& rule,
                                        int32_t m_blocks, int32_t sum, Piece* piece) {
  // Unsigned: division of numbers with a sign takes half as long again.
  const uint32_t blocks = m_blocks, index = static_cast<uint32_t>(sum) / blocks;
  const ListedTile tile = rows.tiles[index];
  const ExpertTiles tiles = CutRows(tile.end - tile.start, rule.tile_rows);
  piece->sum = sum;
  const uint32_t size = tiles.size, count = tiles.count;
  const uint32_t first = index - static_cast<uint32_t>(tile.row - tile.start) / size;
  const uint32_t place = sum - first * blocks;
  const uint32_t group = place / (kGroupBlocks * count);
  const uint32_t rest = place - group * kGroupBlocks * count;
  const uint32_t width = min(kGroupBlocks, blocks - group * kGroupBlocks);
  const uint32_t tile_index = rest / width;
  piece->m_block = static_cast<int32_t>(group * kGroupBlocks + rest - tile_index * width);
  const int32_t row = tile.start + static_cast<int32_t>(tile_index * size);
  piece->tile = {tile.expert, row, min(tiles.size, tile.end - row)};
}

// Goes over the pieces of this block. Where its part ends is loaded again for each piece, which
// saves registers in the loops between.
struct Pieces {
  const ExpertRows& rows;
  const TileRule& rule;
  const Walk& walk;
  int32_t next;  // of the sums that go around
  Start at;
  Piece piece;

  __device__ __forceinline__ Pieces(const ExpertRows& rows_in, const TileRule& rule_in,
                                    const Walk& walk_in)
      : rows(rows_in),
        rule(rule_in),
        walk(walk_in),
        next(static_cast<int32_t>(blockIdx.x)),
        at(walk.starts[blockIdx.x]) {}

  // Moves on to the next piece; false after the last.
  __device__ __forceinline__ bool Next() {
    const Start stop = walk.starts[blockIdx.x + 1];
    piece.begin = 0;
    piece.end = walk.k_steps;
    if (next < walk.starts[0].sum) {
      FindSum(rows, rule, walk.m_blocks, next, &piece);
      next += walk.blocks;
      return true;
    }
    if (at.sum > stop.sum || (at.sum == stop.sum && at.step >= stop.step)) return false;
    piece.begin = at.step;
    if (at.sum == stop.sum) piece.end = stop.step;
    FindSum(rows, rule, walk.m_blocks, at.sum, &piece);
    at = {at.sum + 1, 0};
    return true;
  }
};

}  // namespace nvfp4
