// The sizes of a weight tile in the layout "mma_64x64" (weight_tile.cuh). This file uses neither
// XLA nor CUDA.
#pragma once

namespace nvfp4 {

constexpr int kTileM = 64;            // weight rows of a tile
constexpr int kTileK = 64;            // k of a tile
constexpr int kTileCodeBytes = 2048;  // 16 for each of 128 threads
constexpr int kTileScaleBytes = 256;  // 8 for each of 32 row pairs

// A slab is 16 weight rows. In each weight tile, it owns the part of one of four warps.
constexpr int kSlab = 16;
constexpr int kParts = kTileM / kSlab;
constexpr int kPartBytes = (kTileCodeBytes + kTileScaleBytes) / kParts;

}  // namespace nvfp4
