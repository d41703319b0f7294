// Computes out[r] = act(W[expert of r] @ x[r] * global_scale + bias) with NVFP4 weights, on every
// architecture since sm_80.
//
//   x            [rows, k]     bf16, f16 or f32, read through an index; or NVFP4 codes with a
//                              float32 scale for each row (W4A4)
//   packed       [e, n, k/2]   layout "mma_64x64", or "mma_64x64_gated" for gate and up
//   block_scale  [e, n, k/16]  in the order of that layout
//   out          [rows, columns] bf16, f16 or f32; sums are float32
//
// This is the plain form: a tiled product for any type, size and scheme. The engines for single
// architectures are faster where they apply.
//
// A block computes one tile: 64 rows of one expert (from sort_by_expert.cu) by 128 weight rows, for
// all of k. Where the activation is gated, the layout alternates 8 gate rows and their 8 up rows,
// so that a block has both halves of each output. Blocks past the last tile exit early.
//
// Each step over k loads the next step into registers, multiplies from shared memory, and then
// stores the registers to shared memory. Weights are decoded before they are stored: e2m1 * e4m3 is
// exact in bf16, f16 and f32. Global scales, row scales and biases are applied to the float32 sums.
//   bf16, f16   mma.sync m16n8k16; 8 warps, each with 32x32 outputs; 64 of k a step
//   f32         FFMA; 256 threads, each with 4x8 outputs; 32 of k a step; sums in the order of k
//
// Needs: sm_80 or later; k % 16 == 0. Test: tests/gpu/test_cuda_kernel.py.
#include "cuda/epilogues/activations.cuh"
#include "cuda/gemm/plain_gemm.cuh"
#include "cuda/gemm/weight_tile.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"

namespace nvfp4 {
namespace {

constexpr int kTileWeights = 128;
constexpr int kThreads = 256;
constexpr int kTileThreads = 128;              // threads that load a 64 x 64 tile of weights
constexpr int kSumsStride = kTileWeights + 4;  // floats between rows of the tile of sums

// One weight row of a tile: its row in the expert, and which global scale it has.
struct WeightRow {
  int32_t row;   // -1: past the last column
  int32_t part;  // which global scale of the expert the row has
};

__device__ __forceinline__ bool IsGated(const PlainGemm& p) {
  return p.activate && p.activation.gated;
}

// log2 of the columns of a tile. A gated output takes two weight rows, so that a tile has 64.
__device__ __forceinline__ int TileShift(const PlainGemm& p) { return IsGated(p) ? 6 : 7; }

// Row `index` (0 to 127) of the tile's weights, tile blockIdx.y of the columns. In a gated layer
// index 16 s + r is row 8 s + r of the gate half for r < 8, and of the up half otherwise.
__device__ WeightRow WeightRowOfTile(const PlainGemm& p, int index) {
  const int tile = static_cast<int>(blockIdx.y);
  if (IsGated(p)) {
    const int half = index >> 3 & 1;
    const int within = tile * (kTileWeights / 2) + index / 16 * 8 + index % 8;
    if (within >= p.columns) return {-1, 0};
    const int row = half * p.columns + within;
    return {row, p.activation.interleaved ? row & 1 : half};
  }
  const int column = tile * kTileWeights + index;
  if (column >= p.columns) return {-1, 0};
  if (p.parts > 2) return {column, column};
  return {column, p.parts == 2 && 2 * column >= p.columns ? 1 : 0};
}

// A column that the tile computes, and the indices of its weight rows; `up` only where gated.
struct TileColumn {
  int column;
  int gate;
  int up;
};

__device__ TileColumn ColumnOfTile(const PlainGemm& p, int offset) {
  const int tile = static_cast<int>(blockIdx.y);
  if (!IsGated(p)) return {tile * kTileWeights + offset, offset, 0};
  const auto index = [](int within, int half) { return within / 8 * 16 + within % 8 + 8 * half; };
  if (!p.activation.interleaved) {
    return {tile * (kTileWeights / 2) + offset, index(offset, 0), index(offset, 1)};
  }
  // Rows 2 c and 2 c + 1 are a pair, and either lie both in the first half of all rows or not.
  const int half = offset >= 32, pair = offset % 32;
  return {half * p.columns / 2 + tile * (kTileWeights / 4) + pair, index(2 * pair, half),
          index(2 * pair + 1, half)};
}

// What one of 256 threads loads for 64 of k. Two tiles of 64 weight rows lie side by side.
struct WeightThread {
  const uint8_t* codes = nullptr;  // null: past the last tile of rows
  const uint8_t* scales = nullptr;
  int k_tiles = 0;
  uint4 words;
  uint2 scale_words;

