// From float32 sums in fragments to outputs in memory: scales, biases, activation, rounding.
//
// Sums are those of one 64-row weight tile, warp w of four: lane 4 g + q holds, for each eight
// sorted rows 8 j to 8 j + 7, sums[4 j + {0, 1}] of its low weight row for sorted rows 2 q and
// 2 q + 1, and sums[4 j + {2, 3}] of its high weight row (see weight_tile.cuh). In a gated layer
// low is a gate row and high its up row, so that the activation stays in registers; where gate
// and up alternate in the checkpoint (swigluoai) the pair is in the neighbouring lane.
// movmatrix turns eight weight rows by eight sorted rows around, so that lane 4 g + q stores
// columns 2 q and 2 q + 1 of sorted row g.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "activations.cuh"
#include "elements.cuh"
#include "expert_gemm.cuh"

namespace nvfp4 {

// Element pairs of an 8x8 matrix of 16-bit elements, row g columns 2q and 2q + 1 -> transposed.
__device__ __forceinline__ uint32_t Transpose(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

template <typename T>
__device__ __forceinline__ uint32_t MakePair(float first, float second);
template <>
__device__ __forceinline__ uint32_t MakePair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t MakePair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t MakePair(DataType type, float first, float second) {
  return type == DataType::kBF16 ? MakePair<__nv_bfloat16>(first, second)
                                 : MakePair<__half>(first, second);
}

// What a lane knows of its two weight rows, low and high.
struct LaneRows {
  float scale[2];
  float bias[2];
};

// First weight row of a warp; of a gated layer the first pair of gate and up.
__device__ __forceinline__ int FirstRow(const ExpertGemm& p, int m_tile, int warp) {
  return p.gated() ? m_tile * (kTileM / 2) + warp * 8 : m_tile * kTileM + warp * 16;
}

__device__ __forceinline__ LaneRows LoadLaneRows(const ExpertGemm& p, int expert, int first,
                                                 float unit) {
  const int low = first + static_cast<int>(threadIdx.x) % 32 / 4;
  const int all_rows = p.gated() ? 2 * p.columns : p.columns;
  const bool alternate = p.gated() && p.activation.interleaved;
  LaneRows rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = i == 0 ? low : p.gated() ? low + p.columns : low + 8;
    rows.scale[i] = rows.bias[i] = 0.0f;
    if (row >= all_rows) continue;  // padding
    const int part = alternate ? row & 1 : static_cast<int>(2 * row >= all_rows);
    rows.scale[i] =
        unit *
        p.weight.global_scale[static_cast<int64_t>(expert) * p.parts + (p.parts == 1 ? 0 : part)];
    if (p.weight.bias != nullptr) {
      rows.bias[i] = p.weight.bias[static_cast<int64_t>(expert) * p.bias_rows + row];
    }
  }
  return rows;
}

__device__ __forceinline__ uint16_t* OutputRow(const ExpertGemm& p, int sorted_row) {
  const int64_t row = p.output.slots != nullptr ? p.output.slots[sorted_row] : sorted_row;
  return static_cast<uint16_t*>(p.output.values) + row * p.columns;
}

// Columns `column` and `column` + 1 of a row of `columns`; `column` is even, rows of odd length are
// aligned to two bytes only.
__device__ __forceinline__ void StorePair(uint16_t* row, int column, int columns, uint32_t pair) {
  if (columns % 2 == 0) {
    if (column < columns) *reinterpret_cast<uint32_t*>(row + column) = pair;
    return;
  }
  if (column < columns) row[column] = static_cast<uint16_t>(pair);
  if (column + 1 < columns) row[column + 1] = static_cast<uint16_t>(pair >> 16);
}

// Stores the tile's outputs for the sorted rows of `tile`. All lanes of the warp take part.
template <int kColumns, int kSize>
__device__ __forceinline__ void StoreTile(const ExpertGemm& p, const RowTile& tile, int m_tile,
                                          int warp, float unit, const float (&sums)[kSize]) {
  static_assert(kSize >= kColumns / 2, "sums of kColumns sorted rows");
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, q = lane % 4;
  const int first = FirstRow(p, m_tile, warp);
  if (first >= p.columns) return;  // padding, for the whole warp
  const LaneRows rows = LoadLaneRows(p, tile.expert, first, unit);
  const bool alternate = p.gated() && p.activation.interleaved;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    if (8 * j >= tile.rows) break;
    asm volatile("" ::: "memory");  // keeps the loads of later rounds out of the registers
    float low[2], high[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * j + 2 * q + c;
      const float row_scale =
          p.left.row_scale != nullptr && row < tile.rows ? p.left.row_scale[tile.row + row] : 1.0f;
      low[c] = sums[4 * j + c] * row_scale * rows.scale[0] + rows.bias[0];
      high[c] = sums[4 * j + 2 + c] * row_scale * rows.scale[1] + rows.bias[1];
      if (alternate) {
        // Even g has both gates and odd g both ups: one exchange gives each lane a pair.
        const bool odd = g & 1;
        const float other = __shfl_xor_sync(0xffffffffu, odd ? low[c] : high[c], 4);
        low[c] = odd ? ActivateGated(p.activation, other, high[c])
                     : ActivateGated(p.activation, low[c], other);
      } else if (p.gated()) {
        low[c] = ActivateGated(p.activation, low[c], high[c]);
      } else if (p.activate) {
        low[c] = ActivateGate(p.activation, low[c]);
        high[c] = ActivateGate(p.activation, high[c]);
      }
    }
    const uint32_t left = Transpose(MakePair(p.output.type, low[0], low[1]));
    const uint32_t right = p.gated() ? 0 : Transpose(MakePair(p.output.type, high[0], high[1]));
    const int row = 8 * j + g;
    if (row >= tile.rows) continue;
    uint16_t* out = OutputRow(p, tile.row + row);
    if (alternate) {
      out[first / 2 + q] = static_cast<uint16_t>(left);
      out[(p.columns + first) / 2 + q] = static_cast<uint16_t>(left >> 16);
    } else {
      StorePair(out, first + 2 * q, p.columns, left);
      if (!p.gated()) StorePair(out, first + 8 + 2 * q, p.columns, right);
    }
  }
}

}  // namespace nvfp4
