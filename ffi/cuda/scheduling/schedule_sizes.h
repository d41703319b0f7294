// The memory of the schedules of tile_scheduler.cuh. Its size is the same for every device. This
// file uses neither XLA nor CUDA.
#pragma once

#include <cstdint>

namespace nvfp4 {

// Where a stream-K range starts.
struct WorkStart {
  int32_t output_tile;
  int32_t step;  // over k, in this tile
};

constexpr int kReadyFlags = 8;  // flags of a block: one for each of its warpgroups
constexpr int32_t kMaxBlocks = 768;
constexpr int64_t kPartialSumBytes = int64_t{32} << 20;  // of all blocks

// The rows of the smallest tile of an engine, and of a tile of the plain kernels.
constexpr int64_t kMinTileRows = 8, kPlainTileRows = 64;

}  // namespace nvfp4
