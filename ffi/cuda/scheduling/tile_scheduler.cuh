// The tile scheduler: which part of a grouped GEMM each block of threads computes, and in which
// order.
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
// Multiprocessors are not equally fast. A schedule may therefore leave open which block computes
// what: blocks then take one whole output tile after the other (work_taker.cuh), and no tile is
// split.
//
// write_schedule.cuh writes the ranges on the device, as part of sorting rows by expert. If one
// expert owns all rows, the host knows everything about the schedule, and no kernel has to write it
// (one_expert.cuh).
#pragma once

#include <cuda_runtime.h>

#include "cuda/routing/expert_rows.h"
#include "cuda/scheduling/schedule_sizes.h"
#include "nvfp4.h"

namespace nvfp4 {

// How many rows a tile may have, and what an output tile costs. It costs as many units as it has
// rows, and at least `min_cost`: with fewer rows, reading the weights takes longer than the MMAs.
struct TileRule {
  int32_t tile_rows;
  int32_t min_cost;
};

// The tiles of one expert. They have `size` rows each, and the last one may have fewer. Full tiles
// and a rest are faster than equal tiles, because the engines have their fastest code for full
// tiles.
struct ExpertTiles {
  int32_t count;
  int32_t size;
};

NVFP4_HOST_DEVICE ExpertTiles CutRows(uint32_t rows, uint32_t tile_rows) {
  return {static_cast<int32_t>((rows + tile_rows - 1) / tile_rows),
          static_cast<int32_t>(rows < tile_rows ? rows : tile_rows)};
}

// A range does not begin or end near an end of an output tile, within this fraction of the tile. It
// begins or ends at that end instead.
constexpr int kSnapFraction = 8;

// Returns the start of the range that begins in output tile `tile`, after `inside` of its `cost`.
NVFP4_HOST_DEVICE WorkStart SnapStart(int32_t tile, uint32_t inside, uint32_t cost,
                                      int32_t k_steps) {
  WorkStart start = {tile, static_cast<int32_t>(inside * k_steps / cost)};
  const int32_t snap = k_steps / kSnapFraction;
  if (start.step <= snap) start.step = 0;
  if (k_steps - start.step <= snap) start = {start.output_tile + 1, 0};
  return start;
}

// The ranges of a schedule whose output tiles all cost the same.
struct EqualTiles {
  int32_t output_tiles;
  int32_t first;       // first output tile of the stream-K part
  uint32_t tile_cost;  // of an output tile; 0 if `starts` has the ranges
  int32_t range_cost;  // of each range
  int32_t rest;        // this many ranges cost one more
};

// The schedule of one GEMM. Output tiles before Start(0).output_tile are data-parallel. Of the
// other tiles, block b computes those from Start(b) to Start(b + 1). `ready` has kReadyFlags flags
// for each block. They are zeroed when the schedule is written, and the GEMM raises them when it
// has stored a partial sum. If blocks take tiles, `ready` has the number of taken tiles instead.
struct TileSchedule {
  int32_t blocks;
  int32_t k_steps;
  int32_t m_blocks;   // blocks of weight rows
  WorkStart* starts;  // [blocks + 1], if equal.tile_cost is 0
  int32_t* ready;     // [ready_count()]
  EqualTiles equal;
  bool taken;  // whether blocks take tiles one by one; `starts` and `equal` are not used then

  NVFP4_HOST_DEVICE int32_t ready_count() const;

  __device__ __forceinline__ WorkStart Start(int32_t block) const {
    if (equal.tile_cost == 0) return starts[block];
    if (equal.first == equal.output_tiles || block == blocks) return {equal.output_tiles, 0};
    const uint32_t place = equal.range_cost * block + min(block, equal.rest);
    const uint32_t tile = place / equal.tile_cost;
    return SnapStart(equal.first + static_cast<int32_t>(tile), place - tile * equal.tile_cost,
                     equal.tile_cost, k_steps);
  }
};

// The schedules that one sort writes: none, one, or those of the two GEMMs of a layer.
struct TileSchedules {
  int count;
  TileSchedule schedule[2];
};

NVFP4_HOST_DEVICE int32_t TileSchedule::ready_count() const {
  return taken ? 1 : kReadyFlags * blocks;
}

// A work unit: the steps from `begin` to `end` of one output tile.
struct WorkUnit {
  RowTile tile;
  int32_t output_tile;
  int32_t m_block;
  int32_t begin;
  int32_t end;
};

// How many blocks of weight rows all tiles of an expert pass through before the next ones. With the
// weight rows of eight blocks in the L2 cache, weights and rows are each read from memory about
// once.
constexpr uint32_t kGroupBlocks = 8;

// Finds the rows and the block of weight rows of an output tile.
__device__ __forceinline__ void FindOutputTile(const ExpertRows& rows, const TileRule& rule,
                                               int32_t m_blocks, int32_t output_tile,
                                               WorkUnit* work) {
  // Unsigned numbers, because a signed division takes half as long again.
  const uint32_t blocks = m_blocks, index = static_cast<uint32_t>(output_tile) / blocks;
  const bool listed = rows.only_rows == 0;
  ListedTile tile = {0, 0, 0, rows.only_rows};
  if (listed) tile = rows.tiles[index];
  const ExpertTiles tiles = CutRows(tile.end - tile.start, rule.tile_rows);
  work->output_tile = output_tile;
  const uint32_t size = tiles.size, count = tiles.count;
  const uint32_t first = listed ? index - static_cast<uint32_t>(tile.row - tile.start) / size : 0u;
  const uint32_t place = output_tile - first * blocks;
  const uint32_t group = place / (kGroupBlocks * count);
  const uint32_t rest = place - group * kGroupBlocks * count;
  const uint32_t width = min(kGroupBlocks, blocks - group * kGroupBlocks);
  const uint32_t tile_index = rest / width;
  work->m_block = static_cast<int32_t>(group * kGroupBlocks + rest - tile_index * width);
  const int32_t row = tile.start + static_cast<int32_t>(tile_index * size);
  work->tile = {tile.expert, row, min(tiles.size, tile.end - row)};
}

// Iterates over the work units of this block. The end of the range of the block is loaded again for
// each work unit, which saves registers in the loops over k.
struct TileScheduler {
  const ExpertRows& rows;
  const TileRule& rule;
  const TileSchedule& schedule;
  int32_t next;  // next data-parallel output tile
  WorkStart at;  // next step of the stream-K range
  WorkUnit work;

  __device__ __forceinline__ TileScheduler(const ExpertRows& rows_in, const TileRule& rule_in,
                                           const TileSchedule& schedule_in)
      : rows(rows_in),
        rule(rule_in),
        schedule(schedule_in),
        next(static_cast<int32_t>(blockIdx.x)),
        at(schedule.Start(static_cast<int32_t>(blockIdx.x))) {}

  // Moves on to the next work unit. Returns false after the last one.
  __device__ __forceinline__ bool Next() {
    const WorkStart stop = schedule.Start(static_cast<int32_t>(blockIdx.x) + 1);
    work.begin = 0;
    work.end = schedule.k_steps;
    if (next < schedule.Start(0).output_tile) {
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
