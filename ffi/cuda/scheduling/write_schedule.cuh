// Cuts the rows of each expert into tiles, and writes the schedules of tile_scheduler.cuh. This
// runs inside the kernels that know how many rows each expert has: sort_by_expert.cu and
// group_rows.cu.
//
// Bottleneck: latency. Each thread has two experts, and one prefix sum over experts takes rows,
// tiles and costs together. Then, for each range, a thread finds the start by a search in these
// sums.
#pragma once

#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/routing/find_expert.cuh"
#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

constexpr int kScheduleWarps = 16;
constexpr int kScheduleThreads = 32 * kScheduleWarps;
static_assert(2 * kScheduleThreads >= kMaxExperts, "a pair of experts for each thread");

// Returns the number of experts, rounded up to the entries that a search in padded tables may read.
__device__ __forceinline__ int PaddedExperts(int experts) {
  return (experts + kSearchReach - 1) / kSearchReach * kSearchReach;
}

// Divides numbers below 2^31 by a divisor that the host knows. A division instruction would take
// ten times as long.
struct Divisor {
  uint32_t factor;
  int32_t shift;

  NVFP4_HOST_DEVICE int32_t Divide(uint32_t number) const {
    return static_cast<int32_t>(static_cast<uint64_t>(number) * factor >> shift);
  }
};

inline Divisor MakeDivisor(int32_t divisor) {
  int32_t shift = 31;
  while ((int64_t{1} << (shift - 31)) < divisor) ++shift;
  return {static_cast<uint32_t>(CeilDiv(int64_t{1} << shift, divisor)), shift};
}

// The arguments of a kernel that cuts tiles and writes schedules.
struct ScheduleInputs {
  TileRule rule;
  TileSchedules schedules;
  Divisor by_tile_rows;
  Divisor by_blocks[2];  // the blocks of each schedule
};

inline ScheduleInputs MakeScheduleInputs(const TileRule& rule, const TileSchedules& schedules) {
  ScheduleInputs inputs = {rule, schedules, MakeDivisor(rule.tile_rows), {}};
  for (int i = 0; i < schedules.count; ++i)
    inputs.by_blocks[i] = MakeDivisor(schedules.schedule[i].blocks);
  return inputs;
}

// Totals of one expert, or of all experts before it. The costs of all output tiles of a GEMM must
// stay below 2^31. They do: a block of weight rows costs up to 2^18, and there are up to 2^12 such
// blocks.
struct alignas(16) ExpertTotals {
  int32_t rows;
  int32_t tiles;
  int32_t cost;  // of these tiles
};

__device__ __forceinline__ ExpertTotals operator+(const ExpertTotals& a, const ExpertTotals& b) {
  return {a.rows + b.rows, a.tiles + b.tiles, a.cost + b.cost};
}

__device__ __forceinline__ ExpertTotals operator-(const ExpertTotals& a, const ExpertTotals& b) {
  return {a.rows - b.rows, a.tiles - b.tiles, a.cost - b.cost};
}

// Returns the cost of one tile of an expert that has `rows` rows.
NVFP4_HOST_DEVICE int32_t TileCost(int32_t rows, const TileRule& rule) {
  return max(min(rows, rule.tile_rows), rule.min_cost);
}

__device__ __forceinline__ ExpertTotals TotalsOf(int32_t rows, const ScheduleInputs& inputs) {
  const int32_t tiles = inputs.by_tile_rows.Divide(rows + inputs.rule.tile_rows - 1);
  return {rows, tiles, tiles * TileCost(rows, inputs.rule)};
}

// Where the stream-K part of a schedule starts.
struct StreamKStart {
  int32_t first;  // output tile; those before it are data-parallel
  int32_t cost;   // of the output tiles before it
};

// Prefix sums over experts, in shared memory. FindExpert may read entries past the last expert;
// those hold the totals of all experts.
struct ScheduleTables {
  int32_t starts[kMaxExperts + 1];      // rows before an expert
  int32_t first_tile[kMaxExperts + 1];  // tiles before an expert
  int32_t first_cost[kMaxExperts + 1];  // cost of those tiles
  ExpertTotals all;
  StreamKStart stream_k[2];  // of each schedule
};