  __device__ __forceinline__ void Load(int k_tile) {
    const bool inside = codes != nullptr && k_tile < k_tiles;
    words = inside ? __ldg(reinterpret_cast<const uint4*>(codes + k_tile * kTileCodeBytes))
                   : make_uint4(0, 0, 0, 0);
    scale_words = inside ? __ldg(reinterpret_cast<const uint2*>(scales + k_tile * kTileScaleBytes))
                         : make_uint2(0, 0);
  }
};

template <typename T>
__device__ void OpenRow(const PlainGemm& p, int sorted_row, PlainRow<T>* row) {
  const int32_t slot = p.left.slots != nullptr ? p.left.slots[sorted_row] : sorted_row;
  const int64_t source = p.left.slots != nullptr ? slot / p.left.slots_per_row : slot;
  row->row = static_cast<const T*>(p.left.values) + source * p.k;
  row->num_blocks = p.k / kBlock;
  if (p.left.slot_weights != nullptr) {
    row->weighted = true;
    row->weight = p.left.slot_weights[slot];
  }
}

__device__ void OpenRow(const PlainGemm& p, int sorted_row, QuantizedRow* row) {
  row->num_blocks = p.k / kBlock;
  row->codes = p.left.codes + static_cast<int64_t>(sorted_row) * (p.k / 2);
  row->scales = p.left.block_scale + static_cast<int64_t>(sorted_row) * row->num_blocks;
}

__device__ void OpenWeights(const PlainGemm& p, int expert, WeightThread* weight) {
  const int thread = static_cast<int>(threadIdx.x) % kTileThreads;
  const int m_tiles = static_cast<int>((p.weight_rows + kTileM - 1) / kTileM);
  const int m_tile =
      static_cast<int>(blockIdx.y) * 2 + static_cast<int>(threadIdx.x) / kTileThreads;
  if (m_tile >= m_tiles) return;
  weight->k_tiles = (p.k + kTileK - 1) / kTileK;
  const int64_t tile = (static_cast<int64_t>(expert) * m_tiles + m_tile) * weight->k_tiles;
  weight->codes = p.weight.packed + tile * kTileCodeBytes + thread * 16;
  weight->scales = p.weight.block_scale + tile * kTileScaleBytes + thread / 4 * 8;
}

// Loads 16 bytes from shared memory.
__device__ __forceinline__ void Load4(const float* source, float* values) {
  const float4 loaded = *reinterpret_cast<const float4*>(source);
  values[0] = loaded.x;
  values[1] = loaded.y;
  values[2] = loaded.z;
  values[3] = loaded.w;
}

__device__ void StoreOutput(const PlainOutput& output, int64_t index, float value) {
  switch (output.type) {
    case DataType::kBF16:
      static_cast<__nv_bfloat16*>(output.values)[index] = FromFloat<__nv_bfloat16>(value);
      break;
    case DataType::kF16:
      static_cast<__half*>(output.values)[index] = FromFloat<__half>(value);
      break;
    case DataType::kF32:
      static_cast<float*>(output.values)[index] = value;
      break;
  }
}

// Returns the tile of this block.
__device__ __forceinline__ RowTile FindTile(const PlainGemm& p) {
  const ListedTile tile = p.rows.tiles[blockIdx.x];
  return {tile.expert, tile.row, min(kTileRows, tile.end - tile.row)};
}

// Applies scales, bias and activation to `sums` [64][kSumsStride] in shared memory, and stores the
// outputs. A sum of the products is `unit` times what lies there.
__device__ void StoreTile(const PlainGemm& p, const RowTile& tile, float unit, const float* sums) {
  const float* global_scale = p.weight.global_scale + static_cast<int64_t>(tile.expert) * p.parts;
  const float* bias =
      p.weight.bias == nullptr ? nullptr : p.weight.bias + tile.expert * p.bias_rows;
  const auto scaled = [&](int row, int index, float row_scale) {
    const WeightRow weight = WeightRowOfTile(p, index);
    const float sum =
        sums[row * kSumsStride + index] * row_scale * (unit * global_scale[weight.part]);
    return bias == nullptr ? sum : sum + bias[weight.row];
  };
  const int shift = TileShift(p);
  for (int index = threadIdx.x; index < tile.rows << shift; index += kThreads) {
    const int row = index >> shift;
    const TileColumn at = ColumnOfTile(p, index & ((1 << shift) - 1));
    // Padding of a gated tile is whole groups of 16 weight rows. If the gate row is padding, so is
    // the up row.
    if (at.column >= p.columns || WeightRowOfTile(p, at.gate).row < 0) continue;
    const int sorted_row = tile.row + row;
    const float row_scale = p.left.row_scale == nullptr ? 1.0f : p.left.row_scale[sorted_row];
    float value = scaled(row, at.gate, row_scale);
    if (p.activate) {
      value = IsGated(p) ? ActivateGated(p.activation, value, scaled(row, at.up, row_scale))
                         : ActivateGate(p.activation, value);
    }
    const int64_t target = p.output.slots != nullptr ? p.output.slots[sorted_row] : sorted_row;
    StoreOutput(p.output, target * p.columns + at.column, value);
  }
}

// The product in bf16 and f16, on tensor cores. In each step over 64 of k, a thread loads one block
// of x and its fragments of a weight tile.
template <typename T, typename Left>
__global__ void __launch_bounds__(kThreads, 2) PlainGemmTensor(const PlainGemm p) {
  constexpr int kStep = 64;
  constexpr int kStride = kStep + 8;  // elements; 16 bytes of padding spread rows over the banks
  constexpr int kLeftBytes = kTileRows * kStride * sizeof(T);
  constexpr int kWeightBytes = kTileWeights * kStride * sizeof(T);
  constexpr int kSumsBytes = kTileRows * kSumsStride * sizeof(float);
  constexpr int kBytes =
      kLeftBytes + kWeightBytes > kSumsBytes ? kLeftBytes + kWeightBytes : kSumsBytes;
  static_assert(kThreads == kTileRows * (kStep / kBlock), "one left block for each thread");
  static_assert(kThreads == kTileWeights / kTileM * kTileThreads, "one thread of a weight tile");
  __shared__ __align__(128) unsigned char shared[kBytes];

  if (static_cast<int>(blockIdx.x) >= *p.rows.num_tiles) return;
  const RowTile tile = FindTile(p);
  T* left_tile = reinterpret_cast<T*>(shared);
  T* weight_tile = reinterpret_cast<T*>(shared + kLeftBytes);

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int left_row = thread / 4, left_block = thread % 4;
  Left left;
  if (left_row < tile.rows) OpenRow(p, tile.row + left_row, &left);
  WeightThread weight;
  OpenWeights(p, tile.expert, &weight);
  const TileConstants constants = MakeTileConstants<T>();
  // Fragment registers 0 and 2 hold row lane / 4, and 1 and 3 the row 8 below; 2 and 3 are 8 of k
  // further.
  T* weight_place = weight_tile + (warp * 16 + lane / 4) * kStride + lane % 4 * 2;

  // A warp computes rows warp_row to + 31 and columns warp_column to + 31. LoadMatrices loads four
  // 8x8 matrices. Those of x are rows 0 to 7 and 8 to 15, then both at k + 8. Those of the weights
  // are k and k + 8, then both 8 rows further.
  const int warp_row = warp / 4 * 32, warp_column = warp % 4 * 32;
  const T* left_lane = left_tile + (warp_row + lane % 16) * kStride + lane / 16 * 8;
  const T* weight_lane =
      weight_tile + (warp_column + lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
  float sums[2][4][4] = {};

  const int steps = (p.k + kStep - 1) / kStep;
  left.Load(left_block);
  weight.Load(0);
  for (int step = 0; step < steps; ++step) {
    T values[16];
    left.Values(values);
    StoreBlock(left_tile + left_row * kStride + left_block * kBlock, values);
    uint32_t fragments[4][4];
    UnpackTile<T>(weight.words, weight.scale_words, constants, fragments);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        T* place = weight_place + i % 2 * 8 * kStride + j * 16 + i / 2 * 8;
        *reinterpret_cast<uint32_t*>(place) = fragments[j][i];
      }
    }
    __syncthreads();
    const int next = (step + 1) * (kStep / kBlock);
    left.Load(next + left_block);
    weight.Load(step + 1);
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        LoadMatrices(left_lane + 16 * i * kStride + k, a[i]);
        LoadMatrices(weight_lane + 16 * i * kStride + k, b[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          MultiplyAdd<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
    __syncthreads();
  }

  float* tile_sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* corner = tile_sums + (warp_row + 16 * i + lane / 4) * kSumsStride + warp_column +
                      8 * j + lane % 4 * 2;
      corner[0] = sums[i][j][0];
      corner[1] = sums[i][j][1];
      corner[8 * kSumsStride] = sums[i][j][2];
      corner[8 * kSumsStride + 1] = sums[i][j][3];
    }
  }
  __syncthreads();
  StoreTile(p, tile, kProductUnit<T>, tile_sums);
}

// The product in f32, with FFMA. A step covers 32 of k, half a tile of weights. Both operands are
// stored transposed, [k][row], so that a thread reads its 4 rows and 8 columns as vectors.
template <typename Left>
__global__ void __launch_bounds__(kThreads) PlainGemmFloat(const PlainGemm p) {
  constexpr int kStep = 32;
  constexpr int kLeftStride = kTileRows + 4;
  constexpr int kWeightStride = kTileWeights + 4;
  constexpr int kLeftFloats = kStep * kLeftStride;
  static_assert(kLeftFloats + kStep * kWeightStride <= kTileRows * kSumsStride,
                "the sums need the most room");
  __shared__ __align__(128) float shared[kTileRows * kSumsStride];

  if (static_cast<int>(blockIdx.x) >= *p.rows.num_tiles) return;
  const RowTile tile = FindTile(p);
  float* left_tile = shared;
  float* weight_tile = shared + kLeftFloats;

  const int thread = threadIdx.x;
  const bool brings_left = thread < kTileRows * (kStep / kBlock);
  const int left_row = thread % kTileRows, left_block = thread / kTileRows;
  Left left;
  if (brings_left && left_row < tile.rows) OpenRow(p, tile.row + left_row, &left);
  WeightThread weight;
  OpenWeights(p, tile.expert, &weight);
  const TileConstants constants = MakeTileConstants<__nv_bfloat16>();
  float* weight_place =
      weight_tile + thread % 32 % 4 * 2 * kWeightStride + thread / 32 * 16 + thread % 32 / 4;

  // This thread computes rows first_row to + 3, columns first_column to + 3 and, from 64 columns
  // further on, 4 more.
  const int first_row = thread / 16 * 4, first_column = thread % 16 * 4;
  float sums[4][8] = {};

  const int steps = (p.k + kStep - 1) / kStep;
  left.Load(left_block);
  weight.Load(0);
  for (int step = 0; step < steps; ++step) {
    float values[16];
    if (brings_left) {
      left.Values(values);
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        left_tile[(left_block * kBlock + j) * kLeftStride + left_row] = values[j];
      }
    }
    uint32_t fragments[2][4];
    if (step % 2 == 0) {
      UnpackPair<__nv_bfloat16>(weight.words.x, weight.words.y, weight.scale_words.x, constants,
                                fragments[0], fragments[1]);
    } else {
      UnpackPair<__nv_bfloat16>(weight.words.z, weight.words.w, weight.scale_words.y, constants,
                                fragments[0], fragments[1]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* place = weight_place + (j * 16 + i / 2 * 8) * kWeightStride + i % 2 * 8;
        place[0] = BitsFloat(fragments[j][i] << 16);
        place[kWeightStride] = BitsFloat(fragments[j][i] & 0xffff0000u);
      }
    }
    __syncthreads();
    const int next = (step + 1) * (kStep / kBlock);
    left.Load(next + left_block);
    if (step % 2 == 1) weight.Load((step + 1) / 2);
#pragma unroll 8
    for (int k = 0; k < kStep; ++k) {
      float a[4], b[8];
      Load4(left_tile + k * kLeftStride + first_row, a);
      Load4(weight_tile + k * kWeightStride + first_column, b);
      Load4(weight_tile + k * kWeightStride + first_column + 64, b + 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = first_column + (j < 4 ? j : 60 + j);
      shared[(first_row + i) * kSumsStride + column] = sums[i][j];
    }
  }
  __syncthreads();
  StoreTile(p, tile, kProductUnit<__nv_bfloat16>, shared);
}

}  // namespace

