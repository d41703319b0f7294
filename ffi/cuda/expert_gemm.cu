// out[r] = act(W[e(r)] @ x[r] * global_scale + bias): grouped product with NVFP4 weights, for
// every architecture of the list.
//
//   x            [rows, k]     bf16, f16 or f32, read through an index; or NVFP4 codes with a
//                              float32 scale for each row (W4A4: the products are the same)
//   packed       [e, n, k/2]   layout "canonical", low nibble = even k
//   block_scale  [e, n, k/16]  E4M3
//   out          [rows, columns] bf16, f16 or f32, float32 sums
//
// The plain form: one kernel behind all the targets, correct for any size, with the memory
// traffic of a tiled product and no more. The kernels for single architectures replace it target
// by target.
//
// Work: a block owns 64 rows of one expert (a tile of routing.cu) and 128 weight rows, and walks
// k. Where the activation is gated these are 64 gate rows and their 64 up rows, so that both
// halves of an output meet in one block. Blocks past the last tile leave at once.
//
// Pipeline, per k-step: registers -> shared memory, loads of the next step into registers, product
// from shared memory. Weights are decoded on the way into shared memory: e2m1 * e4m3 is exact in
// bf16, f16 and f32. Global scales, row scales and biases are applied to the float32 sums.
//   bf16, f16   mma.sync m16n8k16, 8 warps of 32x32 outputs, 64 of k a step
//   f32         FFMA, 256 threads of 4x8 outputs, 32 of k a step, sums in the order of k
//
// Needs: sm_80 or later; k % 16 == 0. Test: test_cuda_kernel.py.
#include "activations.cuh"
#include "elements.cuh"
#include "expert_gemm.cuh"
#include "launch_kernel.cuh"
#include "mma.cuh"

