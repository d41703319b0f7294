// Quantizes to NVFP4, with the same bits as `numerics.nvfp4.quantize`.
//
//   Quantize      x [m, k] with one global scale -> packed [m, k/2] and block_scale, in linear or
//                 128x4 order
//   QuantizeRows  rows of experts -> codes, block scales, and a global scale for each row; or
//                 code * block scale in the type of the rows, for the engines on 16 bits
//
// Bottleneck: reading x. A thread has two blocks of 16 values in flight. A block is 32 or 64 bytes
// in, and 9 bytes or as many out. A value takes 15 instructions. Quotients are those of IEEE
// division (nvfp4.h), so that ties fall as in the reference.
//
// If the caller gives no global scale, FindAmax reads x first and leaves 256 partial maxima. Each
// block of Quantize reduces them again, which saves a launch.
//
// QuantizeRows differs from the reference in one point, which FindActivationScale explains.
// Test: tests/gpu/test_cuda_quantizer.py.
#include <cstring>

#include "cuda/call_with_type.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/quantizers/quantize.cuh"
#include "cuda/quantizers/quantize_block.cuh"
#include "cuda/routing/find_expert.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxRowThreads = 1024;  // most threads that share a row in QuantizeRows
constexpr int kChunk = 512;           // blocks per thread block: one tile of the 128x4 order
constexpr int kTileRows = 128, kTileBlocks = 4;
static_assert(kAmaxPartials == kThreads);

// Block-wide maximum of the bits of magnitudes. Bits as unsigned numbers are ordered as the
// magnitudes are, with NaN above infinity, so that a NaN is not lost.
__device__ __forceinline__ uint32_t LargestOfBlock(uint32_t bits, int threads) {
  __shared__ uint32_t warp_largest[kMaxRowThreads / 32];
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = bits;
  __syncthreads();
  for (int warp = 0; warp < threads / 32; ++warp) bits = max(bits, warp_largest[warp]);
  return bits;
}

// Loads 16 values, which are 32 or 64 bytes.
template <typename T>
__device__ __forceinline__ void LoadBlock(const T* source, T (&values)[kBlock]) {
  uint4 words[sizeof(T)];
#pragma unroll
  for (int w = 0; w < static_cast<int>(sizeof(T)); ++w) {
    words[w] = __ldg(reinterpret_cast<const uint4*>(source) + w);
  }
  std::memcpy(values, words, sizeof(words));
}

struct QuantizeShape {
  int64_t m;
  int64_t blocks;      // per row
  uint32_t row_tiles;  // tiles of the 128x4 order in 128 rows
};

// partials[b] = bits of the largest magnitude that block b reads. Block b reads kThreads vectors of
// x, then those kAmaxPartials * kThreads further, and so on.
template <typename T>
__global__ void __launch_bounds__(kThreads) FindAmax(const QuantizeBuffers p, int64_t vectors) {
  constexpr int kAhead = 8;  // loads in flight
  constexpr int64_t kStride = int64_t{kAmaxPartials} * kThreads;
  const uint4* x = static_cast<const uint4*>(p.x);
  LargestMagnitude<T> largest;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors;
       i += kAhead * kStride) {
    uint4 words[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      words[j] = i + j * kStride < vectors ? __ldg(x + i + j * kStride) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      largest.Add(words[j].x);
      largest.Add(words[j].y);
      largest.Add(words[j].z);
      largest.Add(words[j].w);
    }
  }
  const uint32_t bits = LargestOfBlock(FloatBits(largest.Value()), kThreads);
  if (threadIdx.x == 0) p.partials[blockIdx.x] = bits;
}

// A thread block quantizes one tile of the 128x4 order, or kChunk consecutive blocks.
template <typename T, bool kSwizzled>
__global__ void __launch_bounds__(kThreads)
    Quantize(const QuantizeBuffers p, const QuantizeShape shape) {
  constexpr int kBlocks = kChunk / kThreads;
  int64_t sources[kBlocks];
  bool inside[kBlocks];
  T values[kBlocks][kBlock];
  const int64_t first = int64_t{blockIdx.x} * kChunk + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if constexpr (kSwizzled) {
      // Threads follow the order in which scales are stored, so that a warp writes whole sectors.
      const uint32_t place = threadIdx.x + i * kThreads;
      const int64_t row = int64_t{blockIdx.x / shape.row_tiles} * kTileRows + place / 16 +
                          place % 16 / kTileBlocks * 32;
      const int64_t block =
          int64_t{blockIdx.x % shape.row_tiles} * kTileBlocks + place % kTileBlocks;
      inside[i] = row < shape.m && block < shape.blocks;
      sources[i] = row * shape.blocks + block;
    } else {
      sources[i] = first + i * kThreads;
      inside[i] = sources[i] < shape.m * shape.blocks;
    }
    if (inside[i]) LoadBlock(static_cast<const T*>(p.x) + sources[i] * kBlock, values[i]);
  }
  const float g = p.global_scale != nullptr
                      ? *p.global_scale
                      : GlobalScale(BitsFloat(LargestOfBlock(p.partials[threadIdx.x], kThreads)));
  if (first == 0) *p.used_scale = g;
  const BlockDivisor divisor = MakeBlockDivisor(g);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    uint8_t byte = 0;  // padding scales are zero
    if (inside[i]) {
      const SplitBlock<T> split(values[i]);
      const BlockScale scale = FindBlockScale(split.largest, divisor);
      byte = scale.byte;
      reinterpret_cast<uint2*>(p.packed)[sources[i]] = EncodeBlock(split, scale.value * g);
    }
    if (kSwizzled || inside[i]) p.block_scale[first + i * kThreads] = byte;
  }
}