// Returns the first output tile of the stream-K part. The code has no branches, so that the
// instructions for the two GEMMs of a layer overlap.
NVFP4_HOST_DEVICE int32_t FindStreamKStart(const TileSchedule& schedule, const Divisor& by_blocks,
                                           int32_t output_tiles) {
  const int32_t idle = schedule.blocks - output_tiles;  // blocks that are idle if no tile is split
  const bool whole = (idle >= 0) & (idle * schedule.k_steps < kWorthSplitting * schedule.blocks);
  const int32_t full_rounds = max(by_blocks.Divide(output_tiles) - 1, 0) * schedule.blocks;
  return (output_tiles == 0) | whole ? output_tiles : full_rounds;
}

// Writes the entries of a thread's two experts. `at` has the totals before the first expert, before
// the second, and after both.
__device__ __forceinline__ void WriteScheduleTables(
    const ExpertTotals (&at)[3], const ExpertTotals& all, const int32_t (&own_rows)[2], int experts,
    const ExpertRows& rows, const ScheduleInputs& inputs, ScheduleTables* tables) {
  const int32_t tile_cost[2] = {TileCost(own_rows[0], inputs.rule),
                                TileCost(own_rows[1], inputs.rule)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int expert = 2 * static_cast<int>(threadIdx.x) + i;
    tables->starts[expert] = at[i].rows;
    tables->first_tile[expert] = at[i].tiles;
    tables->first_cost[expert] = at[i].cost;
    if (blockIdx.x == 0 && expert < experts) rows.starts[expert] = at[i].rows;
  }
  if (threadIdx.x == 0) {
    tables->all = all;
    tables->starts[PaddedExperts(experts)] = all.rows;
    if (blockIdx.x == 0) rows.starts[experts] = all.rows;
    if (blockIdx.x == 0) *rows.num_tiles = all.tiles;
  }
#pragma unroll
  for (int product = 0; product < 2; ++product) {
    const TileSchedule& schedule = inputs.schedules.schedule[product];  // zeros if there is none
    const int32_t output_tiles = all.tiles * schedule.m_blocks;
    const int32_t first = FindStreamKStart(schedule, inputs.by_blocks[product], output_tiles);
    if (first == output_tiles && threadIdx.x == 0) tables->stream_k[product] = {output_tiles, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the expert that `first` falls into knows the cost before it
      const int32_t inside = first - at[i].tiles * schedule.m_blocks;
      if (inside < 0 || first >= at[i + 1].tiles * schedule.m_blocks) continue;
      tables->stream_k[product] = {first, at[i].cost * schedule.m_blocks + inside * tile_cost[i]};
    }
  }
}

// Fills `tables`, and writes the starts and the number of tiles. Thread t gives the number of rows
// of experts 2 t and 2 t + 1, which is zero if there is no such expert. All threads of the block
// must call this function. It ends with a barrier.
__device__ __forceinline__ void FillScheduleTables(const int32_t (&own_rows)[2], int experts,
                                                   const ExpertRows& rows,
                                                   const ScheduleInputs& inputs,
                                                   ScheduleTables* tables) {
  __shared__ ExpertTotals warp_totals[kScheduleWarps];
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);  // uniform
  const int warps = PaddedExperts(experts) / 64;  // the other warps would only delay these
  ExpertTotals own[2], totals;
  if (warp < warps) {
    own[0] = TotalsOf(own_rows[0], inputs);
    own[1] = TotalsOf(own_rows[1], inputs);
    totals = own[0] + own[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const ExpertTotals other = {__shfl_up_sync(0xffffffffu, totals.rows, step),
                                  __shfl_up_sync(0xffffffffu, totals.tiles, step),
                                  __shfl_up_sync(0xffffffffu, totals.cost, step)};
      if (lane >= step) totals = totals + other;
    }
    if (lane == 31) warp_totals[warp] = totals;
  }
  __syncthreads();
  if (warp < warps) {
    ExpertTotals all = {}, of_warps = {};  // of the warps before this one
#pragma unroll 1
    for (int i = 0; i < warps; i += 4) {
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        all = all + warp_totals[j];
        if (j < warp) of_warps = all;
      }
    }
    totals = totals + of_warps;
    const ExpertTotals middle = totals - own[1];
    WriteScheduleTables({middle - own[0], middle, totals}, all, own_rows, experts, rows, inputs,
                        tables);
  }
  __syncthreads();
}
static_assert(kSearchReach % 256 == 0, "warps in fours");