namespace nvfp4 {
namespace {

constexpr int kTileWeights = 128;
constexpr int kThreads = 256;
constexpr int kSumsStride = kTileWeights + 4;  // floats between rows of the tile of sums

// One weight row of a tile: which row of the expert, and which of its global scales.
struct WeightRow {
  int32_t row;  // -1: past the last column
  int32_t part;
};

__device__ __forceinline__ bool IsGated(const ExpertGemm& p) {
  return p.activate && p.activation.gated;
}

// log2 of the columns of a tile: 64 where each takes two weight rows.
__device__ __forceinline__ int TileShift(const ExpertGemm& p) { return IsGated(p) ? 6 : 7; }

// Row `index` (0 to 127) of the tile's weights, tile blockIdx.y of the columns.
__device__ WeightRow WeightRowOfTile(const ExpertGemm& p, int index) {
  const int shift = TileShift(p);
  const int half = index >> shift;  // 0, or 1 for an up row
  const int column =
      (static_cast<int>(blockIdx.y) << shift) + (index & ((kTileWeights - 1) >> (7 - shift)));
  if (column >= p.columns) return {-1, 0};
  if (IsGated(p)) {
    const int row = p.activation.interleaved ? 2 * column + half : half * p.columns + column;
    return {row, half};
  }
  return {column, p.parts == 2 && 2 * column >= p.columns ? 1 : 0};
}

template <typename T>
__device__ void OpenRow(const ExpertGemm& p, int sorted_row, PlainRow<T>* row) {
  const int32_t slot = p.left.slots != nullptr ? p.left.slots[sorted_row] : sorted_row;
  const int64_t source = p.left.slots != nullptr ? slot / p.left.slots_per_row : slot;
  row->row = static_cast<const T*>(p.left.values) + source * p.k;
  row->num_blocks = p.k / kBlock;
  if (p.left.slot_weights != nullptr) {
    row->weighted = true;
    row->weight = p.left.slot_weights[slot];
  }
}

__device__ void OpenRow(const ExpertGemm& p, int sorted_row, QuantizedRow* row) {
  row->num_blocks = p.k / kBlock;
  row->codes = p.left.codes + static_cast<int64_t>(sorted_row) * (p.k / 2);
  row->scales = p.left.block_scale + static_cast<int64_t>(sorted_row) * row->num_blocks;
}

__device__ void OpenWeightRow(const ExpertGemm& p, int expert, int index, QuantizedRow* row) {
  const WeightRow weight = WeightRowOfTile(p, index);
  if (weight.row < 0) return;
  const int64_t n = expert * p.weight_rows + weight.row;
  row->num_blocks = p.k / kBlock;
  row->codes = p.weight.packed + n * (p.k / 2);
  row->scales = p.weight.block_scale + n * row->num_blocks;
}

// 16 bytes at a time, to and from shared memory.
template <typename T>
__device__ __forceinline__ void StoreBlock(T* target, const T (&values)[16]) {
  uint4 words[sizeof(T)];
  std::memcpy(words, values, sizeof(words));
#pragma unroll
  for (int w = 0; w < static_cast<int>(sizeof(T)); ++w)
    reinterpret_cast<uint4*>(target)[w] = words[w];
}

__device__ __forceinline__ void Load4(const float* source, float* values) {
  const float4 loaded = *reinterpret_cast<const float4*>(source);
  values[0] = loaded.x;
  values[1] = loaded.y;
  values[2] = loaded.z;
  values[3] = loaded.w;
}

__device__ void StoreOutput(const Output& output, int64_t index, float value) {
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

// Scales, biases, activation: sums [64][kSumsStride] in shared memory -> output.
__device__ void StoreTile(const ExpertGemm& p, const RowTile& tile, const float* sums) {
  const float* global_scale = p.weight.global_scale + static_cast<int64_t>(tile.expert) * p.parts;
  const float* bias =
      p.weight.bias == nullptr ? nullptr : p.weight.bias + tile.expert * p.bias_rows;
  const auto scaled = [&](int row, int index, float row_scale) {
    const WeightRow weight = WeightRowOfTile(p, index);
    const float sum = sums[row * kSumsStride + index] * row_scale * global_scale[weight.part];
    return bias == nullptr ? sum : sum + bias[weight.row];
  };
  const int shift = TileShift(p), columns = 1 << shift;
  for (int index = threadIdx.x; index < tile.rows << shift; index += kThreads) {
    const int row = index >> shift, offset = index & (columns - 1);
    const int column = (static_cast<int>(blockIdx.y) << shift) + offset;
    if (column >= p.columns) continue;
    const int sorted_row = tile.row + row;
    const float row_scale = p.left.row_scale == nullptr ? 1.0f : p.left.row_scale[sorted_row];
    float value = scaled(row, offset, row_scale);
    if (p.activate) {
      value = IsGated(p)
                  ? ActivateGated(p.activation, value, scaled(row, offset + columns, row_scale))
                  : ActivateGate(p.activation, value);
    }
    const int64_t target = p.output.slots != nullptr ? p.output.slots[sorted_row] : sorted_row;
    StoreOutput(p.output, target * p.columns + column, value);
  }
}

// bf16 and f16: tensor cores. A k-step is 64: a thread brings one block of the left operand and
// two of the weights.
template <typename T, typename Left>
__global__ void __launch_bounds__(kThreads) ExpertGemmTensor(const ExpertGemm p) {
  constexpr int kStep = 64;
  constexpr int kStride = kStep + 8;  // elements; 16 bytes of padding spread rows over the banks
  constexpr int kLeftBytes = kTileRows * kStride * sizeof(T);
  constexpr int kWeightBytes = kTileWeights * kStride * sizeof(T);
  constexpr int kSumsBytes = kTileRows * kSumsStride * sizeof(float);
  constexpr int kBytes =
      kLeftBytes + kWeightBytes > kSumsBytes ? kLeftBytes + kWeightBytes : kSumsBytes;
  static_assert(kThreads == kTileRows * (kStep / kBlock), "one left block for each thread");
  static_assert(2 * kThreads == kTileWeights * (kStep / kBlock), "two weight blocks");
  __shared__ __align__(128) unsigned char shared[kBytes];

  if (static_cast<int>(blockIdx.x) >= *p.rows.num_tiles) return;
  const RowTile tile = p.rows.tiles[blockIdx.x];
  T* left_tile = reinterpret_cast<T*>(shared);
  T* weight_tile = reinterpret_cast<T*>(shared + kLeftBytes);

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int left_row = thread / 4, left_block = thread % 4;
  const int weight_row = thread / 2, weight_block = thread % 2 * 2;
  Left left;
  if (left_row < tile.rows) OpenRow(p, tile.row + left_row, &left);
  QuantizedRow weight[2];
  OpenWeightRow(p, tile.expert, weight_row, &weight[0]);
  weight[1] = weight[0];

  // A warp owns rows warp_row to + 31 and columns warp_column to + 31. Of the four matrices that
  // LoadMatrices brings, the left operand's are rows 0 to 7 and 8 to 15, then both at k + 8; the
  // weights' are k and k + 8, then both 8 rows further.
  const int warp_row = warp / 4 * 32, warp_column = warp % 4 * 32;
  const T* left_lane = left_tile + (warp_row + lane % 16) * kStride + lane / 16 * 8;
  const T* weight_lane =
      weight_tile + (warp_column + lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
  float sums[2][4][4] = {};

  const int steps = (p.k + kStep - 1) / kStep;
  left.Load(left_block);
  for (int b = 0; b < 2; ++b) weight[b].Load(weight_block + b);
  for (int step = 0; step < steps; ++step) {
    T values[16];
    left.Values(values);
    StoreBlock(left_tile + left_row * kStride + left_block * kBlock, values);
    for (int b = 0; b < 2; ++b) {
      weight[b].Values(values);
      StoreBlock(weight_tile + weight_row * kStride + (weight_block + b) * kBlock, values);
    }
    __syncthreads();
    const int next = (step + 1) * (kStep / kBlock);
    left.Load(next + left_block);
    for (int b = 0; b < 2; ++b) weight[b].Load(next + weight_block + b);
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
  StoreTile(p, tile, tile_sums);
}

// f32: FFMA. A k-step is 32; both tiles lie transposed, [k][row], so that a thread reads its 4
// rows and 8 columns as vectors.
template <typename Left>
__global__ void __launch_bounds__(kThreads) ExpertGemmFloat(const ExpertGemm p) {
  constexpr int kStep = 32;
  constexpr int kLeftStride = kTileRows + 4;
  constexpr int kWeightStride = kTileWeights + 4;
  constexpr int kLeftFloats = kStep * kLeftStride;
  static_assert(kThreads == kTileWeights * (kStep / kBlock), "one weight block for each thread");
  static_assert(kLeftFloats + kStep * kWeightStride <= kTileRows * kSumsStride,
                "the sums need the most room");
  __shared__ __align__(128) float shared[kTileRows * kSumsStride];

  if (static_cast<int>(blockIdx.x) >= *p.rows.num_tiles) return;
  const RowTile tile = p.rows.tiles[blockIdx.x];
  float* left_tile = shared;
  float* weight_tile = shared + kLeftFloats;

  const int thread = threadIdx.x;
  const bool brings_left = thread < kTileRows * (kStep / kBlock);
  const int left_row = thread % kTileRows, left_block = thread / kTileRows;
  const int weight_row = thread % kTileWeights, weight_block = thread / kTileWeights;
  Left left;
  if (brings_left && left_row < tile.rows) OpenRow(p, tile.row + left_row, &left);
  QuantizedRow weight;
  OpenWeightRow(p, tile.expert, weight_row, &weight);

  // Rows first_row to + 3; columns first_column to + 3 and first_column + 64 to + 67.
  const int first_row = thread / 16 * 4, first_column = thread % 16 * 4;
  float sums[4][8] = {};

  const int steps = (p.k + kStep - 1) / kStep;
  left.Load(left_block);
  weight.Load(weight_block);
  for (int step = 0; step < steps; ++step) {
    float values[16];
    if (brings_left) {
      left.Values(values);
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        left_tile[(left_block * kBlock + j) * kLeftStride + left_row] = values[j];
      }
    }
    weight.Values(values);
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      weight_tile[(weight_block * kBlock + j) * kWeightStride + weight_row] = values[j];
    }
    __syncthreads();
    const int next = (step + 1) * (kStep / kBlock);
    left.Load(next + left_block);
    weight.Load(next + weight_block);
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
  StoreTile(p, tile, shared);
}

}  // namespace

cudaError_t LaunchExpertGemm(cudaStream_t stream, const ExpertGemm& gemm) {
  const int columns = gemm.activate && gemm.activation.gated ? kTileWeights / 2 : kTileWeights;
  const dim3 grid(static_cast<unsigned>(gemm.max_tiles),
                  static_cast<unsigned>(CeilDiv(gemm.columns, columns)));
  const bool quantized = gemm.left.codes != nullptr;
  switch (gemm.type) {
    case DataType::kF32:
      return quantized ? Launch(stream, grid, kThreads, ExpertGemmFloat<QuantizedRow>, gemm)
                       : Launch(stream, grid, kThreads, ExpertGemmFloat<PlainRow<float>>, gemm);
    case DataType::kF16:
      if (!quantized) {
        return Launch(stream, grid, kThreads, ExpertGemmTensor<__half, PlainRow<__half>>, gemm);
      }
      break;
    case DataType::kBF16:
      if (!quantized) {
        return Launch(stream, grid, kThreads,
                      ExpertGemmTensor<__nv_bfloat16, PlainRow<__nv_bfloat16>>, gemm);
      }
      break;
  }
  // Codes times block scales are exact in bf16 whatever the type of the activations was.
  return Launch(stream, grid, kThreads, ExpertGemmTensor<__nv_bfloat16, QuantizedRow>, gemm);
}

}  // namespace nvfp4
