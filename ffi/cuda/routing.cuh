// Rows grouped by expert, in device memory, and the plan by which blocks share a product.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

// `rows` consecutive sorted rows, all of one expert.
struct RowTile {
  int32_t expert;
  int32_t row;
  int32_t rows;
};

struct ExpertRows {
  int32_t* starts;     // [e + 1]: expert i owns sorted rows starts[i] to starts[i + 1]
  int32_t* slots;      // [rows]: slot of a sorted row; null where rows come sorted
  RowTile* tiles;      // [MaxTiles(rows, e, rows of a tile)]
  int32_t* num_tiles;  // [1]
};

// Each expert that has rows ends in at most one tile that is not full.
constexpr int64_t MaxTiles(int64_t rows, int64_t experts, int64_t tile_rows) {
  return rows / tile_rows + (rows < experts ? rows : experts);
}

// A product is a line of steps: for each tile of rows, for each block of weight rows, for each 64
// of k one step. Blocks of threads cut the line into equal parts, wherever that falls; a part that
// begins inside a sum over k hands its share to the block before it (see partial_sums.cuh).
struct Start {
  int32_t tile;
  int32_t step;  // in this tile
};

// How the line of one product is cut. `starts` [blocks + 1]: block b works from starts[b] to
// starts[b + 1]. `ready` [kReadyFlags * blocks] are zeroed here and raised by the product.
struct Walk {
  int32_t blocks;
  int32_t k_tiles;   // steps of a sum over k
  int32_t m_blocks;  // blocks of weight rows
  Start* starts;
  int32_t* ready;
};

// The walks that share one sort: none, one, or the two products of a layer.
struct Walks {
  int count;
  Walk walk[2];
};

constexpr int kReadyFlags = 4;  // of a block: one for each of its warpgroups

// How many rows a tile may have, and what a step of a tile costs: as many units as it has rows,
// and at least `min_cost`, which is where reading the weights takes as long as the product.
struct TileRule {
  int32_t tile_rows;
  int32_t min_cost;
};

// Sorts the slots 0 to num_slots - 1 by expert_ids[slot], keeping their order within an expert.
// Slots whose id is not in [0, num_experts) are left out. At most 65535 slots. Writes `walks`.
cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                               const Walks& walks);

// The same tables for rows that are sorted already, from the number of rows of each expert.
cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t num_rows,
                             int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                             const Walks& walks);

}  // namespace nvfp4
