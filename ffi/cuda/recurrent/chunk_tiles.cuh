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

namespace nvfp4 {

// The recurrences. ops/recurrent/gated_delta.py and ops/recurrent/mamba2.py have their equations.
// kChannelDelta is the delta rule with a decay for each channel of a key, and kDelta that with one
// decay for each value head.
enum class Recurrence { kDelta, kChannelDelta, kMamba2 };

// The tokens of a large chunk, and of a small one. Large chunks have fewer steps, and small ones
// fit into the shared memory of every device.
constexpr int kLargeChunk = static_cast<int>(kRecurrenceChunk), kSmallChunk = 32;

// The most tokens of a chunk for which this device has shared memory. Kernels for more tokens have
// no code here.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int kMostChunkTokens = kSmallChunk;
#else
constexpr int kMostChunkTokens = kLargeChunk;
#endif

// Rows of keys and queries are padded with zeros to this many floats in shared memory.
constexpr int kChunkWidth = static_cast<int>(kMaxStateWidth);

// The sizes of a recurrence. The state of a head has `d` numbers for each of its `e` columns.
struct ChunkSizes {
  int64_t b, t;
  int32_t key_heads;  // groups of Mamba-2
  int32_t shared;     // heads of each
  int32_t d, e;       // widths of keys and values; at most kMaxStateWidth, and multiples of 4
};

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

// Whether a recurrence corrects what the state has stored.
__host__ __device__ constexpr bool Corrects(Recurrence recurrence) {
  return recurrence != Recurrence::kMamba2;
}

// Returns the numbers of `decays` for each token of a head. Channels have theirs once in each small
// chunk.
constexpr int64_t TokenDecays(Recurrence recurrence) {
  return recurrence == Recurrence::kChannelDelta ? 2 + kChunkWidth / kSmallChunk : 2;
}

// Returns the floats between the two kernels for each token of a key head. Rows are padded to whole
// large chunks.
constexpr int64_t ChunkFloats(Recurrence recurrence, int64_t shared) {
  const int64_t known = Corrects(recurrence) ? kChunkWidth : 0;
  return 2 * kChunkWidth + shared * (known + kLargeChunk + TokenDecays(recurrence));
}

constexpr int64_t ChunkTokens(const ChunkSizes& s) {
  return CeilDiv(s.t, kLargeChunk) * kLargeChunk * s.b * s.key_heads;
}

constexpr int64_t ChunkWorkspaceBytes(Recurrence recurrence, const ChunkSizes& s) {
  return ChunkTokens(s) * ChunkFloats(recurrence, s.shared) * static_cast<int64_t>(sizeof(float));
}

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