// QuantizeRows may write to the rows that it reads (RowQuantizer::rounded), so that loads must not
// use the read-only cache.
template <typename T>
using SourceRow = PlainRow<T, Access::kReadWrite>;

// Finds the source row of a sorted row, and the weight that multiplies it.
template <typename T>
__device__ SourceRow<T> OpenSource(const RowQuantizer& p, int64_t sorted_row) {
  SourceRow<T> source;
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

// amax(row) / 2688, computed by the `threads` threads of a block.
template <typename T>
__device__ __forceinline__ float ScaleOfRow(SourceRow<T> source, int threads) {
  LargestMagnitude<T> largest;
  for (int block = static_cast<int>(threadIdx.x); block < source.num_blocks; block += threads) {
    T values[kBlock];
    source.Load(block);
    source.Values(values);
    uint32_t words[4 * sizeof(T)];
    std::memcpy(words, values, sizeof(words));
#pragma unroll
    for (const uint32_t word : words) largest.Add(word);
  }
  return GlobalScale(BitsFloat(LargestOfBlock(FloatBits(largest.Value()), threads)));
}

// A block quantizes one row. A row with a scale of its own is read twice; the second read hits L1.
template <typename T>
__global__ void __launch_bounds__(kMaxRowThreads) QuantizeRows(const RowQuantizer p, int threads) {
  const int64_t sorted_row = blockIdx.x;
  if (p.rows.starts != nullptr && sorted_row >= p.rows.starts[p.num_experts]) return;
  SourceRow<T> source = OpenSource<T>(p, sorted_row);
  const bool by_expert = p.input_scale != nullptr;
  const float g = by_expert ? p.input_scale[FindExpert(p.rows.starts, p.num_experts,
                                                       static_cast<int32_t>(sorted_row))]
                            : ScaleOfRow(source, threads);
  if (threadIdx.x == 0 && p.row_scale != nullptr) p.row_scale[sorted_row] = g;
  const BlockDivisor divisor = MakeBlockDivisor(g);
  const int stride = max(p.padded_k, p.k) / kBlock;
  for (int block = static_cast<int>(threadIdx.x); block < source.num_blocks; block += threads) {
    T values[kBlock];
    source.Load(block);
    source.Values(values);
    const SplitBlock<T> split(values);
    const BlockScale scale = FindActivationScale(split, divisor);
    const int64_t index = sorted_row * stride + block;
    if (p.rounded == nullptr) {
      reinterpret_cast<uint2*>(p.codes)[index] = EncodeBlock(split, scale.value * g);
      p.block_scale[index] = scale.byte;
    } else {
      RoundBlock(split, scale.value, scale.value * g, values);
      StoreBlock(static_cast<T*>(p.rounded) + index * kBlock, values);
    }
  }
  const int pad =
      source.num_blocks + static_cast<int>(threadIdx.x);  // fewer than 32 padding blocks
  if (pad < stride) {
    reinterpret_cast<uint2*>(p.codes)[sorted_row * stride + pad] = make_uint2(0, 0);
    p.block_scale[sorted_row * stride + pad] = 0;
  }
}

template <typename T>
cudaError_t LaunchQuantizeRowsOf(cudaStream_t stream, const RowQuantizer& p) {
  const int64_t warps = CeilDiv(p.k / kBlock, 32);
  const int threads = static_cast<int>(warps < kMaxRowThreads / 32 ? 32 * warps : kMaxRowThreads);
  return Launch(stream, dim3(static_cast<unsigned>(p.max_rows)), threads, QuantizeRows<T>, p,
                threads);
}

template <typename T>
cudaError_t LaunchQuantizeOf(cudaStream_t stream, const QuantizeCall& call,
                             const QuantizeBuffers& p) {
  if (p.global_scale == nullptr) {
    const int64_t vectors = call.m * call.k * static_cast<int64_t>(sizeof(T)) / 16;
    NVFP4_RETURN_IF_CUDA_ERROR(
        Launch(stream, dim3(kAmaxPartials), kThreads, FindAmax<T>, p, vectors));
  }
  const int64_t blocks = call.k / kBlock, row_tiles = CeilDiv(blocks, kTileBlocks);
  const QuantizeShape shape = {call.m, blocks, static_cast<uint32_t>(row_tiles)};
  const int64_t chunks = call.swizzle_128x4 ? CeilDiv(call.m, kTileRows) * row_tiles
                                            : CeilDiv(call.m * blocks, kChunk);
  // At least one block runs, since it writes the scale that was used.
  const dim3 grid(static_cast<unsigned>(chunks > 0 ? chunks : 1));
  return chunks > 0 && call.swizzle_128x4
             ? Launch(stream, grid, kThreads, Quantize<T, true>, p, shape)
             : Launch(stream, grid, kThreads, Quantize<T, false>, p, shape);
}

}  // namespace

cudaError_t LaunchQuantizeRows(cudaStream_t stream, const RowQuantizer& quantizer) {
  return CallWithType(quantizer.type, [&](auto type) {
    return LaunchQuantizeRowsOf<decltype(type)>(stream, quantizer);
  });
}

cudaError_t LaunchQuantize(cudaStream_t stream, const QuantizeCall& call,
                           const QuantizeBuffers& buffers) {
  return CallWithType(call.type, [&](auto type) {
    return LaunchQuantizeOf<decltype(type)>(stream, call, buffers);
  });
}

}  // namespace nvfp4
