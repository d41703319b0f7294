// Sizes of the schedules of tile_scheduler.cuh. Those of memory are the same for every device. This
// file uses neither XLA nor CUDA.
#pragma once

#include <cstdint>

#include "cuda/gemm/tile_sizes.h"

namespace nvfp4 {

// Where a stream-K range starts.
struct WorkStart {
  int32_t output_tile;
  int32_t step;  // over k, in this tile
};

constexpr int kReadyFlags = 8;  // flags of a block: one for each of its warpgroups
constexpr int32_t kMaxBlocks = 768;
constexpr int64_t kPartialSumBytes = int64_t{32} << 20;  // of all blocks

// Tiles are split only if that saves each block this many steps, because a fix-up takes as long.
// Output tiles with up to kUnsplitInputs of k have no more steps, and no blocks share them.
constexpr int kWorthSplitting = 8;
constexpr int64_t kUnsplitInputs = kWorthSplitting * kTileK;

// The rows of the smallest tile of an engine, and of a tile of the plain kernels.
constexpr int64_t kMinTileRows = 8, kPlainTileRows = 64;

}  // namespace nvfp4
