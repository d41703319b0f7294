// Turns float32 sums in fragments into finished outputs in registers: scales, bias, activation, and
// rounding to 16 bits. direct_store.cuh, rounded_store.cuh, staged_store.cuh and
// quantized_store.cuh store the outputs.
//
// Sums are those of a weight tile of 64 rows, in warp w of four. For each eight sorted rows 8 j to
// 8 j + 7, lane 4 g + q holds two sums of its low weight row and two of its high one. They belong
// to sorted rows 2 q and 2 q + 1 of the eight. Those of the low row are sums[4 j + {0, 1}], and
// those of the high row are sums[4 j + {2, 3}] (see weight_tile.cuh).
//
// In a gated layer, the low row is a gate row and the high row is its up row, so that the
// activation needs no other lane. If gate and up alternate in the checkpoint (swigluoai), the two
// rows of a pair are in neighboring lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "cuda/epilogues/activations.cuh"
#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/instructions/ampere.cuh"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {

// The scales and biases of the two weight rows of a lane, low and high. For rows that are padding,
// the values are arbitrary.
struct LaneRows {
  float scale[2];  // global scales
  float bias[2];
};

// Returns the first weight row of a warp or, in a gated layer, its first pair of gate and up.
__device__ __forceinline__ int FirstRow(const ExpertGemm& p, int m_tile, int warp) {
  return p.gated() ? m_tile * (kTileM / 2) + warp * 8 : m_tile * kTileM + warp * 16;
}

// Returns which global scale of its expert weight row `row` of `all_rows` has.
__device__ __forceinline__ int PartOf(const ExpertGemm& p, int row, int all_rows) {
  if (p.parts == 1) return 0;
  if (p.parts > 2) return row;
  const bool alternate = p.gated() && p.activation.interleaved;
  return alternate ? row & 1 : static_cast<int>(2 * row >= all_rows);
}

// Loads the rows of a lane. It only starts loads, because using a value here would wait for its
// load.
__device__ __forceinline__ LaneRows LoadLaneRows(const ExpertGemm& p, int expert, int m_tile,
                                                 int warp) {
  const int all_rows = p.gated() ? 2 * p.columns : p.columns;
  const int low = FirstRow(p, m_tile, warp) + static_cast<int>(threadIdx.x % 32 / 4);
  const int high = p.gated() ? low + p.columns : low + 8;
  const int of[2] = {min(low, all_rows - 1), min(high, all_rows - 1)};
  const float* scales = p.weight.global_scale + static_cast<int64_t>(expert) * p.parts;
  LaneRows rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.scale[i] = scales[PartOf(p, of[i], all_rows)];
    rows.bias[i] = 0.0f;
  }
  if (p.weight.bias != nullptr) {
    const float* bias = p.weight.bias + static_cast<int64_t>(expert) * p.bias_rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.bias[i] = bias[of[i]];
  }
  return rows;
}

// The kinds of epilogues. Most GEMMs have one of the first three kinds, which are unrolled where
// that pays. The last kind handles every other case in a rolled loop: ten copies of erfc for every
// eight rows would be a megabyte of code.
enum class Finish { kPlain, kSilu, kRelu2, kAny };

__host__ __device__ __forceinline__ Finish ChooseFinish(const ExpertGemm& p) {
  if (p.left.row_scale != nullptr) return Finish::kAny;
  if (!p.activate) return Finish::kPlain;
  const Activation kind = p.activation.kind;
  if (kind == Activation::kSilu && p.activation.gated && !p.activation.interleaved &&
      p.activation.up_limit > FLT_MAX) {
    return Finish::kSilu;
  }
  return kind == Activation::kRelu2 && !p.activation.gated ? Finish::kRelu2 : Finish::kAny;
}

// Whether an epilogue can round outputs to NVFP4. If gate and up alternate, it cannot, because
// neighboring outputs come from different tiles.
inline bool CanRoundOutputs(const ActivationParameters& activation) {
  return !(activation.gated && activation.interleaved);
}

// The outputs of two sorted rows, rounded: those of the low weight row, and those of the high one.
// `high` has no meaning if the two rows were a gate and an up row.
struct OutputPairs {
  uint32_t low;
  uint32_t high;
};

// Computes the outputs that a lane has of one weight tile, in type T.
template <typename T>
struct TileStore {
  const ExpertGemm& p;
  const RowTile& tile;
  const LaneRows rows;
  const int first;  // first weight row, or pair, of the warp
  const int g, q;

  __device__ __forceinline__ float RowScale(int row) const {
    return p.left.row_scale != nullptr && row < tile.rows ? p.left.row_scale[tile.row + row] : 1.0f;
  }

