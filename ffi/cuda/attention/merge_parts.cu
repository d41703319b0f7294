// Joins the results of attention for the parts of the keys, in the order of the parts.
//
//   values [b, m, splits, t g, dv], sums [b, m, splits, t g] -> y [b, t, n, dv]
//
// A block joins 128 channels of one row. First each thread reads the sums of some parts, and the
// block finds the weight of each part. Then each warp adds the values of every eighth part, and the
// block adds those of its warps. Parts without keys have the sum 0, and are not read. A sum that is
// NaN makes the result NaN.
//
// Bottleneck: latency. Test: tests/emulation/test_emulation_attention.py.
#include "cuda/attention/merge_parts.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/instructions/hopper.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kVector = 4;               // floats that a thread reads at once
constexpr int kChannels = 32 * kVector;  // channels of a block
constexpr int kAtOnce = 4;               // parts of which a thread requests the values together

struct MergeGrid {
  AttentionCall call;
  Parts parts;
  const float* sinks;
  void* y;
  int32_t group, rows, splits;
  int32_t pieces;  // blocks of a row
};

template <typename T>
__global__ void __launch_bounds__(kThreads) MergeParts(const MergeGrid p) {
  __shared__ float weights[kSplitBlocks];
  __shared__ float4 passed[kWarps][32];
  const AttentionShape& shape = p.call.shape;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row_index = static_cast<int>(blockIdx.x) / p.pieces;
  const int column = static_cast<int>(blockIdx.x) % p.pieces * kChannels + lane * kVector;
  const int head_index = row_index / p.rows, row = row_index % p.rows;
  const int num_heads = static_cast<int>(shape.m), width = static_cast<int>(shape.dv);
  const int head = head_index % num_heads * p.group + row % p.group;
  const int64_t first = static_cast<int64_t>(head_index) * p.splits * p.rows + row;
  const float sink = p.sinks == nullptr ? -INFINITY : __ldg(p.sinks + head) * kLog2E;
  WaitForPrecedingKernel();
  StartNextKernel();
  // Each warp computes the same maximum and sum.
  float most = sink;
  for (int part = lane; part < p.splits; part += 32) {
    const PartSum own = p.parts.sums[first + static_cast<int64_t>(part) * p.rows];
    if (own.sum != 0.0f) most = fmaxf(most, own.largest);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  }
  float total = 0.0f;
  for (int part = lane; part < p.splits; part += 32) {
    const PartSum own = p.parts.sums[first + static_cast<int64_t>(part) * p.rows];
    const float weight = own.sum != 0.0f ? FastExp2(own.largest - most) : 0.0f;
    if (own.sum != 0.0f) total = fmaf(own.sum, weight, total);
    if (warp == 0) weights[part] = weight;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  if (sink != -INFINITY) total += FastExp2(sink - most);
  const float inverse = total != 0.0f ? FastReciprocal(total) : 0.0f;
  __syncthreads();

  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int part = warp; part < p.splits; part += kWarps * kAtOnce) {
    float4 loaded[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own = part + i * kWarps;
      weight[i] = own < p.splits ? weights[own] : 0.0f;
      loaded[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (weight[i] == 0.0f || column >= width) continue;
      const int64_t source = first + static_cast<int64_t>(own) * p.rows;
      loaded[i] = __ldcg(reinterpret_cast<const float4*>(p.parts.values + source * width + column));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum.x = fmaf(loaded[i].x, weight[i], sum.x);
      sum.y = fmaf(loaded[i].y, weight[i], sum.y);
      sum.z = fmaf(loaded[i].z, weight[i], sum.z);
      sum.w = fmaf(loaded[i].w, weight[i], sum.w);
    }
  }
  passed[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= width) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    const float4 other = passed[i][lane];
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
  }
  const uint2 words = make_uint2(MakePair<T>(sum.x * inverse, sum.y * inverse),
                                 MakePair<T>(sum.z * inverse, sum.w * inverse));
  const int64_t query = static_cast<int64_t>(head_index / num_heads) * shape.t + row / p.group;
  T* y = static_cast<T*>(p.y) + (query * shape.n + head) * width + column;
  *reinterpret_cast<uint2*>(y) = words;
}

}  // namespace

cudaError_t LaunchMergeParts(cudaStream_t stream, const AttentionCall& call,
                             const AttentionBuffers& buffers, const Parts& parts, int splits) {
  const AttentionShape& shape = call.shape;
  const MergeGrid grid = {call,
                          parts,
                          buffers.sinks,
                          buffers.y,
                          static_cast<int32_t>(shape.group()),
                          static_cast<int32_t>(shape.t * shape.group()),
                          splits,
                          static_cast<int32_t>(CeilDiv(shape.dv, kChannels))};
  const dim3 blocks(static_cast<unsigned>(shape.b * shape.t * shape.n * grid.pieces));
  return call.type == DataType::kBF16
             ? LaunchWide(stream, blocks, kThreads, 0, true, MergeParts<__nv_bfloat16>, grid)
             : LaunchWide(stream, blocks, kThreads, 0, true, MergeParts<__half>, grid);
}

}  // namespace nvfp4
