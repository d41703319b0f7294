// Joins the results of attention for the parts of the keys, in the order of the parts.
//
//   values [b, m, splits, t g, dv], sums [b, m, splits, t g] -> y [b, t, n, dv]
//
// A block joins 128 channels of one row. Each warp reads the sums of all parts. It requests the
// values of every eighth part that has keys, up to 12 at once, and meanwhile finds the weight of
// each part. Then the block adds the results of its warps. Parts without keys have the sum 0, and
// their values are not read. A sum that is NaN makes the result NaN.
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
// Each lane of a warp has the sums of up to kLaneParts parts. A warp requests the values of its
// kAtOnce parts among those of kTogether rounds of lanes together.
constexpr int kLaneParts = static_cast<int>(CeilDiv(kSplitBlocks, 32));
constexpr int kTogether = 3;
constexpr int kInLanes = 32 / kWarps;  // parts of a warp among those of one round of lanes
constexpr int kAtOnce = kTogether * kInLanes;

struct MergeGrid {
  AttentionCall call;
  Parts parts;
  const float* sinks;
  void* y;
  int32_t group, rows, splits;
  int32_t pieces;  // blocks of a row
};

// What a lane knows of the parts lane, 32 + lane, ... of a row: their sums, and then their weights.
struct LaneParts {
  PartSum sums[kLaneParts];
  float weights[kLaneParts];
};

// Calls function(i, lanes, of_lane) for each part of this warp in batch `batch`: its place in the
// batch, and where LaneParts has it.
template <typename Function>
__device__ __forceinline__ void EachPart(int batch, int splits, const Function& function) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int lanes = batch * kTogether + i / kInLanes;
    if (lanes >= kLaneParts || 32 * lanes >= splits) break;
    function(i, lanes, warp + kWarps * (i % kInLanes));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) MergeParts(const MergeGrid p) {
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
  LaneParts parts = {};
#pragma unroll
  for (int i = 0; i < kLaneParts; ++i) {
    const int part = 32 * i + lane;
    if (part < p.splits) parts.sums[i] = p.parts.sums[first + static_cast<int64_t>(part) * p.rows];
  }
  float4 values[kAtOnce];
  const auto request = [&](int batch) {
    EachPart(batch, p.splits, [&](int i, int lanes, int of_lane) {
      values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const bool exists = __shfl_sync(kAllLanes, parts.sums[lanes].sum, of_lane) != 0.0f;
      if (!exists || column >= width) return;
      const int64_t source = first + static_cast<int64_t>(32 * lanes + of_lane) * p.rows;
      values[i] = __ldcg(reinterpret_cast<const float4*>(p.parts.values + source * width + column));
    });
  };
  request(0);  // arrives while the weights are computed

  // Each warp computes the same maximum, sum and weights.
  float most = sink;
#pragma unroll
  for (int i = 0; i < kLaneParts; ++i) {
    if (parts.sums[i].sum != 0.0f) most = fmaxf(most, parts.sums[i].largest);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneParts; ++i) {
    const PartSum own = parts.sums[i];
    if (own.sum == 0.0f) continue;
    parts.weights[i] = FastExp2(own.largest - most);
    total = fmaf(own.sum, parts.weights[i], total);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  if (sink != -INFINITY) total += FastExp2(sink - most);
  const float inverse = total != 0.0f ? FastReciprocal(total) : 0.0f;

  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int batch = 0; batch * kTogether < kLaneParts; ++batch) {
    if (32 * kTogether * batch >= p.splits) break;
    if (batch > 0) request(batch);
    EachPart(batch, p.splits, [&](int i, int lanes, int of_lane) {
      const float weight = __shfl_sync(kAllLanes, parts.weights[lanes], of_lane);
      if (weight == 0.0f) return;  // its values may be infinite
      sum.x = fmaf(values[i].x, weight, sum.x);
      sum.y = fmaf(values[i].y, weight, sum.y);
      sum.z = fmaf(values[i].z, weight, sum.z);
      sum.w = fmaf(values[i].w, weight, sum.w);
    });
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
