// How attention divides the keys of few queries, and the memory for the parts. This file uses
// neither XLA nor CUDA.
//
// Few tiles of queries do not fill a device. Their keys are then divided: several blocks compute
// one tile, each for its own part of the visible keys, and LaunchMergeParts joins the parts. The
// number of blocks depends on the shape alone, so that the results and the workspace do not depend
// on the device. The keys of a part depend on the positions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/workspace.h"
#include "shapes.h"

namespace nvfp4 {

constexpr int64_t kSplitBlocks = 264;  // two for each multiprocessor of an H100 or H200
constexpr int64_t kSplitRows = 64;     // rows of a tile, as this file counts them
constexpr int kSplitKeys = 256;        // a part has no fewer keys, except for the last one
constexpr int kLatentSplitKeys = 64;   // of latent attention

// The widths of keys and values up to which a tile has narrow rows.
constexpr int64_t kNarrowKeys = 192, kNarrowValues = 128;

// Returns the parts of the keys of a tile, for `blocks` blocks and at least `keys` keys each.
inline int64_t SplitKeys(const AttentionShape& shape, int64_t blocks, int64_t keys) {
  const int64_t rows = shape.t * shape.group();
  const int64_t tiles = std::max<int64_t>(shape.b * shape.m * CeilDiv(rows, kSplitRows), 1);
  return std::max<int64_t>(std::min(blocks / tiles, CeilDiv(shape.s, keys)), 1);
}

inline int64_t Splits(const AttentionShape& shape) {
  // A block with few wide rows has a multiprocessor of its own.
  const bool alone = shape.t * shape.group() <= 16 && shape.dv > kNarrowValues;
  return SplitKeys(shape, alone ? kSplitBlocks / 2 : kSplitBlocks, kSplitKeys);
}

// The same for latent attention, whose kernel keeps one or two blocks on a multiprocessor. Its
// tiles have 16 rows if there are no more, and otherwise 64 where they fit.
inline int64_t LatentSplits(const AttentionShape& shape) {
  const bool few = shape.t * shape.group() <= 16;
  return SplitKeys(shape, few ? kSplitBlocks : kSplitBlocks / 2, kLatentSplitKeys);
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

inline int64_t PartsBytes(const AttentionShape& shape, int64_t splits) {
  Sections sections(nullptr);
  TakeParts(&sections, shape, splits);
  return sections.bytes();
}

inline int64_t AttentionWorkspaceBytes(const AttentionShape& shape) {
  return PartsBytes(shape, Splits(shape));
}

inline int64_t LatentAttentionWorkspaceBytes(const AttentionShape& shape) {
  return PartsBytes(shape, LatentSplits(shape));
}

}  // namespace nvfp4
