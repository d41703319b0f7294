// Rows that come sorted by expert; see group_rows.cu.
#pragma once

#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

// The output rows of a GEMM. Rows that no expert owns become zeros.
struct OutputRows {
  void* values;
  int64_t row_bytes;  // even
};

// Writes the tables that LaunchSortByExpert writes, for rows that are already sorted. Also writes
// zeros to the rows of `y` that no expert owns.
//
// The call is about rows first_row to first_row + num_rows - 1 of the rows that `group_sizes`
// counts. `rows` and `y` count rows from first_row on. There must be at least one expert. Without
// `group_sizes`, there is one expert, which owns all rows.
cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t first_row,
                             int64_t num_rows, int64_t num_experts, const ExpertRows& rows,
                             const TileRule& rule, const TileSchedules& schedules,
                             const OutputRows& y);

}  // namespace nvfp4
