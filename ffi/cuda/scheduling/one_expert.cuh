// The schedule of a GEMM whose rows all belong to one expert, such as a linear layer. It has the
// ranges that write_schedule.cuh would write, but the host computes them, and no kernel runs.
#pragma once

#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/scheduling/write_schedule.cuh"

namespace nvfp4 {

inline EqualTiles ScheduleOneExpert(int32_t rows, const TileRule& rule,
                                    const TileSchedule& schedule) {
  const ExpertTiles tiles = CutRows(rows, rule.tile_rows);
  const int32_t output_tiles = tiles.count * schedule.m_blocks, cost = TileCost(rows, rule);
  const int32_t first = FindStreamKStart(schedule, MakeDivisor(schedule.blocks), output_tiles);
  const int32_t all = (output_tiles - first) * cost;
  return {output_tiles, first, static_cast<uint32_t>(cost), all / schedule.blocks,
          all % schedule.blocks};
}

// Gives all `rows` rows of `gemm` to one expert. If output tiles are split, the flags of the
// partial sums are zeroed, and if blocks take tiles, their number. That is not a kernel.
inline cudaError_t ScheduleOneExpert(cudaStream_t stream, int64_t rows, ExpertGemm* gemm) {
  TileSchedule* schedule = &gemm->schedule;
  gemm->rows.only_rows = static_cast<int32_t>(rows);
  schedule->equal = ScheduleOneExpert(gemm->rows.only_rows, gemm->rule, *schedule);
  const bool split = schedule->equal.first < schedule->equal.output_tiles;
  if (!split && !schedule->taken) return cudaSuccess;
  return LaunchZeros(stream, schedule->ready, int64_t{4} * schedule->ready_count());
}

}  // namespace nvfp4