// Returns the start of the stream-K range that has the cost `place` before it.
__device__ __forceinline__ WorkStart FindStart(const TileSchedule& schedule, const TileRule& rule,
                                               const ScheduleTables& tables, int experts,
                                               int32_t place) {
  const int expert = FindExpert<true>(tables.first_cost, experts, place, schedule.m_blocks);
  // Unsigned numbers, because a signed division takes half as long again.
  const uint32_t cost = TileCost(tables.starts[expert + 1] - tables.starts[expert], rule);
  const uint32_t inside = place - tables.first_cost[expert] * schedule.m_blocks;
  const uint32_t tile = inside / cost;
  return SnapStart(tables.first_tile[expert] * schedule.m_blocks + static_cast<int32_t>(tile),
                   inside - tile * cost, cost, schedule.k_steps);
}

// Writes the ranges of all blocks. All threads of one block must call this function; half of them
// write the ranges of each GEMM.
__device__ __forceinline__ void WriteSchedules(const ScheduleInputs& inputs,
                                               const ScheduleTables& tables, int experts) {
  const int product = threadIdx.x < kScheduleThreads / 2 ? 0 : 1;
  if (product >= inputs.schedules.count || inputs.schedules.schedule[0].taken) return;
  // Do not index by `product`: the compiler would copy the inputs to memory.
  const TileSchedule schedule =
      product == 0 ? inputs.schedules.schedule[0] : inputs.schedules.schedule[1];
  const Divisor by_blocks = product == 0 ? inputs.by_blocks[0] : inputs.by_blocks[1];
  const StreamKStart stream_k = tables.stream_k[product];
  const int32_t output_tiles = tables.all.tiles * schedule.m_blocks;
  const int32_t cost = tables.all.cost * schedule.m_blocks - stream_k.cost;
  const int32_t range_cost = by_blocks.Divide(cost);
  const int32_t rest = cost - range_cost * schedule.blocks;  // this many ranges cost one more
#pragma unroll 1
  for (int block = threadIdx.x % (kScheduleThreads / 2); block <= schedule.blocks;
       block += kScheduleThreads / 2) {
    const int32_t place = stream_k.cost + range_cost * block + min(block, rest);
    schedule.starts[block] = stream_k.first < output_tiles && block < schedule.blocks
                                 ? FindStart(schedule, inputs.rule, tables, experts, place)
                                 : WorkStart{output_tiles, 0};
  }
}

// If blocks take tiles one by one, fills the list of tiles with entries without rows. One load then
// tells a block what it has taken and whether that exists. All threads of one block must call
// this function.
__device__ __forceinline__ void EndTileList(const ScheduleInputs& inputs,
                                            const ScheduleTables& tables, const ExpertRows& rows) {
  if (!inputs.schedules.schedule[0].taken) return;
#pragma unroll 1
  for (int tile = tables.all.tiles + static_cast<int>(threadIdx.x); tile < rows.max_tiles;
       tile += kScheduleThreads) {
    rows.tiles[tile] = {};
  }
}

__device__ __forceinline__ void ZeroReadyFlags(const TileSchedules& schedules) {
#pragma unroll
  for (int product = 0; product < 2; ++product) {
    if (product >= schedules.count) break;
    uint4* flags = reinterpret_cast<uint4*>(schedules.schedule[product].ready);
    const int count = (schedules.schedule[product].ready_count() + 3) / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kScheduleThreads) flags[i] = uint4{};
  }
}
static_assert(kReadyFlags % 4 == 0, "flags are zeroed by fours");

}  // namespace nvfp4
