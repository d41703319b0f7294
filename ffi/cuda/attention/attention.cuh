// What all attention kernels share: which keys a query sees. splits.h says how few queries divide
// their keys.
//
// The query heads that share a key head are its group. The queries of all heads of a group are the
// rows of one matrix: row r is query r / g, head r % g of the group. A kernel computes a tile of
// such rows. A few new tokens therefore fill a tile together, and each key is read once for its
// whole group.
#pragma once

#include <algorithm>

#include "cuda/attention/splits.h"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/workspace.h"

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

// Attention on mma.sync, for every device since 8.0. LaunchAttention calls it wherever no kernel of
// a single architecture is faster.
cudaError_t LaunchAttentionSm80(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers);

// The same for keys and values in E4M3. It is meant for up to kMaxE4M3AttentionRows rows.
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
