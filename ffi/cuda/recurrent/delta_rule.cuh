// What the two kernels of the gated delta rule for prompts share: chunks, tiles and copies.
//
// delta_prepare.cu computes what the tokens of each chunk contribute, for all chunks at once.
// delta_scan.cu carries the state from chunk to chunk. backends/delta_chunks.py has the equations.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/instructions/async_copy.cuh"
#include "cuda/launch.h"

namespace nvfp4 {

// Rows of keys and queries are padded with zeros to this many floats in shared memory.
constexpr int kRuleWidth = static_cast<int>(kMaxStateWidth);

// What the first kernel hands to the second one. A chunk here is one chunk of one value head. The
// first kernel also writes "wanted", T beta v, to the memory of the results.
struct ChunkBuffers {
  float* known;   // [b, heads, chunks, chunk, kRuleWidth]: T beta D k, rounded to TF32
  float* pairs;   // [b, heads, chunks, chunk, chunk]: q_i . D_ij k_j for i >= j, rounded to TF32
  float* decays;  // [b, heads, chunks, 2, chunk]: from the chunk's start to each token, and from
                  // each token to the chunk's end
};

// Returns the place of 16 bytes, unit `unit` of `row`, in a tile with rows of kRuleWidth floats.
// Neighboring rows have their units in other orders, so that the reads of both kernels have no bank
// conflicts.
__device__ __forceinline__ int TilePlace(int row, int unit) {
  return row * (kRuleWidth / 4) + (unit ^ (row & 7));
}

// Starts copies of `rows` rows of keys or queries to a tile, with zeros for tokens and channels
// that do not exist. `source` is the first token of the chunk.
__device__ __forceinline__ void CopyTile(uint32_t tile, const float* source, int64_t stride,
                                         int rows, int64_t present, int width, int thread,
                                         int threads) {
  for (int i = thread; i < rows * (kRuleWidth / 4); i += threads) {
    const int row = i / (kRuleWidth / 4), unit = i % (kRuleWidth / 4);
    const bool exists = row < present && 4 * unit < width;
    const float* place = exists ? source + row * stride + 4 * unit : source;
    CopyOrZero(tile + 16 * TilePlace(row, unit), place, exists ? 16 : 0);
  }
}

// Launch the two kernels with chunks of 64 tokens, or of 32.
cudaError_t LaunchDeltaPrepare(cudaStream_t stream, const DeltaRuleCall& call,
                               const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                               int chunk);
cudaError_t LaunchDeltaScan(cudaStream_t stream, const DeltaRuleCall& call,
                            const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks, int chunk);

// Bytes of dynamic shared memory of the second kernel, which needs more than the first one.
int64_t DeltaScanBytes(int chunk, int stages);

}  // namespace nvfp4
