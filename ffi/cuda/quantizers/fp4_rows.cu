// Prepares the rows of the FP4 GEMMs of compute capability 10.x, and processes their sums.
//
//   ScaleFp4Rows     row_scale[r] = amax(row r) / 2688, if each row has its own scale
//   QuantizeFp4Rows  gathered or activated rows -> codes, and block scales in tiles of 128x4
//   FinishFp4Rows    sums of a GEMM -> y
//
// Bottleneck: reading rows and sums. A thread processes a block of 16 values, or 8 values if
// nothing is quantized. Quotients are those of IEEE division (quantize_block.cuh). The code runs on
// every GPU. Test: tests/emulation/test_emulation_sm100.py.
#include "cuda/quantizers/fp4_rows.cuh"

#include "cuda/epilogues/combine.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/quantizers/quantize_block.cuh"
#include "cuda/routing/find_expert.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // bfloat16 in 16 bytes

__device__ __forceinline__ float Round(float value) {
  return ToFloat(FromFloat<__nv_bfloat16>(value));
}

template <int kCount>
__device__ __forceinline__ void LoadValues(const __nv_bfloat16* source, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += kVector) {
    __nv_bfloat16 loaded[kVector];
    *reinterpret_cast<uint4*>(loaded) = __ldg(reinterpret_cast<const uint4*>(source + i));
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[i + j] = ToFloat(loaded[j]);
  }
}

// Loads block `block` of sorted row `row`.
__device__ void LoadBlock(const GatheredRows& p, int64_t row, int32_t, int32_t block,
                          float (&values)[kBlock]) {
  const int64_t slot = p.slots != nullptr ? p.slots[row] : row;
  const int64_t x_row = p.slots != nullptr ? slot / p.slots_per_row : slot;
  LoadValues(p.x + x_row * p.k + block * kBlock, values);
  if (p.slot_weights == nullptr) return;
  const float weight = p.slot_weights[slot];
#pragma unroll
  for (int j = 0; j < kBlock; ++j) values[j] = Round(values[j] * weight);
}

// Activates a block. The kind of activation is chosen once for sixteen values, so that the
// instructions that run are contiguous.
template <Activation kKind, bool kGated>
__device__ __forceinline__ void ActivateAs(ActivationParameters p, const float (&gates)[kBlock],
                                           const float (&ups)[kBlock], float (&values)[kBlock]) {
  p.kind = kKind;
#pragma unroll
  for (int j = 0; j < kBlock; ++j) {
    values[j] = Round(kGated ? ActivateGated(p, gates[j], ups[j]) : ActivateGate(p, gates[j]));
  }
}

template <bool kGated>
__device__ __forceinline__ void ActivateBlock(const ActivationParameters& p,
                                              const float (&gates)[kBlock],
                                              const float (&ups)[kBlock], float (&values)[kBlock]) {
  switch (p.kind) {
    case Activation::kSilu:
      return ActivateAs<Activation::kSilu, kGated>(p, gates, ups, values);
    case Activation::kGelu:
      return ActivateAs<Activation::kGelu, kGated>(p, gates, ups, values);
    case Activation::kGeluTanh:
      return ActivateAs<Activation::kGeluTanh, kGated>(p, gates, ups, values);
    case Activation::kSwigluOai:
      return ActivateAs<Activation::kSwigluOai, kGated>(p, gates, ups, values);
    case Activation::kRelu2:
      return ActivateAs<Activation::kRelu2, kGated>(p, gates, ups, values);
  }
}

__device__ void LoadBlock(const ActivatedRows& p, int64_t row, int32_t expert, int32_t block,
                          float (&values)[kBlock]) {
  const __nv_bfloat16* sums = p.sums.values + row * p.sums.stride;
  const int32_t first = block * kBlock;
  const bool interleaved = p.sums.interleaved;
  const float gate_scale = p.sums.Scale(row, expert, 0);
  float gates[kBlock], ups[kBlock] = {};
  if (interleaved) {
    float pairs[2 * kBlock];
    LoadValues(sums + 2 * first, pairs);
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      gates[j] = pairs[2 * j];
      ups[j] = pairs[2 * j + 1];
    }
  } else {
    LoadValues(sums + first, gates);
    if (p.activation.gated) LoadValues(sums + p.k + first, ups);
  }
