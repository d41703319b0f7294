// Sorts (token, choice) slots by expert, cuts each expert's rows into tiles, and plans the walks.
//
//   expert_ids [slots] -> starts [e + 1], slots [rows], tiles, starts of each walk
//
// Bound by: latency. Up to kSegmentSlots slots are one segment and one block does it all; more are
// cut into segments, one for each block, and a kernel before this one counts them. A block has 16
// warps that each own a contiguous part of its segment and a row of 16-bit counters:
//   1. each warp counts its ids, 32 at a time; lanes with equal ids find each other by match_any
//   2. prefix sums over warps and segments within an expert, then over experts
//   3. each warp walks its part again and writes slots; equal lanes are ranked by lane
//   4. the first block writes tiles, and finds each block's place in the lines of sums by
//      bisection over the experts
// The order is that of a stable sort, and no step depends on timing.
//
// Needs: e <= kMaxExperts, slots <= 65535 (checked in cuda_bindings.cc, kept by moe.cu and
// moe_w4a16.cu). Test: test_cuda_kernel.py.
#include "launch.h"
#include "launch_kernel.cuh"
#include "routing.cuh"
#include "sm90.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kSegmentSlots = 2048;
static_assert(65536 / kSegmentSlots <= kMaxSegments, "counts of each segment");

// A block whose part would begin or end within this share of a sum leaves it to the other.
constexpr int kSnapShare = 8;

// Steps of each block that cutting a few sums has to save: handing shares over takes that long.
constexpr int kWorthCutting = 8;

// What the block keeps in shared memory about the experts; prefix sums, so one entry more.
struct Tables {
  int32_t starts[kMaxExperts + 1];      // rows before an expert
  int32_t first_tile[kMaxExperts + 1];  // tiles before it
  int32_t first_cost[kMaxExperts + 1];  // cost of those tiles
  int32_t* size;                        // [kMaxExperts] rows of each of its tiles but the last
};

// values[0 .. count] = exclusive prefix sums of values[0 .. count), negative ones as 0, none above
// `limit`. All threads of the block; count <= 2 * kThreads.
__device__ void PrefixSum(int32_t* values, int count, int64_t limit) {
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
  const auto clip = [limit](int64_t value) {
    return static_cast<int32_t>(value < limit ? value : limit);
  };
  if (first <= count) values[first] = clip(before);
  if (first + 1 <= count) values[first + 1] = clip(before + a);
  // The last entry, where the pairs of all threads end before it.
  if (first + 2 == count && count == 2 * kThreads) values[count] = clip(before + a + b);
  __syncthreads();
}
static_assert(2 * kThreads >= kMaxExperts, "a pair of experts for each thread");

// The expert that place `place` belongs to, of prefix sums counted `times`.
__device__ __forceinline__ int FindExpert(const int32_t* sums, int experts, int32_t times,
                                          int32_t place) {
  int low = 0, high = experts;  // sums[low] * times <= place < sums[high] * times
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const bool right = sums[middle] * times <= place;
    low = right ? middle : low;
    high = right ? high : middle;
  }
  return low;
}

// What all blocks of a walk start from: the sums that are cut, in units of cost. Costs of all sums
// together are below 2^31: up to 2^18 for a block of weight rows, of which there are up to 2^12.
struct Cut {
  int32_t around;  // sums before it go around
  int32_t sums;    // of the product
  int32_t begin;   // cost before `around`
  int32_t share;   // of a block
  int32_t rest;    // blocks that have one unit more
};

__device__ Cut FindCut(const Walk& walk, const Tables& tables, int experts, const TileRule& rule) {
  const int32_t sums = tables.first_tile[experts] * walk.m_blocks;
  const int32_t idle = walk.blocks - sums;  // blocks, if no sum is cut
  if (sums == 0 || (idle >= 0 && idle * walk.k_steps < kWorthCutting * walk.blocks)) {
    return {sums, sums, 0, 0, 0};
  }
  const int32_t around = max(sums / walk.blocks - 1, 0) * walk.blocks;
  const int expert = FindExpert(tables.first_tile, experts, walk.m_blocks, around);
  const int32_t begin = tables.first_cost[expert] * walk.m_blocks +
                        (around - tables.first_tile[expert] * walk.m_blocks) *
                            max(tables.size[expert], rule.min_cost);
  const int32_t cost = tables.first_cost[experts] * walk.m_blocks - begin;
  const int32_t share = cost / walk.blocks;
  return {around, sums, begin, share, cost - share * walk.blocks};
}

// Where block `block` starts.
__device__ Start FindStart(const Walk& walk, const Cut& cut, const Tables& tables, int experts,
                           const TileRule& rule, int block) {
  if (block == walk.blocks || cut.around == cut.sums) return {cut.sums, 0};
  const int32_t place = cut.begin + cut.share * block + min(block, cut.rest);
  const int expert = FindExpert(tables.first_cost, experts, walk.m_blocks, place);
  const int32_t cost = max(tables.size[expert], rule.min_cost);
  const int32_t inside = place - tables.first_cost[expert] * walk.m_blocks;
  const int32_t sum = inside / cost;
  Start start = {tables.first_tile[expert] * walk.m_blocks + sum,
                 (inside - sum * cost) * walk.k_steps / cost};
  const int32_t snap = walk.k_steps / kSnapShare;
  if (start.step <= snap) start.step = 0;
  if (walk.k_steps - start.step <= snap) start = {start.sum + 1, 0};
  return start;
}

