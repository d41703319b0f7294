// Which part of a grouped product each block of threads computes, and in which order.
//
// An output tile is one tile of rows by one block of weight rows, over all of k, in `k_steps`
// steps. The scheduler is a hybrid of data-parallel tiles and stream-K:
//   data-parallel   Most output tiles are computed whole. Block b takes tiles b, b + blocks, and so
//                   on, so that blocks that run together share weights and rows in the L2 cache.
//   stream-K        The last output tiles, fewer than two a block, form one line of steps. The line
//                   is cut into a range of equal cost for each block, even inside a tile. A range
//                   that begins inside a tile yields a partial sum, which the block that began the
//                   tile adds in its fix-up (partial_sums.cuh).
// A block that has no tile and no range exits early.
//
// plan_schedule.cuh writes the ranges on the device, as part of sorting rows by expert.
#pragma once

#include "cuda/routing/expert_rows.cuh"

namespace nvfp4 {

// How many rows a tile may have, and what an output tile costs: as many units as it has rows, and
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

// Where a stream-K range starts.
struct WorkStart {
  int32_t output_tile;
  int32_t step;  // of k, in this tile
};

// The schedule of one product. Output tiles before starts[0].output_tile are data-parallel; of the
// others block b computes those from starts[b] to starts[b + 1]. `ready` has kReadyFlags flags for
// each block, zeroed with the plan and raised by the product where it has stored a partial sum.
struct TileSchedule {
  int32_t blocks;
  int32_t k_steps;
  int32_t m_blocks;   // blocks of weight rows
  WorkStart* starts;  // [blocks + 1]
  int32_t* ready;     // [kReadyFlags * blocks]
};

// The schedules that are planned with one sort: none, one, or those of the two products of a layer.
struct TileSchedules {
  int count;
  TileSchedule schedule[2];
};

constexpr int kReadyFlags = 8;  // of a block: one for each of its warpgroups

// A work unit: steps begin to end of one output tile.
struct WorkUnit {
  RowTile tile;
  int32_t output_tile;
  int32_t m_block;
  int32_t begin;
  int32_t end;
};

// Blocks of weight rows that all tiles of an expert pass through before the next ones: with the
// rows of eight of them in the L2 cache, weights and rows are each read from memory about once.
constexpr uint32_t kGroupBlocks = 8;

// The rows and the block of weight rows of an output tile.
__device__ __forceinline__ void FindOutputTile(const ExpertRows& rows, const TileRule& rule,
                                               int32_t m_blocks, int32_t output_tile,
                                               WorkUnit* work) {
  // Unsigned: division of numbers with a sign takes half as long again.
  const uint32_t blocks = m_blocks, index = static_cast<uint32_t>(output_tile) / blocks;
  const ListedTile tile = rows.tiles[index];
  const ExpertTiles tiles = CutRows(tile.end - tile.start, rule.tile_rows);
  work->output_tile = output_tile;
  const uint32_t size = tiles.size, count = tiles.count;
  const uint32_t first = index - static_cast<uint32_t>(tile.row - tile.start) / size;
  const uint32_t place = output_tile - first * blocks;
  const uint32_t group = place / (kGroupBlocks * count);
  const uint32_t rest = place - group * kGroupBlocks * count;
  const uint32_t width = min(kGroupBlocks, blocks - group * kGroupBlocks);
  const uint32_t tile_index = rest / width;
  work->m_block = static_cast<int32_t>(group * kGroupBlocks + rest - tile_index * width);
  const int32_t row = tile.start + static_cast<int32_t>(tile_index * size);
  work->tile = {tile.expert, row, min(tiles.size, tile.end - row)};
}

// Iterates over the work units of this block. The end of the block's range is loaded again for each
// unit, which saves registers in the loops between.
struct TileScheduler {
  const ExpertRows& rows;
  const TileRule& rule;
  const TileSchedule& schedule;
  int32_t next;  // data-parallel output tile
  WorkStart at;  // in the stream-K range
  WorkUnit work;

  __device__ __forceinline__ TileScheduler(const ExpertRows& rows_in, const TileRule& rule_in,
                                           const TileSchedule& schedule_in)
      : rows(rows_in),
        rule(rule_in),
        schedule(schedule_in),
        next(static_cast<int32_t>(blockIdx.x)),
        at(schedule.starts[blockIdx.x]) {}

  // Moves on to the next work unit; false after the last.
  __device__ __forceinline__ bool Next() {
    const WorkStart stop = schedule.starts[blockIdx.x + 1];
    work.begin = 0;
    work.end = schedule.k_steps;
    if (next < schedule.starts[0].output_tile) {
      FindOutputTile(rows, rule, schedule.m_blocks, next, &work);
      next += schedule.blocks;
      return true;
    }
    if (at.output_tile > stop.output_tile ||
        (at.output_tile == stop.output_tile && at.step >= stop.step)) {
      return false;
    }
    work.begin = at.step;
    if (at.output_tile == stop.output_tile) work.end = stop.step;
    FindOutputTile(rows, rule, schedule.m_blocks, at.output_tile, &work);
    at = {at.output_tile + 1, 0};
    return true;
  }
};

}  // namespace nvfp4