#pragma unroll
  for (int j = 0; j < kBlock; ++j) {
    const int32_t column = interleaved ? 2 * (first + j) : first + j;
    gates[j] = gates[j] * gate_scale + p.sums.Bias(expert, column);
  }
  if (!p.activation.gated) return ActivateBlock<false>(p.activation, gates, ups, values);
  const float up_scale = p.sums.Scale(row, expert, p.sums.parts - 1);
#pragma unroll
  for (int j = 0; j < kBlock; ++j) {
    const int32_t column = interleaved ? 2 * (first + j) + 1 : first + j + p.k;
    ups[j] = ups[j] * up_scale + p.sums.Bias(expert, column);
  }
  ActivateBlock<true>(p.activation, gates, ups, values);
}

// Returns the largest magnitude as bits. Their order as unsigned numbers puts infinity above all
// numbers, and NaN above infinity.
__device__ __forceinline__ uint32_t LargestBits(const float (&values)[kBlock]) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kBlock; ++j) largest = max(largest, FloatBits(values[j]) & 0x7fffffffu);
  return largest;
}

// A block of threads computes the scale of one row.
template <typename Source>
__global__ void __launch_bounds__(kThreads)
    ScaleFp4Rows(const Fp4Quantizer p, const Source source) {
  __shared__ uint32_t warp_largest[kThreads / 32];
  const int64_t row = blockIdx.x;
  if (row >= p.rows.starts[p.num_experts]) return;
  const int32_t expert = FindExpert(p.rows.starts, p.num_experts, static_cast<int32_t>(row));
  uint32_t largest = 0;
  for (int32_t block = threadIdx.x; block < source.k / kBlock; block += kThreads) {
    float values[kBlock];
    LoadBlock(source, row, expert, block, values);
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
  p.row_scale[row] = GlobalScale(BitsFloat(largest));
}

template <typename Source>
__global__ void __launch_bounds__(kThreads)
    QuantizeFp4Rows(const Fp4Quantizer p, const Source source) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t blocks = p.output.k / kBlock;
  const int64_t row = index / blocks;
  const auto block = static_cast<int32_t>(index % blocks);
  if (row >= p.rows.starts[p.num_experts]) return;
  const int32_t expert = FindExpert(p.rows.starts, p.num_experts, static_cast<int32_t>(row));
  uint8_t byte = 0;
  uint2 codes = make_uint2(0, 0);
  if (block < source.k / kBlock) {
    float values[kBlock];
    LoadBlock(source, row, expert, block, values);
    const float g = p.input_scale != nullptr ? p.input_scale[expert] : p.row_scale[row];
    const SplitBlock<float> split(values);
    const BlockScale scale = FindActivationScale(split, MakeBlockDivisor(g));
    byte = scale.byte;
    codes = EncodeBlock(split, scale.value * g);
  }
  reinterpret_cast<uint2*>(p.output.codes)[index] = codes;
  const int32_t start = p.rows.starts[expert];
  uint8_t* scales =
      p.output.block_scale + FirstScaleTile(start, expert) * (blocks / 4) * kScaleTileBytes;
  scales[Swizzle128x4(row - start, block, blocks)] = byte;
}

template <typename Source>
cudaError_t LaunchQuantizer(cudaStream_t stream, const Fp4Quantizer& p, const Source& source) {
  if (p.input_scale == nullptr) {
    NVFP4_RETURN_IF_CUDA_ERROR(Launch(stream, dim3(static_cast<unsigned>(p.max_rows)), kThreads,
                                      ScaleFp4Rows<Source>, p, source));
  }
  const int64_t blocks = CeilDiv(p.max_rows * (p.output.k / kBlock), kThreads);
  return Launch(stream, dim3(static_cast<unsigned>(blocks)), kThreads, QuantizeFp4Rows<Source>, p,
                source);
}