// By thread `thread` of half of the block.
__device__ void WriteWalk(const Walk& walk, const Cut& cut, const Tables& tables, int experts,
                          const TileRule& rule, int thread) {
  for (int block = thread; block <= walk.blocks; block += kThreads / 2) {
    walk.starts[block] = FindStart(walk, cut, tables, experts, rule, block);
  }
  for (int i = thread; i < kReadyFlags * walk.blocks; i += kThreads / 2) walk.ready[i] = 0;
}

// All threads of the block, from tables.starts.
__device__ void WriteTilesAndWalks(Tables* tables, int experts, const ExpertRows& rows,
                                   const TileRule& rule, const Walks& walks) {
  for (int i = threadIdx.x; i < experts; i += kThreads) {
    const ExpertTiles tiles = CutRows(tables->starts[i + 1] - tables->starts[i], rule.tile_rows);
    tables->size[i] = tiles.size;
    tables->first_tile[i] = tiles.count;
    tables->first_cost[i] = tiles.count * max(tiles.size, rule.min_cost);
  }
  __syncthreads();
  PrefixSum(tables->first_tile, experts, INT32_MAX);
  PrefixSum(tables->first_cost, experts, INT32_MAX);
  __shared__ Cut cuts[2];
  if (threadIdx.x == 0 && walks.count > 0) {
    cuts[0] = FindCut(walks.walk[0], *tables, experts, rule);
  }
  if (threadIdx.x == 32 && walks.count > 1) {
    cuts[1] = FindCut(walks.walk[1], *tables, experts, rule);
  }
  __syncthreads();
  // Half of the threads for each product.
  const int thread = threadIdx.x % (kThreads / 2);
  if (threadIdx.x < kThreads / 2) {
    if (walks.count > 0) WriteWalk(walks.walk[0], cuts[0], *tables, experts, rule, thread);
  } else {
    if (walks.count > 1) WriteWalk(walks.walk[1], cuts[1], *tables, experts, rule, thread);
  }
  const int32_t num_tiles = tables->first_tile[experts];
  for (int32_t tile = threadIdx.x; tile < num_tiles; tile += kThreads) {
    const int expert = FindExpert(tables->first_tile, experts, 1, tile);
    const int32_t size = tables->size[expert];
    const int32_t row = tables->starts[expert] + (tile - tables->first_tile[expert]) * size;
    rows.tiles[tile] = {expert, row, tables->starts[expert], tables->starts[expert + 1]};
  }
  for (int i = threadIdx.x; i <= experts; i += kThreads) rows.starts[i] = tables->starts[i];
  if (threadIdx.x == 0) *rows.num_tiles = num_tiles;
}

struct Slots {
  int begin;
  int end;
};

// The slots of this warp in the block's segment; full ones but for the end of all slots.
__device__ Slots WarpSlots(int num_slots) {
  const int segment =
      gridDim.x == 1 ? (num_slots + kThreads - 1) / kThreads * kThreads : kSegmentSlots;
  const int length = segment / kWarps;
  const int begin =
      static_cast<int>(blockIdx.x) * segment + static_cast<int>(threadIdx.x / 32) * length;
  return {min(begin, num_slots), min(begin + length, num_slots)};
}

__device__ __forceinline__ bool IsRouted(int32_t id, int experts) {
  return id >= 0 && id < experts;
}

