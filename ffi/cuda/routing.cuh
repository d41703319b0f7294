// Rows grouped by expert, in device memory: what the grouped product walks over.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

// Rows of a tile of the product; see expert_gemm.cuh.
constexpr int kTileRows = 64;

// `rows` consecutive sorted rows, all of one expert.
struct RowTile {
  int32_t expert;
  int32_t row;
  int32_t rows;
};

struct ExpertRows {
  int32_t* starts;     // [e + 1]: expert i owns sorted rows starts[i] to starts[i + 1]
  int32_t* slots;      // [rows]: slot of a sorted row; null where rows come sorted
  RowTile* tiles;      // [MaxTiles(rows, e)]
  int32_t* num_tiles;  // [1]
};

// Each expert that has rows ends in at most one tile that is not full.
constexpr int64_t MaxTiles(int64_t rows, int64_t experts) {
  return rows / kTileRows + (rows < experts ? rows : experts);
}

// Sorts the slots 0 to num_slots - 1 by expert_ids[slot], keeping their order within an expert.
// Slots whose id is not in [0, num_experts) are left out. At most 65535 slots.
cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows);

// The same tables for rows that are sorted already, from the number of rows of each expert.
cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t num_rows,
                             int64_t num_experts, const ExpertRows& rows);

}  // namespace nvfp4
