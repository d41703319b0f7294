// What the two kernels of the gated delta rule for prompts share: chunks, tiles and copies.
//
// delta_prepare.cu computes what the tokens of each chunk contribute, for all chunks at once.
// delta_scan.cu carries the state from chunk to chunk. backends/delta_chunks.py has the equations.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"

namespace nvfp4 {

// The most tokens of a chunk for which this device has shared memory. Kernels for more tokens have
// no code here.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int kMostChunkTokens = 32;
#else
constexpr int kMostChunkTokens = 64;
#endif

// Rows of keys and queries are padded with zeros to this many floats in shared memory.
constexpr int kRuleWidth = static_cast<int>(kMaxStateWidth);

// What the first kernel hands to the second one, chunk by chunk, rounded to TensorFloat-32 except
// for the decays. Tokens and channels that do not exist are 0, and so are padding tokens in a chunk
// that has other tokens too. Chunks that are all padding are not written. The first kernel also
// writes "wanted", T beta v, to the memory of the results, and zeros to that of padding. The order
// of the elements is that in shared memory, so that a copy is one run of bytes.
struct ChunkBuffers {
  float* queries;  // [b, key_heads, chunks, chunk, kRuleWidth] in the order of TokenPlace
  float* keys;     // likewise, in the order of KeyPlace
  float* known;    // [b, heads, chunks, chunk, kRuleWidth] in the order of TokenPlace: -T beta D k
  float* pairs;    // [b, heads, chunks, chunk, chunk] in the order of PairPlace: q_i . D_ij k_j for
                   // i >= j
  float* decays;   // [b, heads, chunks, 2, chunk]: from the chunk's start to each token, and from
                   // each token to the chunk's end
};

// Returns the number of tokens of a row that are no padding. A length out of range must not make a
// kernel read or write out of bounds.
__device__ __forceinline__ int64_t RowTokens(const DeltaRuleCall& c, const DeltaRuleBuffers& p,
                                             int row) {
  if (p.lengths == nullptr) return c.t;
  const int64_t length = p.lengths[row];
  return length < 0 ? 0 : length < c.t ? length : c.t;
}

// The state of the second kernel is transposed, in tiles of 8 columns. Returns the row of the state
// that is column n of a tile. Two neighboring columns of two neighboring tiles are 4 rows in turn.
__host__ __device__ constexpr int StateRow(int tile, int n) {
  return tile / 2 * 16 + n / 2 * 4 + tile % 2 * 2 + n % 2;
}

// The following functions return the place of 16 bytes in a tile in shared memory. The exclusive or
// moves the units of neighboring rows to other banks, so that the second kernel's reads have no
// bank conflicts.

// Unit `unit` of a token of known keys or queries, which has kRuleWidth floats.
__device__ __forceinline__ int TokenPlace(int token, int unit) {
  return token * (kRuleWidth / 4) + (unit ^ 4 * (token & 1));
}

// Keys of the two tokens 2 * pair and 2 * pair + 1 at StateRow(2 * two, n), and then of both at
// StateRow(2 * two + 1, n).
__device__ __forceinline__ int KeyPlace(int pair, int two, int n) {
  return pair * (kRuleWidth / 2) + (8 * two + (n ^ 2 * (pair & 3)));
}

// Unit `unit` of a token's pairs with the `chunk` tokens of its chunk.
__device__ __forceinline__ int PairPlace(int chunk, int token, int unit) {
  return token * (chunk / 4) + (unit ^ 2 * (token & 3));
}

// Launch the two kernels with chunks of 64 tokens, or of 32.
cudaError_t LaunchDeltaPrepare(cudaStream_t stream, const DeltaRuleCall& call,
                               const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                               int chunk);
cudaError_t LaunchDeltaScan(cudaStream_t stream, const DeltaRuleCall& call,
                            const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks, int chunk);

// Whether the current device can run chunks of 64 tokens. The second kernel decides, because it
// needs more shared memory than the first one.
bool HasLargeDeltaScan();

}  // namespace nvfp4
