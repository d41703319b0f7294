// Sorts (token, choice) slots by expert, and schedules the GEMMs of the sorted rows.
//
//   expert_ids [slots] -> starts [e + 1], slots [rows], tiles, and the schedules of the GEMMs
//
// Bottleneck: latency. Fetching instructions is part of it, so that most loops are not unrolled.
//
// Up to kSegmentSlots slots form one segment, and one block of threads does everything. More slots
// are cut into segments, one for each block, and CountSegment counts each segment first. A block
// has 16 warps. Each warp owns a contiguous part of the segment and a row of 16-bit counters:
//   1. Each warp loads all of its ids at once, and counts them 32 at a time. Lanes with equal ids
//      find each other by match_any, and their order is that of the lanes.
//   2. The block takes prefix sums over warps and segments, for each expert.
//   3. The block writes the tiles and schedules (write_schedule.cuh).
//   4. Each slot now knows its sorted row, and the first slot of a tile writes the tile. The first
//      block writes the schedules.
// Three barriers separate these steps. The order is that of a stable sort, and no step depends on
// timing.
//
// Needs: 1 <= e <= kMaxExperts, which cuda_bindings.cc checks, and at most 65536 slots, which the
// files in layers/ ensure. Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py.
#include "cuda/routing/sort_by_expert.cuh"

#include <algorithm>

#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/scheduling/write_schedule.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = kScheduleWarps;
constexpr int kThreads = kScheduleThreads;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kSegmentSlots = 2048;
constexpr int kRounds = kSegmentSlots / kThreads;  // at most; a warp counts 32 slots in a round
static_assert(kChunkSlots / kSegmentSlots <= kMaxSegments, "counts of each segment");