  // Replaces the scaled sums low and high of one sorted row by outputs, each in the place of its
  // weight row. If gated, the output is in low.
  template <Finish kFinish>
  __device__ __forceinline__ void Activate(float& low, float& high) const {
    if constexpr (kFinish == Finish::kSilu) {
      // low * sigmoid(low) * high with a relative error of at most |low| * 2^-23. That does not
      // matter for 16-bit outputs, and takes a third of the instructions.
      const float sigmoid = FastReciprocal(1.0f + FastExp2(low * -1.4426950408889634f));
      low = low * sigmoid * high;
    } else if constexpr (kFinish == Finish::kRelu2) {
      const float limit = p.activation.gate_limit;
      low = ActivateGate({Activation::kRelu2, false, false, 1.0f, 0.0f, limit, limit}, low);
      high = ActivateGate({Activation::kRelu2, false, false, 1.0f, 0.0f, limit, limit}, high);
    } else if constexpr (kFinish == Finish::kAny) {
      if (!p.activate) return;
      if (!p.activation.gated) {
        low = ActivateGate(p.activation, low);
        high = ActivateGate(p.activation, high);
        return;
      }
      if (p.activation.interleaved) {
        // A lane with even g has two gates, and its neighbor with odd g the two ups. One exchange
        // gives each lane a pair.
        const bool odd = g & 1;
        const float other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
        low = odd ? other : low;
        high = odd ? high : other;
      }
      low = ActivateGated(p.activation, low, high);
    }
  }

  // Computes the outputs of the fragment of sorted rows row to row + 7.
  template <Finish kFinish>
  __device__ __forceinline__ OutputPairs Finished(int row, float a, float b, float c,
                                                  float d) const {
    if constexpr (kFinish == Finish::kAny) {
      const float even = RowScale(row + 2 * q), odd = RowScale(row + 2 * q + 1);
      a *= even, b *= odd, c *= even, d *= odd;
    }
    float low[2] = {a * rows.scale[0] + rows.bias[0], b * rows.scale[0] + rows.bias[0]};
    float high[2] = {c * rows.scale[1] + rows.bias[1], d * rows.scale[1] + rows.bias[1]};
    Activate<kFinish>(low[0], high[0]);
    Activate<kFinish>(low[1], high[1]);
    return {MakePair<T>(low[0], low[1]), MakePair<T>(high[0], high[1])};
  }
};

// Makes the TileStore of a weight tile. The sums of the engine must be multiplied by `unit`.
template <typename T>
__device__ __forceinline__ TileStore<T> MakeTileStore(const ExpertGemm& p, const RowTile& tile,
                                                      const LaneRows& rows, int m_tile, int warp,
                                                      float unit = kProductUnit<T>) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (p.left.input_scale != nullptr) unit *= p.left.input_scale[tile.expert];
  const LaneRows scaled = {{unit * rows.scale[0], unit * rows.scale[1]},
                           {rows.bias[0], rows.bias[1]}};
  return {p, tile, scaled, FirstRow(p, m_tile, warp), lane / 4, lane % 4};
}

// Calls store(row, pairs) for each eight sorted rows of the tile, in little code: a loop shifts the
// sums through the first four places. Uses up `sums`.
template <typename T, int kSize, typename Function>
__device__ __forceinline__ void FinishRolled(const TileStore<T>& tile_store, float (&sums)[kSize],
                                             const Function& store) {
#pragma unroll 1
  for (int row = 0; row < tile_store.tile.rows; row += 8) {
    store(row, tile_store.template Finished<Finish::kAny>(row, sums[0], sums[1], sums[2], sums[3]));
#pragma unroll
    for (int i = 4; i < kSize; ++i) sums[i - 4] = sums[i];
  }
}

// Calls store(row, index of its first sum) for each eight sorted rows of a tile of `rows` rows that
// has `kSize` sums in a lane. The code is unrolled over the groups of small tiles. Groups of larger
// ones take turns in the first places, to which move(i, j) brings sum j. If all were unrolled, the
// code for 128 rows would have 35,000 instructions, and compiling it would take as long as that for
// all smaller tiles. Other sizes of a part spilled registers.
template <int kSize, typename Store, typename Move>
__device__ __forceinline__ void ForGroupsOfRows(int rows, const Store& store, const Move& move) {
  constexpr int kGroups = kSize / 4, kPart = kGroups <= 6 ? kGroups : kGroups <= 8 ? 4 : 1;
#pragma unroll 1
  for (int part = 0; part < kGroups; part += kPart) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (8 * (part + j) >= rows) return;
      store(8 * (part + j), 4 * j);
    }
#pragma unroll
    for (int i = 0; i < 4 * (kGroups - kPart); ++i) move(i, i + 4 * kPart);
  }
}

}  // namespace nvfp4
