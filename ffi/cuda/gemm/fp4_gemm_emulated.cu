// Emulates the GEMM of fp4_groups.cuh with plain arithmetic. It reads the same arrays as the
// collectives of fp4_gemm_sm100.cu. All other kernels for 10.x can therefore run on other GPUs, and
// on a CPU. It is for tests, and only builds with NVFP4_EMULATE_BLACKWELL have it.
//
// A sum of 16 products of codes is exact. It is scaled and added in float32, one block after the
// other.
#include "cuda/gemm/fp4_groups.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"

#if NVFP4_EMULATE_BLACKWELL

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;

// One row of an operand of a group.
struct OperandRow {
  const uint8_t* codes;
  const uint8_t* scales;

  __device__ OperandRow(const GroupOperand& operand, int32_t group, int32_t row) {
    const ScaleLayout& layout = operand.scale_layouts[group];
    codes = operand.codes[group] + row * operand.strides[group] / 2;
    scales = operand.scales[group] + static_cast<int64_t>(row / 128) * layout.row_stride +
             row % 32 * 16 + row % 128 / 32 * 4;
  }

  __device__ float Scale(int32_t block) const {
    return DecodeE4M3(scales[block / 4 * int64_t{512} + block % 4]);
  }

  __device__ void Values(int32_t block, float (&values)[16]) const {
    const uint2 words = reinterpret_cast<const uint2*>(codes)[block];
    DecodeWord(words.x, 1.0f, values);
    DecodeWord(words.y, 1.0f, values + 8);
  }
};

__global__ void __launch_bounds__(kThreads) EmulateGroups(const Fp4Groups p) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int32_t group = 0; group < p.count; ++group) {
    const GroupShape shape = p.shapes[group];
    for (int64_t i = thread; i < static_cast<int64_t>(shape.m) * shape.n; i += threads) {
      const auto column = static_cast<int32_t>(i % shape.m),
                 row = static_cast<int32_t>(i / shape.m);
      const OperandRow a(p.weights, group, column), b(p.rows, group, row);
      float sum = 0.0f;
      for (int32_t block = 0; block < shape.k / kBlock; ++block) {
        float x[16], y[16], dot = 0.0f;
        a.Values(block, x);
        b.Values(block, y);
        for (int j = 0; j < kBlock; ++j) dot += x[j] * y[j];
        sum += a.Scale(block) * b.Scale(block) * dot;
      }
      static_cast<__nv_bfloat16*>(p.outputs[group])[row * p.output_strides[group] + column] =
          FromFloat<__nv_bfloat16>(*p.alphas[group] * sum);
    }
  }
}

}  // namespace

cudaError_t LaunchFp4GemmEmulated(cudaStream_t stream, const Fp4Groups& groups) {
  const dim3 grid(static_cast<unsigned>(4 * MultiprocessorCount()));
  return Launch(stream, grid, kThreads, EmulateGroups, groups);
}

}  // namespace nvfp4

#endif
