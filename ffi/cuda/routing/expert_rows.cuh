// Rows grouped by expert, in device memory, and the plan by which blocks share a product.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "nvfp4.h"

namespace nvfp4 {

// `rows` consecutive sorted rows, all of one expert.
struct RowTile {
  int32_t expert;
  int32_t row;
  int32_t rows;
};

// A tile of the list of tiles, in one load: the first row of it, and the rows of its expert.
struct alignas(16) ListedTile {
  int32_t expert;
  int32_t row;
  int32_t start;
  int32_t end;
};

struct ExpertRows {
  int32_t* starts;     // [e + 1]: expert i owns sorted rows starts[i] to starts[i + 1]
  int32_t* slots;      // [rows]: slot of a sorted row; null where rows come sorted
  ListedTile* tiles;   // [MaxTiles(rows, e, rows of a tile)], by expert
  int32_t* num_tiles;  // [1]
  int32_t* counts;     // [kMaxSegments, e]: rows of an expert in a segment of the slots
};

constexpr int64_t kMaxSegments = 32;

// Each expert that has rows ends in at most one tile that is not full.
constexpr int64_t MaxTiles(int64_t rows, int64_t experts, int64_t tile_rows) {
  return rows / tile_rows + (rows < experts ? rows : experts);
}

// How many rows a tile may have, and what a sum of a tile costs: as many units as it has rows, and
// at least `min_cost`, which is where reading the weights takes as long as the product.
struct TileRule {
  int32_t tile_rows;
  int32_t min_cost;
};

// The tiles of one expert: `size` rows each, but the last may have fewer. Full tiles and a rest
// beat equal ones: the engines' code for full tiles is the fastest.
struct ExpertTiles {
  int32_t count;
  int32_t size;
};

NVFP4_HOST_DEVICE ExpertTiles CutRows(uint32_t rows, uint32_t tile_rows) {
  return {static_cast<int32_t>((rows + tile_rows - 1) / tile_rows),
          static_cast<int32_t>(rows < tile_rows ? rows : tile_rows)};
}

// A product is a line of sums, each one tile of rows by one block of weight rows over all of k, in
// `k_steps` steps. The first sums go around to the blocks of threads, sum s to block s % blocks,
// so that what runs together shares weights and rows in the L2 cache; the last ones, fewer than
// two a block, are a line of steps that is cut into parts of equal cost, wherever that falls: a
// part that begins inside a sum hands its share to the block before it (see partial_sums.cuh).
struct Start {
  int32_t sum;
  int32_t step;  // in this sum
};

// How the line of one product is cut. `starts` [blocks + 1]: sums before starts[0].sum go around;
// of the others block b works from starts[b] to starts[b + 1]. `ready` [kReadyFlags * blocks] are
// zeroed here and raised by the product.
struct Walk {
  int32_t blocks;
  int32_t k_steps;
  int32_t m_blocks;  // blocks of weight rows
  Start* starts;
  int32_t* ready;
};

// The walks that share one sort: none, one, or the two products of a layer.
struct Walks {
  int count;
  Walk walk[2];
};

constexpr int kReadyFlags = 8;  // of a block: one for each of its warpgroups

// Both functions below need num_experts >= 1: callers answer a call without experts themselves.

// Sorts the slots 0 to num_slots - 1 by expert_ids[slot], keeping their order within an expert.
// Slots whose id is not in [0, num_experts) are left out. At most 65536 slots. Writes `walks`.
cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                               const Walks& walks);

// Rows of a product's output; those that no expert owns become zeros.
struct OutputRows {
  void* values;
  int64_t row_bytes;  // even
};

// The same tables for rows that are sorted already, from the number of rows of each expert; zeros
// in the rows of `y` past them. The rows of the call are `first_row` to first_row + num_rows - 1 of
// those that the sizes count; tables and `y` count from first_row on.
cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t first_row,
                             int64_t num_rows, int64_t num_experts, const ExpertRows& rows,
                             const TileRule& rule, const Walks& walks, const OutputRows& y);

}  // namespace nvfp4
