// The chunks of a recurrence over a prompt, and the memory between its two kernels. This file uses
// neither XLA nor CUDA.
#pragma once

#include <cstdint>

#include "cuda/limits.h"
#include "nvfp4.h"
#include "shapes.h"

namespace nvfp4 {

// The recurrences. ops/recurrent/gated_delta.py and ops/recurrent/mamba2.py have their equations.
// kChannelDelta is the delta rule with a decay for each channel of a key, and kDelta that with one
// decay for each value head.
enum class Recurrence { kDelta, kChannelDelta, kMamba2 };

// The tokens of a large chunk, and of a small one. Large chunks have fewer steps, and small ones
// fit into the shared memory of every device. Workspaces have room for whole large chunks.
constexpr int kLargeChunk = 64, kSmallChunk = 32;

// Rows of keys and queries are padded with zeros to this many floats.
constexpr int kChunkWidth = static_cast<int>(kMaxStateWidth);

// The sizes of a recurrence. The state of a head has `d` numbers for each of its `e` columns.
struct ChunkSizes {
  int64_t b, t;
  int32_t key_heads;  // groups of Mamba-2
  int32_t shared;     // heads of each
  int32_t d, e;       // widths of keys and values; at most kMaxStateWidth, and multiples of 4
};

// Whether a recurrence corrects what the state has stored.
NVFP4_HOST_DEVICE constexpr bool Corrects(Recurrence recurrence) {
  return recurrence != Recurrence::kMamba2;
}

// Returns the numbers of `decays` for each token of a head. Channels have theirs once in each small
// chunk.
NVFP4_HOST_DEVICE constexpr int64_t TokenDecays(Recurrence recurrence) {
  return recurrence == Recurrence::kChannelDelta ? 2 + kChunkWidth / kSmallChunk : 2;
}

// Returns the floats between the two kernels for each token of a key head.
constexpr int64_t ChunkFloats(Recurrence recurrence, int64_t shared) {
  const int64_t known = Corrects(recurrence) ? kChunkWidth : 0;
  return 2 * kChunkWidth + shared * (known + kLargeChunk + TokenDecays(recurrence));
}

// Returns the chunks of all rows of the batch.
constexpr int64_t CountChunks(int64_t b, int64_t t) { return b * CeilDiv(t, kLargeChunk); }

constexpr int64_t ChunkTokens(const ChunkSizes& s) {
  return CountChunks(s.b, s.t) * kLargeChunk * s.key_heads;
}

// Returns the bytes of scratch memory for a chunk of a row.
constexpr int64_t ChunkBytes(Recurrence recurrence, int64_t key_heads, int64_t shared) {
  return kLargeChunk * key_heads * ChunkFloats(recurrence, shared) *
         static_cast<int64_t>(sizeof(float));
}

constexpr int64_t ChunkWorkspaceBytes(Recurrence recurrence, const ChunkSizes& s) {
  return CountChunks(s.b, s.t) * ChunkBytes(recurrence, s.key_heads, s.shared);
}

// Returns the bytes of scratch memory of LaunchMamba2Step for a row: gated results, float32.
constexpr int64_t Mamba2StepRowBytes(int64_t heads, int64_t p) {
  return heads * p * static_cast<int64_t>(sizeof(float));
}

}  // namespace nvfp4
