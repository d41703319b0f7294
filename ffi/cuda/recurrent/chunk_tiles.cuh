// The chunks of a recurrence over a prompt, as its first kernel hands them to its second one.
//
// A recurrence has two kernels. The first one computes what the tokens of each chunk contribute,
// for all chunks at once (delta_prepare.cu, channel_delta_prepare.cu, mamba2_prepare.cu). The
// second one carries the state from chunk to chunk (chunk_scan.cuh).
//
// The gated delta rule has keys and queries. Those of Mamba-2 are B and C. A key head of the delta
// rule is a group of Mamba-2, which all its heads share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/chunk_sizes.h"

namespace nvfp4 {

// The most tokens of a chunk for which this device has shared memory. Kernels for more tokens have
// no code here.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int kMostChunkTokens = kSmallChunk;
#else
constexpr int kMostChunkTokens = kLargeChunk;
#endif

// What the first kernel hands to the second one, chunk by chunk, rounded to TensorFloat-32 except
// for the decays. Tokens and channels that do not exist are 0, and so are padding tokens in a chunk
// that has other tokens too. Chunks that are all padding are not written. The order of the elements
// is that in shared memory, so that a copy is one run of bytes.
//
// The first kernel of the delta rule also writes "wanted", T beta v, to the memory of the results.
// All first kernels write zeros to the results of padding. What is said in terms of dt is that of
// Mamba-2; the delta rule has no such factor. With a decay for each channel, queries are decayed
// from the chunk's start, keys to its end, and key_heads are the heads.
struct ChunkBuffers {
  float* queries;  // [b, key_heads, chunks, chunk, kChunkWidth] in the order of TokenPlace
  float* keys;     // likewise, in the order of KeyPlace
  float* known;  // [b, heads, chunks, chunk, kChunkWidth] in the order of TokenPlace: -T beta D k;
                 // null for Mamba-2
  float* pairs;  // [b, heads, chunks, chunk, chunk] in the order of PairPlace: q_i . D_ij k_j dt_j
                 // for i >= j
  // [b, heads, chunks, 2, chunk]: from the chunk's start to each token, and from each token to the
  // chunk's end, times dt of the token. With a decay for each channel, these are instead the
  // factors that scale queries and keys. The kChunkWidth decays over the whole chunk follow them.
  float* decays;
};

// The memory that the second kernel reads beside the chunks, and what it writes.
struct ScanBuffers {
  const float* values;     // [b, t, heads, e]: x of Mamba-2; "wanted" of the delta rule, in y
  const float* D;          // [heads]: factor of `values` in the results; null for the delta rule
  const int32_t* lengths;  // [b] or null, as in DeltaRuleBuffers
  float* state;            // [b, heads, d, e]; [b, heads, e, d] for Mamba-2; in place
  float* y;                // [b, t, heads, e]
};

inline ChunkBuffers DivideWorkspace(Recurrence recurrence, const ChunkSizes& s, void* workspace) {
  const int64_t tokens = ChunkTokens(s), each = tokens * s.shared;
  float* const queries = static_cast<float*>(workspace);
  float* const keys = queries + tokens * kChunkWidth;
  float* const pairs = keys + tokens * kChunkWidth;
  float* const decays = pairs + each * kLargeChunk;
  float* const known = Corrects(recurrence) ? decays + each * TokenDecays(recurrence) : nullptr;
  return {queries, keys, known, pairs, decays};
}

// Returns the number of tokens of a row that are no padding. A length out of range must not make a
// kernel read or write out of bounds.
__device__ __forceinline__ int64_t RowTokens(int64_t t, const int32_t* lengths, int row) {
  if (lengths == nullptr) return t;
  const int64_t length = lengths[row];
  return length < 0 ? 0 : length < t ? length : t;
}

// The state of the second kernel is transposed, in tiles of 8 columns. Returns the row of the state
// that is column n of a tile. Two neighboring columns of two neighboring tiles are 4 rows in turn.
__host__ __device__ constexpr int StateRow(int tile, int n) {
  return tile / 2 * 16 + n / 2 * 4 + tile % 2 * 2 + n % 2;
}

// The following functions return the place of 16 bytes in a tile in shared memory. The exclusive or
// moves the units of neighboring rows to other banks, so that the second kernel's reads have no
// bank conflicts.

// Unit `unit` of a token of known keys or queries, which has kChunkWidth floats.
__device__ __forceinline__ int TokenPlace(int token, int unit) {
  return token * (kChunkWidth / 4) + (unit ^ 4 * (token & 1));
}

// Keys of the two tokens 2 * pair and 2 * pair + 1 at StateRow(2 * two, n), and then of both at
// StateRow(2 * two + 1, n).
__device__ __forceinline__ int KeyPlace(int pair, int two, int n) {
  return pair * (kChunkWidth / 2) + (8 * two + (n ^ 2 * (pair & 3)));
}

// Unit `unit` of a token's pairs with the `chunk` tokens of its chunk.
__device__ __forceinline__ int PairPlace(int chunk, int token, int unit) {
  return token * (chunk / 4) + (unit ^ 2 * (token & 3));
}

// Launch the first kernels with large or small chunks.
cudaError_t LaunchDeltaPrepare(cudaStream_t stream, const DeltaRuleCall& call,
                               const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                               int chunk);
cudaError_t LaunchChannelDeltaPrepare(cudaStream_t stream, const DeltaRuleCall& call,
                                      const DeltaRuleBuffers& buffers, const ChunkBuffers& chunks,
                                      int chunk);
cudaError_t LaunchMamba2Prepare(cudaStream_t stream, const Mamba2ScanCall& call,
                                const Mamba2ScanBuffers& buffers, const ChunkBuffers& chunks,
                                int chunk);

}  // namespace nvfp4
