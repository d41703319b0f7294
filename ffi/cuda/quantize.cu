// Quantizes to NVFP4, bit for bit as formats.quantize does.
//
//   Quantize      x [m, k], one global scale -> packed [m, k/2], block_scale linear or 128x4
//   QuantizeRows  rows of experts -> codes, block scales, and a global scale for each row; or
//                 their products code * block scale in the type of the rows, for the engines
//
// Bound by: reading x. A thread takes one block of 16: 32 or 64 bytes in, 9 bytes out (or as many).
// Divisions are IEEE divisions (nvfp4.h), which is what makes ties fall as they do in the
// reference.
//
// QuantizeRows differs in one thing: a block that holds NaN or infinity gets the scale NaN, so
// that the whole row of the product is NaN and no infinity turns into 6 * 448.
// Test: test_cuda_quantizer.py.
#include <cstring>

#include "elements.cuh"
#include "launch_kernel.cuh"
#include "quantize.cuh"
#include "quantize_block.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kInfinityBits = 0x7f800000u, kNan = 0x7fc00000u;

// Largest magnitude as bits: unsigned order puts infinity above all numbers and NaN above it.
__device__ __forceinline__ uint32_t MagnitudeBits(float value) {
  return FloatBits(value) & 0x7fffffffu;
}

template <typename T>
__device__ uint32_t LargestBits(const T (&values)[16]) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kBlock; ++j) largest = max(largest, MagnitudeBits(ToFloat(values[j])));
  return largest;
}

// 16 values, 32 or 64 bytes.
template <typename T>
__device__ __forceinline__ void StoreBlock(T* target, const T (&values)[16]) {
  uint4 words[sizeof(T)];
  std::memcpy(words, values, sizeof(words));
#pragma unroll
  for (int w = 0; w < static_cast<int>(sizeof(T)); ++w) {
    reinterpret_cast<uint4*>(target)[w] = words[w];
  }
}

struct QuantizeShape {
  int64_t m;
  int64_t blocks;         // of a row
  int64_t padded_rows;    // m, or the next multiple of 128 where swizzled
  int64_t padded_blocks;  // blocks, or the next multiple of 4
  bool swizzled;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    Quantize(const QuantizeBuffers p, const QuantizeShape shape) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= shape.padded_rows * shape.padded_blocks) return;
  const int64_t row = index / shape.padded_blocks, block = index % shape.padded_blocks;
  uint8_t byte = 0;  // of a scale that pads
  if (row < shape.m && block < shape.blocks) {
    PlainRow<T> source;
    source.row = static_cast<const T*>(p.x) + row * shape.blocks * kBlock;
    source.num_blocks = static_cast<int>(shape.blocks);
    source.Load(static_cast<int>(block));
    T values[16];
    source.Values(values);
    const float g = *p.global_scale;
    const SplitBlock<T> split(values);
    const BlockScale scale = FindBlockScale(split.largest, MakeBlockDivisor(g));
    byte = scale.byte;
    const uint2 words = EncodeBlock(split, scale.value * g);
    reinterpret_cast<uint2*>(p.packed)[row * shape.blocks + block] = words;
  }
  p.block_scale[shape.swizzled ? Swizzle128x4(row, block, shape.padded_blocks) : index] = byte;
}

// Row of the source, and its weight, of a sorted row.
template <typename T>
__device__ PlainRow<T> OpenSource(const RowQuantizer& p, int64_t sorted_row) {
  PlainRow<T> source;
  const int64_t slot = p.slots != nullptr ? p.slots[sorted_row] : sorted_row;
  source.row =
      static_cast<const T*>(p.values) + (p.slots != nullptr ? slot / p.slots_per_row : slot) * p.k;
  source.num_blocks = p.k / kBlock;
  if (p.slot_weights != nullptr) {
    source.weighted = true;
    source.weight = p.slot_weights[slot];
  }
  return source;
}

