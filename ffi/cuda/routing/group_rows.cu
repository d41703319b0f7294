// Schedules the GEMM of rows that come sorted by expert, from the number of rows of each expert.
//
//   group_sizes [e] -> starts [e + 1], tiles, and the schedule of the GEMM
//
// Bottleneck: latency. The first block writes the schedule (write_schedule.cuh). Every block writes
// zeros to some of the output rows that no expert owns.
//
// Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py.
#include "cuda/routing/group_rows.cuh"

#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/scheduling/write_schedule.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = kScheduleWarps;
constexpr int kThreads = kScheduleThreads;
constexpr uint32_t kAllLanes = 0xffffffffu;

// values[0 .. count] = exclusive prefix sums of values[0 .. count). Negative values count as 0.
// Sums are counted from `first_counted` on, and cut to [0, limit]. All threads of the block must
// call it; count <= 2 * kThreads.
__device__ void PrefixSum(int32_t* values, int count, int64_t first_counted, int64_t limit) {
  __shared__ int64_t warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = 2 * static_cast<int>(threadIdx.x);
  const int32_t a = first < count ? max(values[first], 0) : 0;
  const int32_t b = first + 1 < count ? max(values[first + 1], 0) : 0;
  int64_t sum = static_cast<int64_t>(a) + b;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int64_t before = sum - a - b;
  for (int i = 0; i < warp; ++i) before += warp_sums[i];
  const auto clip = [first_counted, limit](int64_t value) {
    const int64_t counted = max(value - first_counted, int64_t{0});
    return static_cast<int32_t>(min(counted, limit));
  };
  if (first <= count) values[first] = clip(before);
  if (first + 1 <= count) values[first + 1] = clip(before + a);
  // The last entry, if no thread has a pair that begins there.
  if (first + 2 == count && count == 2 * kThreads) values[count] = clip(before + a + b);
  __syncthreads();
}
constexpr int kZeroedRows = 64;  // output rows that a block may zero

// The first block writes the tables. All blocks write zeros to output rows.
__global__ void __launch_bounds__(kThreads, 1)
    GroupTiles(const int32_t* group_sizes, int64_t first_row, int num_rows, int num_experts,
               ExpertRows rows, ScheduleInputs inputs, OutputRows y) {
  __shared__ int32_t starts[kMaxExperts + 1];
  __shared__ ScheduleTables tables;
  WaitForPrecedingKernel();
  StartNextKernel();
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    starts[i] = group_sizes == nullptr ? INT32_MAX : group_sizes[i];
  }
  if (blockIdx.x == 0) ZeroReadyFlags(inputs.schedules);
  __syncthreads();
  PrefixSum(starts, num_experts, first_row, num_rows);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kZeroedRows;
  const int64_t begin = max(first, static_cast<int64_t>(starts[num_experts]));
  const int64_t end = min(first + kZeroedRows, static_cast<int64_t>(num_rows));
  uint16_t* words = static_cast<uint16_t*>(y.values);
  for (int64_t i = begin * (y.row_bytes / 2) + threadIdx.x; i < end * (y.row_bytes / 2);
       i += kThreads) {
    words[i] = 0;
  }
  if (blockIdx.x > 0) return;
  int32_t own_rows[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int expert = 2 * static_cast<int>(threadIdx.x) + i;
    if (expert < num_experts) own_rows[i] = starts[expert + 1] - starts[expert];
  }
  FillScheduleTables(own_rows, num_experts, rows, inputs, &tables);
  EndTileList(inputs, tables, rows);
  WriteSchedules(inputs, tables, num_experts);
  for (int32_t tile = threadIdx.x; tile < tables.all.tiles; tile += kThreads) {
    const int expert = FindExpert<true>(tables.first_tile, num_experts, tile);
    const int32_t start = tables.starts[expert];
    const int32_t row = start + (tile - tables.first_tile[expert]) * inputs.rule.tile_rows;
    rows.tiles[tile] = {expert, row, start, tables.starts[expert + 1]};
  }
}

}  // namespace

cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t first_row,
                             int64_t num_rows, int64_t num_experts, const ExpertRows& rows,
                             const TileRule& rule, const TileSchedules& schedules,
                             const OutputRows& y) {
  return LaunchWide(
      stream, dim3(static_cast<unsigned>(CeilDiv(num_rows, kZeroedRows))), kThreads, 0,
      /*overlaps=*/true, GroupTiles, group_sizes, first_row, static_cast<int>(num_rows),
      static_cast<int>(num_experts), rows, MakeScheduleInputs(rule, schedules), y);
}

}  // namespace nvfp4
