// What all attention kernels share: which keys a query sees, and how few queries divide their keys.
//
// The query heads that share a key head are its group. The queries of all heads of a group are the
// rows of one matrix: row r is query r / g, head r % g of the group. A kernel computes a tile of
// such rows. A few new tokens therefore fill a tile together, and each key is read once for its
// whole group.
#pragma once

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/workspace.cuh"

namespace nvfp4 {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int32_t kPadding = 1 << 30;  // a query at this position or after it is padding

// The keys [begin, end).
struct KeyRange {
  int begin, end;
};

// Returns the keys that the query at `position` sees; none if it is padding.
__device__ __forceinline__ KeyRange VisibleKeys(int position, int s, int window, int chunk) {
  if (position < 0 || position >= kPadding) return {0, 0};
  int begin = 0;
  if (window > 0) begin = max(begin, position - window + 1);
  if (chunk > 0) begin = max(begin, position / chunk * chunk);
  return {begin, min(position + 1, s)};
}

// Few tiles of queries do not fill a device. Their keys are then divided: up to Splits(shape)
// blocks compute one tile, each for its own part of the visible keys. LaunchMerge joins the
// parts. The number of blocks depends on the shape alone, so that the results and the
// workspace do not depend on the device. The keys of a part depend on the positions.
constexpr int64_t kSplitBlocks = 264;  // two for each multiprocessor of an H100 or H200
constexpr int64_t kSplitRows = 64;     // rows of a tile, as this file counts them
constexpr int kSplitKeys = 256;        // a part has no fewer keys, except for the last one

// The widths of keys and values up to which a tile has narrow rows.
constexpr int64_t kNarrowKeys = 192, kNarrowValues = 128;

inline int64_t Splits(const AttentionShape& shape) {
  const int64_t rows = shape.t * shape.group();
  const int64_t tiles = std::max<int64_t>(shape.b * shape.m * CeilDiv(rows, kSplitRows), 1);
  // A block with few wide rows has a multiprocessor of its own.
  const bool alone = rows <= 16 && shape.dv > kNarrowValues;
  const int64_t blocks = alone ? kSplitBlocks / 2 : kSplitBlocks;
  return std::max<int64_t>(std::min(blocks / tiles, CeilDiv(shape.s, kSplitKeys)), 1);
}

// The same for latent attention, whose kernel keeps one or two blocks on a multiprocessor. Its
// tiles have 16 rows if there are no more, and otherwise 64 where they fit.
constexpr int kLatentSplitKeys = 64;

inline int64_t LatentSplits(const AttentionShape& shape) {
  const int64_t rows = shape.t * shape.group();
  const int64_t tiles = std::max<int64_t>(shape.b * shape.m * CeilDiv(rows, kSplitRows), 1);
  const int64_t blocks = rows <= 16 ? kSplitBlocks : kSplitBlocks / 2;
  return std::max<int64_t>(std::min(blocks / tiles, CeilDiv(shape.s, kLatentSplitKeys)), 1);
}

// The largest score of a row of one part, in units of log2(e), and the sum of its exponentials. A
// part without keys has the sum 0, and nothing else of it is defined.
struct PartSum {
  float largest, sum;
};

// The results of the parts, for all rows of [b, m, splits, t g]. Null if there is one part.
struct Parts {
  float* values;  // [..., dv]; sums of values, weighted by exponentials
  PartSum* sums;  // [...]
};

inline Parts TakeParts(Sections* sections, const AttentionShape& shape, int64_t splits) {
  if (splits == 1) return {nullptr, nullptr};
  const int64_t rows = shape.b * shape.t * shape.n * splits;
  Parts parts;
  parts.values = sections->Take<float>(rows * shape.dv);
  parts.sums = sections->Take<PartSum>(rows);
  return parts;
}

// Attention on mma.sync, for every device since 8.0. LaunchAttention calls it wherever no kernel of
// a single architecture is faster.
cudaError_t LaunchAttentionSm80(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers);

// The same for keys and values in E4M3. It is meant for up to 64 rows.
cudaError_t LaunchAttentionFp8(cudaStream_t stream, const AttentionCall& call,
                               const AttentionBuffers& buffers);

// Attention on wgmma, for 9.0. It has tiles of 128 rows and does not divide keys. FillsSm90 returns
// whether it is faster: whether queries fill its tiles, and tiles fill half of the device. A tile
// has the queries of 1, 2, 4, ... heads of a group. Keys and values that no query sees must be
// finite.
bool FillsSm90(const AttentionShape& shape);
cudaError_t LaunchAttentionSm90(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers);

}  // namespace nvfp4
