// What both kernels of latent attention share: their arguments, and which keys a block visits.
#pragma once

#include "cuda/attention/attention.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {

struct LatentGrid {
  AttentionCall call;
  AttentionBuffers buffers;
  Parts parts;
  float factor;      // of a score, in units of log2(e)
  int32_t group;     // query heads of a key head
  int32_t rows;      // rows of a key head
  int32_t tiles;     // tiles of rows
  int32_t splits;    // blocks that share the keys of a tile
  int32_t num_keys;  // s
};

// What the threads of a block tell each other about rows.
template <int kRows>
struct RowFacts {
  KeyRange range[kRows];  // the keys that a row sees
  KeyRange any;           // those that any row sees
  float factor[kRows];    // by which the output of a row is multiplied
};

// Where a tile of rows lies: row_in_batch of the batch, key head `head`, rows from `first_row` on.
struct LatentPlace {
  int row_in_batch, head, first_row;
};

// Returns the index of `row`, of those of the head, in the first three axes of [b, t, n, width].
__device__ __forceinline__ int64_t RowIndex(const LatentGrid& p, const LatentPlace& at, int row) {
  const AttentionShape& shape = p.call.shape;
  const int query = row / p.group, member = row - query * p.group;
  return (at.row_in_batch * shape.t + query) * shape.n + at.head * p.group + member;
}

// Finds the keys of each row. The first warp joins those of all rows.
template <int kRows>
__device__ __forceinline__ void FindKeys(const LatentGrid& p, const LatentPlace& at,
                                         RowFacts<kRows>* facts) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= 32) return;
  KeyRange any = {p.num_keys, 0};
  for (int index = thread; index < kRows; index += 32) {
    const int row = at.first_row + index;
    KeyRange range = {0, 0};
    if (row < p.rows) {
      const int64_t query = at.row_in_batch * p.call.shape.t + row / p.group;
      range = VisibleKeys(p.buffers.positions[query], p.num_keys, p.call.window, p.call.chunk);
    }
    facts->range[index] = range;
    if (range.begin < range.end) any = {min(any.begin, range.begin), max(any.end, range.end)};
  }
  any = {__reduce_min_sync(kAllLanes, any.begin), __reduce_max_sync(kAllLanes, any.end)};
  if (thread == 0) facts->any = any;
}

// The keys of one part: `count` tiles from key `first` on.
struct KeyTiles {
  int first, count;
};

__device__ __forceinline__ KeyTiles FindTiles(const LatentGrid& p, int split, const KeyRange& seen,
                                              int tile_keys) {
  const int tiles = max(seen.end - seen.begin + tile_keys - 1, 0) / tile_keys;
  const int each = max((tiles + p.splits - 1) / p.splits, kLatentSplitKeys / tile_keys);
  const int first = min(split * each, tiles);
  return {seen.begin + first * tile_keys, min(tiles - first, each)};
}

// LaunchLatentAttention, with or without the kernel for 9.0.
cudaError_t LaunchLatentKernels(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers, bool is_hopper);

// Latent attention on wgmma, for tiles of more than 32 rows on 9.0.
cudaError_t LaunchLatentSm90(cudaStream_t stream, const LatentGrid& grid);

}  // namespace nvfp4