// The expert that owns a sorted row: the last one whose rows start at or before it.
__device__ int ExpertOfRow(const int32_t* starts, int num_experts, int64_t sorted_row) {
  int low = 0, high = num_experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] <= sorted_row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// row_scale[r] = amax(row r) / 2688; one block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) ScaleRows(const RowQuantizer p) {
  __shared__ uint32_t warp_largest[kThreads / 32];
  const int64_t sorted_row = blockIdx.x;
  if (sorted_row >= p.rows.starts[p.num_experts]) return;
  PlainRow<T> source = OpenSource<T>(p, sorted_row);
  uint32_t largest = 0;
  for (int block = threadIdx.x; block < source.num_blocks; block += kThreads) {
    T values[16];
    source.Load(block);
    source.Values(values);
    largest = max(largest, LargestBits(values));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) largest = max(largest, warp_largest[warp]);
  p.row_scale[sorted_row] = GlobalScale(BitsFloat(largest));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) QuantizeRows(const RowQuantizer p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int blocks = p.k / kBlock;
  const int64_t sorted_row = index / blocks;
  const int block = static_cast<int>(index % blocks);
  if (sorted_row >= p.rows.starts[p.num_experts]) return;
  PlainRow<T> source = OpenSource<T>(p, sorted_row);
  source.Load(block);
  T values[16];
  source.Values(values);

  float g;
  if (p.input_scale != nullptr) {
    g = p.input_scale[ExpertOfRow(p.rows.starts, p.num_experts, sorted_row)];
    if (block == 0 && p.row_scale != nullptr) p.row_scale[sorted_row] = g;
  } else {
    g = p.row_scale[sorted_row];
  }
  const SplitBlock<T> split(values);
  // Infinities count as NaN.
  const float largest = split.largest < BitsFloat(kInfinityBits) ? split.largest : BitsFloat(kNan);
  const BlockScale scale = FindBlockScale(largest, MakeBlockDivisor(g));
  if (p.rounded == nullptr) {
    reinterpret_cast<uint2*>(p.codes)[index] = EncodeBlock(split, scale.value * g);
    p.block_scale[index] = scale.byte;
    return;
  }
  RoundBlock(split, scale.value, scale.value * g, values);
  StoreBlock(static_cast<T*>(p.rounded) + index * kBlock, values);
}

template <typename T>
cudaError_t LaunchQuantizeRowsOf(cudaStream_t stream, const RowQuantizer& p) {
  if (p.input_scale == nullptr) {
    NVFP4_RETURN_IF_CUDA_ERROR(
        Launch(stream, dim3(static_cast<unsigned>(p.max_rows)), kThreads, ScaleRows<T>, p));
  }
  const int64_t blocks = CeilDiv(p.max_rows * (p.k / kBlock), kThreads);
  return Launch(stream, dim3(static_cast<unsigned>(blocks)), kThreads, QuantizeRows<T>, p);
}

template <typename T>
cudaError_t LaunchQuantizeOf(cudaStream_t stream, const QuantizeBuffers& p,
                             const QuantizeShape& shape) {
  const int64_t blocks = CeilDiv(shape.padded_rows * shape.padded_blocks, kThreads);
  return Launch(stream, dim3(static_cast<unsigned>(blocks)), kThreads, Quantize<T>, p, shape);
}

}  // namespace

cudaError_t LaunchQuantizeRows(cudaStream_t stream, const RowQuantizer& quantizer) {
  switch (quantizer.type) {
    case DataType::kBF16:
      return LaunchQuantizeRowsOf<__nv_bfloat16>(stream, quantizer);
    case DataType::kF16:
      return LaunchQuantizeRowsOf<__half>(stream, quantizer);
    case DataType::kF32:
      return LaunchQuantizeRowsOf<float>(stream, quantizer);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchQuantize(cudaStream_t stream, int64_t m, int64_t k, DataType type,
                           bool swizzle_128x4, const QuantizeBuffers& buffers) {
  const int64_t blocks = k / kBlock;
  const QuantizeShape shape = {m, blocks, swizzle_128x4 ? CeilDiv(m, 128) * 128 : m,
                               swizzle_128x4 ? CeilDiv(blocks, 4) * 4 : blocks, swizzle_128x4};
  switch (type) {
    case DataType::kBF16:
      return LaunchQuantizeOf<__nv_bfloat16>(stream, buffers, shape);
    case DataType::kF16:
      return LaunchQuantizeOf<__half>(stream, buffers, shape);
    case DataType::kF32:
      return LaunchQuantizeOf<float>(stream, buffers, shape);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4