__device__ __forceinline__ void StoreValues(__nv_bfloat16* row, int32_t column, int32_t columns,
                                            const float (&values)[kVector]) {
  __nv_bfloat16 rounded[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) rounded[j] = FromFloat<__nv_bfloat16>(values[j]);
  if (columns % kVector == 0) {
    *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<const uint4*>(rounded);
    return;
  }
  for (int j = 0; j < kVector && column + j < columns; ++j) row[column + j] = rounded[j];
}

__global__ void __launch_bounds__(kThreads)
    FinishFp4Rows(const Fp4Sums p, const ExpertRows rows, int32_t num_experts, __nv_bfloat16* y) {
  const int32_t vectors = (p.columns + kVector - 1) / kVector;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / vectors;
  const auto column = static_cast<int32_t>(index % vectors) * kVector;
  if (row >= rows.starts[num_experts]) return;
  const int32_t expert = FindExpert(rows.starts, num_experts, static_cast<int32_t>(row));
  float values[kVector];
  LoadValues(p.values + row * p.stride + column, values);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (column + j >= p.columns) break;
    const float scale = p.Scale(row, expert, p.PartOf(column + j));
    values[j] = values[j] * scale + p.Bias(expert, column + j);
  }
  StoreValues(y + row * p.columns, column, p.columns, values);
}

// The outputs of GEMM 2, before scales and bias, as a source of Combine.
struct Fp4Outputs {
  using Value = __nv_bfloat16;
  Fp4Sums sums;
  const int32_t* places;
  int64_t stride;

  __device__ __forceinline__ const __nv_bfloat16* Values() const { return sums.values; }
  __device__ __forceinline__ int32_t Row(int32_t slot) const { return places[slot]; }
  __device__ __forceinline__ float Scale(int64_t row, int32_t expert) const {
    return sums.Scale(row, expert, 0);
  }
  __device__ __forceinline__ float Output(__nv_bfloat16 value, float scale, int32_t expert,
                                          int32_t column) const {
    return ToFloat(value) * scale + sums.Bias(expert, column);
  }
};

}  // namespace

cudaError_t LaunchQuantizeFp4(cudaStream_t stream, const Fp4Quantizer& quantizer,
                              const GatheredRows& source) {
  return LaunchQuantizer(stream, quantizer, source);
}

cudaError_t LaunchQuantizeFp4(cudaStream_t stream, const Fp4Quantizer& quantizer,
                              const ActivatedRows& source) {
  return LaunchQuantizer(stream, quantizer, source);
}

cudaError_t LaunchFinishFp4(cudaStream_t stream, const Fp4Sums& sums, const ExpertRows& rows,
                            int64_t max_rows, int64_t num_experts, __nv_bfloat16* y) {
  const int64_t vectors = CeilDiv(sums.columns, kVector);
  const dim3 grid(static_cast<unsigned>(CeilDiv(max_rows * vectors, kThreads)));
  return Launch(stream, grid, kThreads, FinishFp4Rows, sums, rows,
                static_cast<int32_t>(num_experts), y);
}

cudaError_t LaunchCombineFp4(cudaStream_t stream, const Fp4Combine& combine) {
  const CombineTokens tokens = {combine.expert_ids, combine.expert_weights, combine.y,
                                combine.t,          combine.sums.columns,   combine.top_k,
                                combine.num_experts};
  const Fp4Outputs outputs = {combine.sums, combine.places, combine.sums.stride};
  return LaunchCombine<__nv_bfloat16>(stream, tokens, outputs, /*overlaps=*/false);
}

}  // namespace nvfp4