// counts[segment, expert] for the segment of this block.
__global__ void __launch_bounds__(kThreads, 1)
    CountSegment(const int32_t* expert_ids, int num_slots, int num_experts, int32_t* counts) {
  __shared__ int32_t sums[kMaxExperts];
  for (int i = threadIdx.x; i < num_experts; i += kThreads) sums[i] = 0;
  __syncthreads();
  const int begin = static_cast<int>(blockIdx.x) * kSegmentSlots;
  const int end = min(begin + kSegmentSlots, num_slots);
  for (int slot = begin + static_cast<int>(threadIdx.x); slot < end; slot += kThreads) {
    const int32_t id = expert_ids[slot];
    if (IsRouted(id, num_experts)) atomicAdd(&sums[id], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    counts[static_cast<int>(blockIdx.x) * num_experts + i] = sums[i];
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    SortByExpert(const int32_t* expert_ids, int num_slots, int num_experts, ExpertRows rows,
                 TileRule rule, Walks walks) {
  // Then: rows before this warp's, by expert; at last the sizes of tiles.
  __shared__ __align__(4) uint16_t counts[kWarps * kMaxExperts];
  __shared__ Tables tables;
  int32_t* earlier = tables.first_cost;  // rows of an expert in earlier segments, until step 4
#if __CUDA_ARCH__ >= 900
  StartNextKernel();  // it waits for what is written here, but has its barriers ready
#endif
  const int lane = threadIdx.x % 32;
  uint16_t* warp_counts = counts + static_cast<int>(threadIdx.x / 32) * num_experts;
  for (int i = threadIdx.x; i < kWarps * num_experts; i += kThreads) counts[i] = 0;
  __syncthreads();

  const Slots slots = WarpSlots(num_slots);
  for (int first = slots.begin; first < slots.end; first += 32) {
    const int slot = first + lane;
    const int32_t id = slot < slots.end ? expert_ids[slot] : -1;
    const bool routed = IsRouted(id, num_experts);
    const uint32_t equal = __match_any_sync(kAllLanes, routed ? id : -1);
    if (routed && lane == __ffs(equal) - 1) warp_counts[id] += __popc(equal);
    __syncwarp();
  }
  __syncthreads();

  for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    int sum = 0;
    uint16_t of_warps[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) of_warps[warp] = counts[warp * num_experts + expert];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      counts[warp * num_experts + expert] = static_cast<uint16_t>(sum);
      sum += of_warps[warp];
    }
    int before = 0;
    if (gridDim.x > 1) {
      sum = 0;
      for (unsigned segment = 0; segment < gridDim.x; ++segment) {
        const int count = rows.counts[segment * num_experts + expert];
        if (segment < blockIdx.x) before += count;
        sum += count;
      }
    }
    earlier[expert] = before;
    tables.starts[expert] = sum;
  }
  __syncthreads();
  PrefixSum(tables.starts, num_experts, num_slots);

  for (int first = slots.begin; first < slots.end; first += 32) {
    const int slot = first + lane;
    const int32_t id = slot < slots.end ? expert_ids[slot] : -1;
    const bool routed = IsRouted(id, num_experts);
    const uint32_t equal = __match_any_sync(kAllLanes, routed ? id : -1);
    const int rank = __popc(equal & ((1u << lane) - 1));
    if (routed) rows.slots[tables.starts[id] + earlier[id] + warp_counts[id] + rank] = slot;
    __syncwarp();  // every lane has read the counter that its leader now moves on
    if (routed && rank == 0) warp_counts[id] += __popc(equal);
    __syncwarp();
  }
  if (blockIdx.x > 0) return;
  __syncthreads();
  if (threadIdx.x == 0) tables.size = reinterpret_cast<int32_t*>(counts);
  __syncthreads();
  WriteTilesAndWalks(&tables, num_experts, rows, rule, walks);
}

constexpr int kZeroedRows = 64;  // of a block

// The first block writes the tables, all of them zeros.
__global__ void __launch_bounds__(kThreads, 1)
    GroupTiles(const int32_t* group_sizes, int num_rows, int num_experts, ExpertRows rows,
               TileRule rule, Walks walks, OutputRows y) {
  __shared__ Tables tables;
  __shared__ int32_t size[kMaxExperts];
#if __CUDA_ARCH__ >= 900
  StartNextKernel();
#endif
  if (threadIdx.x == 0) tables.size = size;
  for (int i = threadIdx.x; i < num_experts; i += kThreads) tables.starts[i] = group_sizes[i];
  __syncthreads();
  PrefixSum(tables.starts, num_experts, num_rows);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kZeroedRows;
  const int64_t begin = max(first, static_cast<int64_t>(tables.starts[num_experts]));
  const int64_t end = min(first + kZeroedRows, static_cast<int64_t>(num_rows));
  uint16_t* words = static_cast<uint16_t*>(y.values);
  for (int64_t i = begin * (y.row_bytes / 2) + threadIdx.x; i < end * (y.row_bytes / 2);
       i += kThreads) {
    words[i] = 0;
  }
  if (blockIdx.x == 0) WriteTilesAndWalks(&tables, num_experts, rows, rule, walks);
}

}  // namespace

cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                               const Walks& walks) {
  const auto slots = static_cast<int>(num_slots), experts = static_cast<int>(num_experts);
  const unsigned segments = num_slots <= 2 * kSegmentSlots
                                ? 1u
                                : static_cast<unsigned>(CeilDiv(num_slots, kSegmentSlots));
  if (segments > 1) {
    NVFP4_RETURN_IF_CUDA_ERROR(Launch(stream, dim3(segments), kThreads, CountSegment, expert_ids,
                                      slots, experts, rows.counts));
  }
  return Launch(stream, dim3(segments), kThreads, SortByExpert, expert_ids, slots, experts, rows,
                rule, walks);
}

cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t num_rows,
                             int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                             const Walks& walks, const OutputRows& y) {
  return Launch(stream, dim3(static_cast<unsigned>(CeilDiv(num_rows, kZeroedRows))), kThreads,
                GroupTiles, group_sizes, static_cast<int>(num_rows), static_cast<int>(num_experts),
                rows, rule, walks, y);
}

}  // namespace nvfp4
