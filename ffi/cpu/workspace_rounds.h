// How much memory a call of the CPU kernels is given. They work in rounds: a round has as many rows
// (or tokens) as fit into the memory. This file does not use XLA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../facts.h"
#include "../shapes.h"
#include "kernels.h"

namespace nvfp4::cpu {

// A round has as many rows as fit into this many bytes, and at least one.
constexpr int64_t kRoundBytes = int64_t{256} << 20;

// Returns the most bytes that any instruction set needs for a prepared row of k values.
inline int64_t MostRowBytes(int64_t k, DataType type) {
  const int64_t bytes_per_value = type == DataType::kF32 ? 6 : 4;  // 3 or 2 pieces, or a float32
  return RoundUp(k, kRowPadding) * bytes_per_value + kCacheLine;
}

// Returns the memory for rows of `slots` slots that take `slot` bytes each. Kernels may read up to
// kGroup slots past the last one. An expert takes up to 32 bytes for its offset and its row blocks.
inline WorkspaceRows MakeRounds(int64_t slot, int64_t slots, int64_t experts) {
  constexpr int64_t kExpertBytes = 32, kAlignmentBytes = 2048;
  const int64_t most = kRoundBytes / (slot * std::max<int64_t>(slots, 1));
  return {kExpertBytes * experts + kAlignmentBytes + kGroup * slot, slots * slot,
          std::max<int64_t>(most, 1)};
}

// A slot of an expert layer takes its two prepared rows, one float32 row of the output of `down`,
// and 16 bytes for its place and scales.
inline WorkspaceRows MoEW4A16CpuRounds(int64_t top_k, int64_t e, int64_t h, int64_t i,
                                       DataType type) {
  const int64_t output = 4 * std::max(h, i);
  return MakeRounds(MostRowBytes(h, type) + MostRowBytes(i, type) + output + 16, top_k, e);
}

inline WorkspaceRows GroupedGemmW4A16CpuRounds(int64_t e, int64_t k, DataType type) {
  return MakeRounds(MostRowBytes(k, type) + 16, 1, e);
}

// Rows of n values of any type, which are float32 at most.
inline WorkspaceRows TransposedGemmCpuRounds(int64_t e, int64_t n) {
  return MakeRounds(MostRowBytes(n, DataType::kBF16) + 16, 1, e);
}

}  // namespace nvfp4::cpu