cudaError_t LaunchPlainGemm(cudaStream_t stream, const PlainGemm& gemm) {
  const int columns = gemm.activate && gemm.activation.gated ? kTileWeights / 2 : kTileWeights;
  const dim3 grid(static_cast<unsigned>(gemm.max_tiles),
                  static_cast<unsigned>(CeilDiv(gemm.columns, columns)));
  const bool quantized = gemm.left.codes != nullptr;
  switch (gemm.type) {
    case DataType::kF32:
      return quantized ? Launch(stream, grid, kThreads, PlainGemmFloat<QuantizedRow>, gemm)
                       : Launch(stream, grid, kThreads, PlainGemmFloat<PlainRow<float>>, gemm);
    case DataType::kF16:
      if (!quantized) {
        return Launch(stream, grid, kThreads, PlainGemmTensor<__half, PlainRow<__half>>, gemm);
      }
      break;
    case DataType::kBF16:
      if (!quantized) {
        return Launch(stream, grid, kThreads,
                      PlainGemmTensor<__nv_bfloat16, PlainRow<__nv_bfloat16>>, gemm);
      }
      break;
  }
  // Codes times block scales are exact in bf16, whatever the type of the activations was.
  return Launch(stream, grid, kThreads, PlainGemmTensor<__nv_bfloat16, QuantizedRow>, gemm);
}

}  // namespace nvfp4