// Counts the rows of each expert in the segment of this block: counts[segment, expert].
__global__ void __launch_bounds__(kThreads, 1)
    CountSegment(const int32_t* expert_ids, int num_slots, int num_experts, int32_t* counts) {
  __shared__ int32_t sums[kMaxExperts];
  for (int i = threadIdx.x; i < num_experts; i += kThreads) sums[i] = 0;
  WaitForPrecedingKernel();
  StartNextKernel();
  __syncthreads();
  const int begin = static_cast<int>(blockIdx.x) * kSegmentSlots;
  const int end = min(begin + kSegmentSlots, num_slots);
  for (int slot = begin + static_cast<int>(threadIdx.x); slot < end; slot += kThreads) {
    const int32_t id = expert_ids[slot];
    if (id >= 0 && id < num_experts) atomicAdd(&sums[id], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    counts[static_cast<int>(blockIdx.x) * num_experts + i] = sums[i];
  }
}

// The counters of a warp. The last ones are for slots that are not routed, and nobody reads them.
using WarpCounts = uint16_t[kMaxExperts + 8];

// Replaces counts[warp][expert] by the number of rows of the expert that come before those of the
// warp, for experts `first` and first + 1. own_rows receives the number of rows of each.
// `segment_counts` are those of CountSegment, if it ran.
__device__ __forceinline__ void SumCounts(WarpCounts (&counts)[kWarps], int first, int num_experts,
                                          const int32_t* segment_counts, int32_t (&own_rows)[2]) {
  // One word counts both experts. A half overflows only at 65536 rows, and then the other expert
  // has no rows.
  uint32_t before = 0;
  if (gridDim.x > 1) {
#pragma unroll 4
    for (unsigned segment = 0; segment < gridDim.x; ++segment) {
      if (segment == blockIdx.x) before = own_rows[0] | static_cast<uint32_t>(own_rows[1]) << 16;
      const int32_t* row = segment_counts + segment * num_experts + first;
      own_rows[0] += row[0];
      if (first + 1 < num_experts) own_rows[1] += row[1];
    }
  }
  uint32_t of_warps[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    of_warps[warp] = *reinterpret_cast<uint32_t*>(&counts[warp][first]);
  }
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    *reinterpret_cast<uint32_t*>(&counts[warp][first]) = before;
    before += of_warps[warp];
  }
  if (gridDim.x == 1) {
    own_rows[0] = static_cast<int32_t>(before & 0xffff);
    own_rows[1] = static_cast<int32_t>(before >> 16);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    SortByExpert(const int32_t* expert_ids, int num_slots, int num_experts, ExpertRows rows,
                 ScheduleInputs inputs) {
  // First the number of rows of a warp, by expert; later the number of rows before it.
  __shared__ __align__(16) WarpCounts counts[kWarps];
  __shared__ ScheduleTables tables;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint16_t* warp_counts = counts[warp];
#pragma unroll 1
  for (int i = lane; 8 * i < num_experts; i += 32) {
    reinterpret_cast<uint4*>(warp_counts)[i] = uint4{};
  }
  WaitForPrecedingKernel();
  StartNextKernel();
  // A single segment may have fewer slots. Its warps then share them evenly, so that there are the
  // fewest rounds.
  const int rounds = gridDim.x > 1 ? kRounds : (num_slots + kThreads - 1u) / kThreads;
  const int first_slot = (static_cast<int>(blockIdx.x) * kWarps + warp) * 32 * rounds + lane;
  int32_t ids[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int slot = first_slot + 32 * round;
    ids[round] = round < rounds && slot < num_slots ? expert_ids[slot] : -1;
  }
  if (blockIdx.x == 0) ZeroReadyFlags(inputs.schedules);
  __syncwarp();

  int32_t places[kRounds];  // among the rows of this warp and expert
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (round >= rounds) break;
    if (ids[round] < 0 || ids[round] >= num_experts) ids[round] = kMaxExperts;
    uint16_t* counter = &warp_counts[ids[round]];
    const int before = *counter;
    const uint32_t equal = __match_any_sync(kAllLanes, ids[round]);
    places[round] = before + __popc(equal & ((1u << lane) - 1));
    __syncwarp();  // all lanes must read the counter before the last of the equal lanes adds to it
    if (equal >> lane == 1) *counter = static_cast<uint16_t>(places[round] + 1);
    __syncwarp();
  }
  __syncthreads();

  const int first = 2 * static_cast<int>(threadIdx.x);  // of two experts
  int32_t own_rows[2] = {};
  if (first < num_experts) SumCounts(counts, first, num_experts, rows.counts, own_rows);
  FillScheduleTables(own_rows, num_experts, rows, inputs, &tables);

#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (round >= rounds) break;
    const int32_t id = ids[round];
    if (id == kMaxExperts) continue;
    const int32_t start = tables.starts[id];
    const int32_t place = warp_counts[id] + places[round];  // among the rows of the expert
    rows.slots[start + place] = first_slot + 32 * round;
    const int32_t tile = inputs.by_tile_rows.Divide(place);
    if (tile * inputs.rule.tile_rows != place) continue;
    rows.tiles[tables.first_tile[id] + tile] = {id, start + place, start, tables.starts[id + 1]};
  }
  if (blockIdx.x > 0) return;
  EndTileList(inputs, tables, rows);
  WriteSchedules(inputs, tables, num_experts);
}

}  // namespace

cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                               const TileSchedules& schedules) {
  const auto slots = static_cast<int>(num_slots), experts = static_cast<int>(num_experts);
  const auto segments =
      static_cast<unsigned>(std::max<int64_t>(CeilDiv(num_slots, kSegmentSlots), 1));
  if (segments > 1) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchWide(stream, dim3(segments), kThreads, 0, /*overlaps=*/true,
                                          CountSegment, expert_ids, slots, experts, rows.counts));
  }
  return LaunchWide(stream, dim3(segments), kThreads, 0, /*overlaps=*/true, SortByExpert,
                    expert_ids, slots, experts, rows, MakeScheduleInputs(rule, schedules));
}

}  // namespace nvfp4
