// Which kernels run an expert layer or a grouped GEMM on the targets for W4A16: the choices that
// sizes decide. Launches ask here, and so do notes of `explain` (launch_facts.cc). Within a form,
// an engine chooses the tile by the number of rows of an expert (expert_gemm_sm*.cu). This file
// uses neither XLA nor CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gemm/tile_sizes.h"
#include "cuda/limits.h"
#include "nvfp4.h"
#include "shapes.h"

namespace nvfp4 {

// Returns the tiles of k that rows of `k` elements have.
NVFP4_HOST_DEVICE constexpr int32_t KTiles(int32_t k) { return (k + kTileK - 1) / kTileK; }

// Returns the bytes from one row of `k` elements of 16 bits in shared memory to the next. 16 bytes
// between rows avoid bank conflicts.
NVFP4_HOST_DEVICE constexpr int32_t RowStride(int32_t k) { return KTiles(k) * kTileK * 2 + 16; }

// Whether a call runs on the engine of its target. Others run on the plain kernels.
inline bool RunsOnEngine(DataType type, int64_t largest_extent) {
  return type != DataType::kF32 && largest_extent <= kMaxEngineExtent;
}
inline bool RunsOnEngine(const MoEShape& shape, DataType type) {
  return RunsOnEngine(type, std::max(shape.h, shape.i));
}
inline bool RunsOnEngine(const GroupedGemmShape& shape, DataType type) {
  return RunsOnEngine(type, std::max({shape.n, shape.k, shape.parts}));
}

// Expert layers with few slots, which two kernels run without a sort: expert_gemm_few.cu (GEMM 1)
// and combined_gemm_few.cu (GEMM 2).

constexpr int kFewSlots = 32;  // one for each lane of a warp
// With more weights, a sort and an engine are faster. On an H200, a layer with 38 million weights
// (one token of Qwen3-30B-A3B) took 17 us without a sort and 26 us with an engine. With 75 million
// weights it was 32 us and 30 us. Both were measured when GEMM 2 and combine were two kernels.
constexpr int64_t kMaxFewWeights = int64_t{64} << 20;

constexpr int kFewColumns = 8;  // most slots of a tile: the columns of one MMA
// Of a block of each kernel: its warps, the parts of a warp in flight, and what it has besides
// rows, parts and sums.
constexpr int kFewWarps = 4, kFewDepth = 8, kFewStaticBytes = 2 << 10;
constexpr int kCombinedWarps = 16, kCombinedDepth = 6, kCombinedStaticBytes = 1 << 10;
// A column of sums of GEMM 2 has 16 weight rows. The distance of columns leaves few bank conflicts.
constexpr int kCombinedColumnFloats = kSlab + 2;

// Return the bytes of dynamic shared memory of a block. GEMM 1 keeps up to kFewColumns rows, each
// for `slots_per_row` slots; GEMM 2 keeps all rows.
constexpr int64_t FewDynamicBytes(int64_t slots, int64_t slots_per_row, int64_t k) {
  return kFewWarps * kFewDepth * kPartBytes +
         std::min<int64_t>(CeilDiv(slots, slots_per_row), kFewColumns) *
             RowStride(static_cast<int32_t>(k));
}
constexpr int64_t CombinedDynamicBytes(int64_t slots, int64_t k) {
  return kCombinedWarps * kCombinedDepth * kPartBytes + slots * RowStride(static_cast<int32_t>(k)) +
         (slots + kFewColumns * (kCombinedWarps - 1)) * kCombinedColumnFloats * 4;
}

// Returns the bytes of shared memory of a block of the more demanding of both kernels.
constexpr int64_t FewSlotsSharedBytes(const MoEShape& shape, int64_t slots) {
  return std::max(FewDynamicBytes(slots, shape.top_k, shape.h) + kFewStaticBytes,
                  CombinedDynamicBytes(slots, shape.i) + kCombinedStaticBytes);
}

enum class LayerForm { kPlain, kFewSlots, kSorted };

// Chooses for a chunk of `slots` slots, on a device that gives a block `shared_bytes`.
inline LayerForm ChooseLayerForm(const MoEShape& shape, DataType type, ActivationScale scale,
                                 bool weight_on_input, int64_t slots, int64_t shared_bytes) {
  if (!RunsOnEngine(shape, type)) return LayerForm::kPlain;
  const bool few = !weight_on_input && scale != ActivationScale::kToken && slots <= kFewSlots &&
                   slots * shape.h * (shape.n1 + shape.i) <= kMaxFewWeights &&
                   FewSlotsSharedBytes(shape, slots) <= shared_bytes;
  return few ? LayerForm::kFewSlots : LayerForm::kSorted;
}

// Returns up to how many tokens of `shape` run without a sort; shape.t is not read.
inline int64_t MostUnsortedTokens(const MoEShape& shape, DataType type, ActivationScale scale,
                                  int64_t shared_bytes) {
  const auto fits = [&](int64_t tokens) {
    return ChooseLayerForm(shape, type, scale, /*weight_on_input=*/false, tokens * shape.top_k,
                           shared_bytes) == LayerForm::kFewSlots;
  };
  int64_t tokens = 0;
  while (tokens < kFewSlots && fits(tokens + 1)) ++tokens;
  return tokens;
}

// Linear layers in W4A16 with few rows, which one kernel runs without a workspace.

// The most rows, and the most without clusters.
constexpr int64_t kLinearFewRows = 64, kLinearNarrowRows = 8;

// What of a device decides.
struct LinearDevice {
  int64_t multiprocessors;
  int64_t shared_bytes;  // of a block
  bool clusters;         // whether blocks can form clusters
  bool is_sm90;          // whether it has wgmma
};

// Returns up to how many rows one kernel runs a layer. Without clusters, a block of linear_few.cu
// keeps all rows in shared memory.
inline int64_t MostLinearRows(int64_t k, const LinearDevice& device) {
  if (device.clusters) return kLinearFewRows;
  return std::min(device.shared_bytes / RowStride(static_cast<int32_t>(k)), kLinearNarrowRows);
}

// The kernel for one row: warps of a block, and parts of a warp in flight.
constexpr int kLinearRowWarps = 12, kLinearRowDepth = 8;
constexpr int64_t kLinearRowStaticBytes = 8 << 10;  // and what the driver reserves

// Returns the bytes of dynamic shared memory of a block of linear_row.cu.
constexpr int64_t LinearRowDynamicBytes(int64_t k) {
  return int64_t{kLinearRowWarps} * kLinearRowDepth * kPartBytes + CeilDiv(k, kTileK) * kTileK * 2;
}

// linear_row.cu, linear_few.cu or linear_sm90.cu, or none: a GEMM of tiles.
enum class LinearForm { kNone, kRow, kFew, kSm90 };

// On an H200, layers took so many microseconds (benchmarks/linear_forms.py):
//
//                        linear_few.cu   linear_row.cu   linear_sm90.cu
//   4096 x 4096, 1 row        4.3             5.9              6.2
//   4096 x 4096, 4 rows       5.7                              6.2
//   4096 x 14336, 1 row      11.9            17.5             14.1
//   4096 x 14336, 4 rows     17.5                             14.1
//
// But the blocks of linear_few.cu find little room behind an expert layer, and only linear_row.cu
// also computes a norm. It is faster for small layers: a step of Qwen3-30B-A3B took 1511 us with
// it, and 1575 us with linear_few.cu for all layers without a norm.
inline LinearForm ChooseLinearForm(int64_t rows, int64_t n, int64_t k, const LinearDevice& device) {
  if (rows > MostLinearRows(k, device)) return LinearForm::kNone;
  const int64_t slabs = CeilDiv(n, kSlab);
  const bool row_fits = rows == 1 && slabs <= 4 * device.multiprocessors &&
                        LinearRowDynamicBytes(k) <= device.shared_bytes - kLinearRowStaticBytes;
  if (!device.is_sm90) return row_fits ? LinearForm::kRow : LinearForm::kFew;
  // All kernels but that of wgmma read x for each slab: so many bytes.
  const int64_t bytes = slabs * rows * k * 2;
  constexpr int64_t kRowBytes = 2 << 20, kFewBytes = 8 << 20, kFewRows = 4;
  if (row_fits && bytes < kRowBytes) return LinearForm::kRow;
  const bool few = rows == 1 || (rows <= kFewRows && bytes <= kFewBytes);
  return few ? LinearForm::kFew : LinearForm::kSm90;
}

// The GEMM of sorted rows on 9.0. kWgmma is in expert_gemm_sm90.cu. The others use mma.sync: kMma
// is in expert_gemm_sm80.cu, and kFewRows, for experts with few rows, in
// expert_gemm_few_rows_sm90.cu.
enum class Sm90Form { kWgmma, kMma, kFewRows };

// If many experts have few rows each, most of the time goes to unpacking weights, and mma.sync lets
// more warps unpack at once. On an H200, a layer of DeepSeek-V3 with 64 tokens took 1552 us with
// wgmma and 1475 us with mma.sync. At a mean of 8 rows, or with few experts, wgmma is as fast or
// faster.
//
// With up to five rows on average, expert_gemm_few_rows_sm90.cu is faster than expert_gemm_sm80.cu.
// On an H200, a layer of Qwen3-30B-A3B with 4, 16, 32, 64 and 80 tokens took 34, 70, 86, 99 and 104
// us, instead of 36, 72, 94, 104 and 107. With 96 tokens both took 109.
//
// With less than one row for twelve experts, whole output tiles keep too few blocks busy, and
// expert_gemm_sm80.cu also divides k among blocks. A layer of DeepSeek-V3 (256 experts, eight for a
// token) with 1 and 2 tokens took 67 and 113 us with it, instead of 74 and 132. With 3 tokens it
// took 159 instead of 156, and one of Nemotron-3-Nano (128 experts, six) with 2 tokens 36 instead
// of 34.
inline Sm90Form ChooseSm90Form(int64_t rows, int64_t experts) {
  constexpr int64_t kMmaMeanRows = 7, kMmaExperts = 32, kFewMeanRows = 5, kFewExpertsPerRow = 12;
  if (experts < kMmaExperts || rows > kMmaMeanRows * experts) return Sm90Form::kWgmma;
  const bool few = rows <= kFewMeanRows * experts && kFewExpertsPerRow * rows >= experts;
  return few ? Sm90Form::kFewRows : Sm90Form::kMma;
}

}  // namespace nvfp4
