// Rows grouped by expert, in device memory. This file uses neither XLA nor CUDA.
#pragma once

#include <cstdint>

namespace nvfp4 {

// `rows` consecutive sorted rows, all of one expert, from sorted row `row` on.
struct RowTile {
  int32_t expert;
  int32_t row;
  int32_t rows;
};

// An entry of the list of tiles. It has the first row of the tile and the range of rows of its
// expert, so that one load suffices.
struct alignas(16) ListedTile {
  int32_t expert;
  int32_t row;
  int32_t start;
  int32_t end;
};

struct ExpertRows {
  int32_t* starts;     // [e + 1]: expert i owns sorted rows starts[i] to starts[i + 1]
  int32_t* slots;      // [rows]: slot of a sorted row; null if rows come sorted
  ListedTile* tiles;   // [max_tiles], in order of experts; see EndTileList
  int32_t* num_tiles;  // [1]
  int32_t* counts;     // [kMaxSegments, e]: rows of an expert in a segment of the slots
  int32_t max_tiles;   // MaxTiles(rows, e, rows of the smallest tile)
  int32_t only_rows;   // if positive, one expert owns this many rows, and nobody fills the arrays
};

constexpr int64_t kMaxSegments = 32;

// An upper bound of the number of tiles: each expert that has rows has at most one tile that is not
// full.
constexpr int64_t MaxTiles(int64_t rows, int64_t experts, int64_t tile_rows) {
  return rows / tile_rows + (rows < experts ? rows : experts);
}

}  // namespace nvfp4
