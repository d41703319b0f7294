// The memory that the launches of an expert layer or of a grouped GEMM share: which arrays, and in
// which order. Launches divide the memory, handlers check its size, and Python asks for the size
// before a call (launch_facts.cc): all by the same functions. With a null buffer, they only count
// bytes. This file uses neither XLA nor CUDA.
//
// A call works in chunks, which bound the memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/fp4_groups.h"
#include "cuda/layers/forms.h"
#include "cuda/limits.h"
#include "cuda/scheduling/schedule_sizes.h"
#include "cuda/workspace.h"
#include "shapes.h"

namespace nvfp4 {

// The slots of a chunk of an expert layer. There are as many as sort_by_expert.cu can sort. The
// plain kernels, which have 4 h bytes for each, take half as many.
constexpr int64_t kChunkSlots = 65536, kPlainChunkSlots = 32768;
static_assert(kMaxTopK <= kPlainChunkSlots, "a chunk holds at least one token");

// Returns the tokens of a chunk of up to `slots` slots.
inline int64_t ChunkTokens(const MoEShape& shape, int64_t slots = kChunkSlots) {
  return std::min(shape.t, slots / std::max<int64_t>(shape.top_k, 1));
}

// Returns the rows of a chunk of a grouped GEMM on an engine. The tile scheduler counts the cost of
// up to 2^18 rows, and the engines find a row by a 32-bit number of 16-byte units.
inline int64_t EngineChunkRows(const GroupedGemmShape& shape) {
  constexpr int64_t kMaxRowsAtOnce = 1 << 18, kUnits = (int64_t{1} << 32) - 1;
  return std::min({shape.m, kMaxRowsAtOnce, kUnits / (shape.k / 8)});
}

// Tables of up to two GEMMs that have the same rows.
struct ProductTables {
  ExpertRows rows;
  WorkStart* starts[2];
  int32_t* ready[2];
  float* partial_sums;
};

// Takes tables for `products` GEMMs of `max_rows` rows. `sorted` rows need no list of their slots.
inline ProductTables TakeProductTables(Sections* sections, int64_t max_rows, int64_t experts,
                                       bool sorted, int products) {
  ProductTables tables = {};
  tables.rows = TakeExpertRows(sections, max_rows, experts, kMinTileRows, sorted);
  for (int product = 0; product < products; ++product) {
    tables.starts[product] = sections->Take<WorkStart>(kMaxBlocks + 1);
    tables.ready[product] = sections->Take<int32_t>(kReadyFlags * kMaxBlocks);
  }
  tables.partial_sums = sections->Take<float>(kPartialSumBytes / 4);
  return tables;
}

// An expert layer on the plain kernels.
struct MoEWorkspace {
  ExpertRows rows;
  uint8_t* activated;       // [slots, i] of x's type, in sorted order
  float* down;              // [slots, h]
  QuantizedRows quantized;  // unused in W4A16; an eighth of the other arrays
  int64_t bytes;
};

inline MoEWorkspace TakeMoE(void* buffer, const MoEShape& shape, DataType type) {
  Sections sections(buffer);
  const int64_t slots = ChunkTokens(shape, kPlainChunkSlots) * shape.top_k;
  MoEWorkspace workspace;
  workspace.rows = TakeExpertRows(&sections, slots, shape.e, kPlainTileRows, /*sorted=*/false);
  workspace.activated = sections.Take<uint8_t>(slots * shape.i * Bytes(type));
  workspace.down = sections.Take<float>(slots * shape.h);
  workspace.quantized = TakeQuantizedRows(&sections, slots, std::max(shape.h, shape.i));
  workspace.bytes = sections.bytes();
  return workspace;
}

// An expert layer in bf16 or f16 on the engine for sm_80 or sm_90.
struct MoEW4A16Workspace {
  ProductTables tables;
  uint8_t* activated;  // [slots, i], sorted
  uint8_t* down;       // [slots, h]; until GEMM 2 runs, the scaled or rounded inputs
  float* row_scale;    // [slots]; scales of rounded rows, with token scales
  int64_t bytes;
};

inline MoEW4A16Workspace TakeMoEW4A16(void* buffer, const MoEShape& shape) {
  Sections sections(buffer);
  const int64_t slots = ChunkTokens(shape) * shape.top_k;
  MoEW4A16Workspace workspace;
  workspace.tables = TakeProductTables(&sections, slots, shape.e, /*sorted=*/false, 2);
  workspace.activated = sections.Take<uint8_t>(2 * slots * shape.i);
  workspace.down = sections.Take<uint8_t>(2 * slots * shape.h);
  workspace.row_scale = sections.Take<float>(slots);
  workspace.bytes = sections.bytes();
  return workspace;
}

// An expert layer on FP4 tensor cores of 12.x.
struct MoEW4A4Workspace {
  ProductTables tables;
  QuantizedRows inputs;     // [slots, h]
  QuantizedRows activated;  // [slots, i]
  uint8_t* down;            // [slots, h]; until GEMM 2 runs, a [slots, i] if it has 16 bits
  int64_t bytes;
};

inline MoEW4A4Workspace TakeMoEW4A4(void* buffer, const MoEShape& shape) {
  Sections sections(buffer);
  const int64_t slots = ChunkTokens(shape) * shape.top_k;
  MoEW4A4Workspace workspace;
  workspace.tables = TakeProductTables(&sections, slots, shape.e, /*sorted=*/false, 2);
  workspace.inputs = TakeQuantizedRows(&sections, slots, PadK(shape.h));
  workspace.activated = TakeQuantizedRows(&sections, slots, PadK(shape.i));
  workspace.down = sections.Take<uint8_t>(2 * slots * std::max(shape.h, shape.i));
  workspace.bytes = sections.bytes();
  return workspace;
}

// Rows of a tile for the sort before a GEMM of CUTLASS, which reads no tiles.
constexpr int64_t kUnreadTileRows = 64;

// An expert layer on FP4 tensor cores of 10.x.
struct MoEW4A4Sm100Workspace {
  ExpertRows rows;
  int32_t* places;       // [slots]: the sorted row of a slot
  Fp4Groups groups[2];   // of each GEMM
  float* row_scale[2];   // [slots]: scales of the rows of each GEMM
  uint8_t* codes;        // rows of GEMM 1, then of GEMM 2
  uint8_t* block_scale;  // rows of GEMM 1, then of GEMM 2
  void* sums;            // bf16 [slots, n1], then [slots, h]
  void* collective;
  int64_t bytes;
};

inline MoEW4A4Sm100Workspace TakeMoEW4A4Sm100(void* buffer, const MoEShape& shape) {
  Sections sections(buffer);
  const int64_t slots = ChunkTokens(shape) * shape.top_k;
  const int64_t k = PadTo(std::max(shape.h, shape.i), kScaleTileK);
  MoEW4A4Sm100Workspace workspace;
  workspace.rows = TakeExpertRows(&sections, slots, shape.e, kUnreadTileRows, /*sorted=*/false);
  workspace.places = sections.Take<int32_t>(slots);
  for (int product = 0; product < 2; ++product) {
    workspace.groups[product] = TakeFp4Groups(&sections, shape.e);
    workspace.row_scale[product] = sections.Take<float>(slots);
  }
  workspace.codes = sections.Take<uint8_t>(slots * (k / 2));
  workspace.block_scale =
      sections.Take<uint8_t>(MaxScaleTiles(slots, shape.e) * (k / kScaleTileK) * kScaleTileBytes);
  workspace.sums = sections.Take<uint16_t>(slots * std::max(shape.n1, shape.h));
  workspace.collective = sections.Take<uint8_t>(kCollectiveBytes);
  workspace.bytes = sections.bytes();
  return workspace;
}

// A grouped GEMM on the plain kernels.
struct GroupedGemmWorkspace {
  ExpertRows rows;
  QuantizedRows quantized;
  int64_t bytes;
};

inline GroupedGemmWorkspace TakeGroupedGemm(void* buffer, const GroupedGemmShape& shape) {
  Sections sections(buffer);
  GroupedGemmWorkspace workspace;
  workspace.rows = TakeExpertRows(&sections, shape.m, shape.e, kPlainTileRows, /*sorted=*/true);
  workspace.quantized = TakeQuantizedRows(&sections, shape.m, shape.k);
  workspace.bytes = sections.bytes();
  return workspace;
}

// A grouped GEMM in bf16 or f16 on the engine for sm_80 or sm_90.
struct GroupedGemmW4A16Workspace {
  ProductTables tables;
  uint8_t* rounded;  // [rows of a chunk, k]; unused in W4A16
  float* row_scale;  // [rows of a chunk]
  int64_t bytes;
};

// `rounds`: whether the call may round its inputs.
inline GroupedGemmW4A16Workspace TakeGroupedGemmW4A16(void* buffer, const GroupedGemmShape& shape,
                                                      bool rounds = true) {
  Sections sections(buffer);
  GroupedGemmW4A16Workspace workspace;
  const int64_t chunk = EngineChunkRows(shape), rows = rounds ? chunk : 0;
  workspace.tables = TakeProductTables(&sections, chunk, shape.e, /*sorted=*/true, 1);
  workspace.rounded = sections.Take<uint8_t>(2 * rows * shape.k);
  workspace.row_scale = sections.Take<float>(rows);
  workspace.bytes = sections.bytes();
  return workspace;
}

// A grouped GEMM on FP4 tensor cores of 12.x.
struct GroupedGemmW4A4Workspace {
  ProductTables tables;
  QuantizedRows inputs;  // [rows of a chunk, k]
  int64_t bytes;
};

inline GroupedGemmW4A4Workspace TakeGroupedGemmW4A4(void* buffer, const GroupedGemmShape& shape) {
  Sections sections(buffer);
  GroupedGemmW4A4Workspace workspace;
  const int64_t rows = EngineChunkRows(shape);
  workspace.tables = TakeProductTables(&sections, rows, shape.e, /*sorted=*/true, 1);
  workspace.inputs = TakeQuantizedRows(&sections, rows, PadK(shape.k));
  workspace.bytes = sections.bytes();
  return workspace;
}

// A grouped GEMM on FP4 tensor cores of 10.x.
struct GroupedGemmW4A4Sm100Workspace {
  ExpertRows rows;
  Fp4Groups groups;
  uint8_t* codes;
  uint8_t* block_scale;
  float* row_scale;  // [m]
  void* sums;        // bf16 [m, n rounded up to kOutputMultiple]; unused if the GEMM writes y
  void* collective;
  int64_t bytes;
};

constexpr int64_t kOutputMultiple = 8;  // 16 bytes of bf16

inline GroupedGemmW4A4Sm100Workspace TakeGroupedGemmW4A4Sm100(void* buffer,
                                                              const GroupedGemmShape& shape) {
  Sections sections(buffer);
  const int64_t k = PadTo(shape.k, kScaleTileK);
  GroupedGemmW4A4Sm100Workspace workspace;
  workspace.rows = TakeExpertRows(&sections, shape.m, shape.e, kUnreadTileRows, /*sorted=*/true);
  workspace.groups = TakeFp4Groups(&sections, shape.e);
  workspace.codes = sections.Take<uint8_t>(shape.m * (k / 2));
  workspace.block_scale =
      sections.Take<uint8_t>(MaxScaleTiles(shape.m, shape.e) * (k / kScaleTileK) * kScaleTileBytes);
  workspace.row_scale = sections.Take<float>(shape.m);
  workspace.sums = sections.Take<uint16_t>(shape.m * PadTo(shape.n, kOutputMultiple));
  workspace.collective = sections.Take<uint8_t>(kCollectiveBytes);
  workspace.bytes = sections.bytes();
  return workspace;
}

// Return the bytes that the handler of a target expects. The targets for W4A16 also run the calls
// that their engine does not support, on the plain kernels.
inline int64_t MoEW4A16WorkspaceBytes(const MoEShape& shape, DataType type) {
  return RunsOnEngine(shape, type) ? TakeMoEW4A16(nullptr, shape).bytes
                                   : TakeMoE(nullptr, shape, type).bytes;
}
inline int64_t MoEW4A4WorkspaceBytes(const MoEShape& shape) {
  return TakeMoEW4A4(nullptr, shape).bytes;
}
inline int64_t MoEW4A4Sm100WorkspaceBytes(const MoEShape& shape) {
  return TakeMoEW4A4Sm100(nullptr, shape).bytes;
}
inline int64_t GroupedGemmW4A16WorkspaceBytes(const GroupedGemmShape& shape, DataType type) {
  return RunsOnEngine(shape, type) ? TakeGroupedGemmW4A16(nullptr, shape).bytes
                                   : TakeGroupedGemm(nullptr, shape).bytes;
}
// Transposed weights take inputs as they are.
inline int64_t TransposedGemmWorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeGroupedGemmW4A16(nullptr, shape, /*rounds=*/false).bytes;
}
inline int64_t GroupedGemmW4A4WorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeGroupedGemmW4A4(nullptr, shape).bytes;
}
inline int64_t GroupedGemmW4A4Sm100WorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeGroupedGemmW4A4Sm100(nullptr, shape).bytes;
}

}  // namespace nvfp4
