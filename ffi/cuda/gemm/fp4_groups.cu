// Writes the arrays of fp4_groups.cuh from the start of each expert's rows, and chooses a
// collective.
//
// A thread writes the entries of one expert, for all GEMMs that share the rows, and the place of
// one sorted row. Test: tests/emulation/test_fp4_groups.py.
#include "cuda/gemm/fp4_groups.cuh"

#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;

__device__ void PackGroup(const Fp4Product& p, int32_t expert, int32_t start, int32_t rows) {
  const Fp4Groups& g = p.groups;
  const int64_t k = p.rows.k, padded_rows = PadTo(p.weight_rows, kScaleTileRows);
  g.shapes[expert] = {p.weight_rows, rows, p.rows.k};
  g.weights.codes[expert] = p.weight.packed + expert * padded_rows * (k / 2);
  g.weights.strides[expert] = k;
  g.weights.scales[expert] = p.weight.block_scale + expert * padded_rows * (k / 16);
  g.weights.scale_layouts[expert] = MakeScaleLayout(p.weight_rows, p.rows.k);
  g.rows.codes[expert] = p.rows.codes + start * (k / 2);
  g.rows.strides[expert] = k;
  g.rows.scales[expert] =
      p.rows.block_scale + FirstScaleTile(start, expert) * (k / kScaleTileK) * kScaleTileBytes;
  g.rows.scale_layouts[expert] = MakeScaleLayout(rows, p.rows.k);
  g.outputs[expert] = p.output + start * p.output_stride;
  g.output_strides[expert] = p.output_stride;
  g.alpha[expert] = p.scaled ? p.weight.global_scale[expert] * p.weight.input_scale[expert] : 1.0f;
  g.alphas[expert] = g.alpha + expert;
}

__global__ void __launch_bounds__(kThreads) PackGroups(const PackedProducts p) {
  const auto index = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const int32_t experts = p.products[0].groups.count;
  if (index < experts) {
    const int32_t start = p.rows.starts[index], rows = p.rows.starts[index + 1] - start;
    for (int i = 0; i < p.count; ++i) PackGroup(p.products[i], index, start, rows);
  }
  if (p.places != nullptr && index < p.rows.starts[experts]) p.places[p.rows.slots[index]] = index;
}

}  // namespace

cudaError_t LaunchPackGroups(cudaStream_t stream, const PackedProducts& products) {
  const int64_t experts = products.products[0].groups.count;
  const int64_t places = products.places != nullptr ? products.max_rows : 0;
  const dim3 grid(static_cast<unsigned>(CeilDiv(experts > places ? experts : places, kThreads)));
  return Launch(stream, grid, kThreads, PackGroups, products);
}

cudaError_t LaunchFp4Gemm([[maybe_unused]] cudaStream_t stream,
                          [[maybe_unused]] const Fp4Groups& groups, [[maybe_unused]] int64_t rows,
                          [[maybe_unused]] void* workspace) {
  [[maybe_unused]] const bool has_instructions = ComputeCapabilityMajor() == 10;
#if NVFP4_EMULATE_BLACKWELL
  if (!has_instructions) return LaunchFp4GemmEmulated(stream, groups);
#endif
#if NVFP4_CUTLASS
  if (has_instructions) {
    return LaunchFp4GemmSm100(stream, groups, rows >= kManyRows * groups.count, workspace);
  }
#endif
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace nvfp4
