// Sorts (token, choice) slots by expert and cuts each expert's rows into tiles.
//
//   expert_ids [slots] -> starts [e + 1], slots [rows], tiles
//
// Bound by: latency; 65535 ids are 256 KiB. So one block does it all, with 16 warps that each
// own a contiguous segment of the slots and a row of 16-bit counters in shared memory:
//   1. each warp counts its ids, 32 at a time; lanes with equal ids find each other by match_any
//   2. prefix sums over warps within an expert, then over experts
//   3. each warp walks its segment again and writes slots; equal lanes are ranked by lane
// The order is that of a stable sort, and no step depends on timing.
//
// Needs: e <= kMaxExperts, slots <= 65535 (checked in cuda_bindings.cc, kept by moe.cu).
// Test: test_cuda_kernel.py.
#include "launch.h"
#include "launch_kernel.cuh"
#include "routing.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kAllLanes = 0xffffffffu;

static_assert(kMaxExperts <= 32 * 32, "WriteTiles and the scans take 32 experts a step");

// Exclusive prefix sum over the lanes of a warp; `total` is the sum.
__device__ int64_t WarpExclusiveSum(int64_t value, int lane, int64_t* total) {
  int64_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  *total = __shfl_sync(kAllLanes, sum, 31);
  return sum - value;
}

// starts[i] = min(sum of counts[0 .. i), limit), by one warp. `counts` and `starts` may be the
// same array, and negative counts are 0.
__device__ void PrefixSum(const int32_t* counts, int experts, int64_t limit, int32_t* starts) {
  const int lane = threadIdx.x % 32;
  int64_t before = 0;
  for (int first = 0; first < experts; first += 32) {
    const int expert = first + lane;
    const int32_t count = expert < experts ? counts[expert] : 0;
    int64_t total;
    const int64_t sum = before + WarpExclusiveSum(count > 0 ? count : 0, lane, &total);
    if (expert < experts) starts[expert] = static_cast<int32_t>(sum < limit ? sum : limit);
    before += total;
  }
  if (lane == 0) starts[experts] = static_cast<int32_t>(before < limit ? before : limit);
}

// All threads of the block; `starts` and `first_tile` are in shared memory.
__device__ void WriteTiles(const int32_t* starts, int experts, int32_t* first_tile,
                           const ExpertRows& rows) {
  for (int i = threadIdx.x; i < experts; i += kThreads) {
    first_tile[i] = (starts[i + 1] - starts[i] + kTileRows - 1) / kTileRows;
  }
  __syncthreads();
  if (threadIdx.x < 32) PrefixSum(first_tile, experts, INT32_MAX, first_tile);
  __syncthreads();
  for (int i = threadIdx.x; i <= experts; i += kThreads) rows.starts[i] = starts[i];
  if (threadIdx.x == 0) *rows.num_tiles = first_tile[experts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int expert = warp; expert < experts; expert += kWarps) {
    const int32_t end = starts[expert + 1];
    const int32_t tiles = first_tile[expert + 1] - first_tile[expert];
    for (int32_t tile = lane; tile < tiles; tile += 32) {
      const int32_t row = starts[expert] + tile * kTileRows;
      const int32_t left = end - row;
      rows.tiles[first_tile[expert] + tile] = {expert, row, left < kTileRows ? left : kTileRows};
    }
  }
}

struct Segment {
  int begin;
  int end;
};

// The slots of a warp; its length is a multiple of 32 except at the end of all slots.
__device__ Segment WarpSegment(int num_slots) {
  const int length = (num_slots + kThreads - 1) / kThreads * 32;
  const int begin = static_cast<int>(threadIdx.x / 32) * length;
  const int end = begin + length;
  return {begin < num_slots ? begin : num_slots, end < num_slots ? end : num_slots};
}

__global__ void __launch_bounds__(kThreads)
    SortByExpert(const int32_t* expert_ids, int num_slots, int num_experts, ExpertRows rows) {
  __shared__ uint16_t counts[kWarps * kMaxExperts];  // then: rows before this warp's, by expert
  __shared__ int32_t starts[kMaxExperts + 1];
  __shared__ int32_t first_tile[kMaxExperts + 1];
  const int lane = threadIdx.x % 32;
  uint16_t* warp_counts = counts + static_cast<int>(threadIdx.x / 32) * num_experts;
  for (int i = threadIdx.x; i < kWarps * num_experts; i += kThreads) counts[i] = 0;
  __syncthreads();

  const Segment segment = WarpSegment(num_slots);
  for (int first = segment.begin; first < segment.end; first += 32) {
    const int slot = first + lane;
    const int32_t id = slot < segment.end ? expert_ids[slot] : -1;
    const bool routed = id >= 0 && id < num_experts;
    const uint32_t equal = __match_any_sync(kAllLanes, routed ? id : -1);
    if (routed && lane == __ffs(equal) - 1) warp_counts[id] += __popc(equal);
    __syncwarp();
  }
  __syncthreads();

  for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    int sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      const int count = counts[warp * num_experts + expert];
      counts[warp * num_experts + expert] = static_cast<uint16_t>(sum);
      sum += count;
    }
    starts[expert] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) PrefixSum(starts, num_experts, num_slots, starts);
  __syncthreads();

  for (int first = segment.begin; first < segment.end; first += 32) {
    const int slot = first + lane;
    const int32_t id = slot < segment.end ? expert_ids[slot] : -1;
    const bool routed = id >= 0 && id < num_experts;
    const uint32_t equal = __match_any_sync(kAllLanes, routed ? id : -1);
    const int rank = __popc(equal & ((1u << lane) - 1));
    if (routed) rows.slots[starts[id] + warp_counts[id] + rank] = slot;
    __syncwarp();  // every lane has read the counter that its leader now moves on
    if (routed && rank == 0) warp_counts[id] += __popc(equal);
    __syncwarp();
  }
  WriteTiles(starts, num_experts, first_tile, rows);
}

__global__ void __launch_bounds__(kThreads)
    GroupTiles(const int32_t* group_sizes, int num_rows, int num_experts, ExpertRows rows) {
  __shared__ int32_t starts[kMaxExperts + 1];
  __shared__ int32_t first_tile[kMaxExperts + 1];
  if (threadIdx.x < 32) PrefixSum(group_sizes, num_experts, num_rows, starts);
  __syncthreads();
  WriteTiles(starts, num_experts, first_tile, rows);
}

}  // namespace

cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows) {
  return Launch(stream, dim3(1), kThreads, SortByExpert, expert_ids, static_cast<int>(num_slots),
                static_cast<int>(num_experts), rows);
}

cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t num_rows,
                             int64_t num_experts, const ExpertRows& rows) {
  return Launch(stream, dim3(1), kThreads, GroupTiles, group_sizes, static_cast<int>(num_rows),
                static_cast<int>(num_experts), rows);
}

}  // namespace nvfp4
