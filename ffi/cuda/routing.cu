// Sorts (token, choice) slots by expert, cuts each expert's rows into tiles, and plans the walks.
//
//   expert_ids [slots] -> starts [e + 1], slots [rows], tiles, starts of each walk
//
// Bound by: latency; 65535 ids are 256 KiB. So one block does it all, with 16 warps that each
// own a contiguous segment of the slots and a row of 16-bit counters in shared memory:
//   1. each warp counts its ids, 32 at a time; lanes with equal ids find each other by match_any
//   2. prefix sums over warps within an expert, then over experts
//   3. each warp walks its segment again and writes slots; equal lanes are ranked by lane
//   4. tiles of equal size within an expert; each block of a product finds its place in the line of
//      steps by bisection over the experts
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

// A block whose part would begin or end within this share of a sum over k leaves it to the other.
constexpr int kSnapShare = 8;

// What the block keeps in shared memory about the experts; prefix sums, so one entry more.
struct Tables {
  int32_t starts[kMaxExperts + 1];      // rows before an expert
  int32_t first_tile[kMaxExperts + 1];  // tiles before it
  int32_t first_cost[kMaxExperts + 1];  // cost of those tiles, for one step of each
};

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

// Rows of each tile of an expert but the last: as equal as multiples of 8 allow.
__device__ __forceinline__ int32_t RowsOfTiles(int32_t rows, int32_t tile_rows) {
  const int32_t tiles = (rows + tile_rows - 1) / tile_rows;
  return tiles == 0 ? 0 : ((rows + tiles - 1) / tiles + 7) / 8 * 8;
}

__device__ __forceinline__ int32_t CostOfTile(int32_t tile_rows, const TileRule& rule) {
  return tile_rows > rule.min_cost ? tile_rows : rule.min_cost;
}

// Where position `position` of the line lies.
__device__ Start FindStart(const Walk& walk, const Tables& tables, int experts,
                           const TileRule& rule, int64_t position) {
  const int64_t steps = static_cast<int64_t>(walk.k_tiles) * walk.m_blocks;
  int low = 0, high = experts;  // first_cost[low] * steps <= position < first_cost[high] * steps
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tables.first_cost[middle] * steps <= position ? low : high) = middle;
  }
  const int32_t rows = tables.starts[low + 1] - tables.starts[low];
  const int32_t cost = CostOfTile(RowsOfTiles(rows, rule.tile_rows), rule);
  const int64_t rest = (position - tables.first_cost[low] * steps) / cost;
  Start start = {tables.first_tile[low] + static_cast<int32_t>(rest / steps),
                 static_cast<int32_t>(rest % steps)};
  const int32_t snap = walk.k_tiles / kSnapShare, k_tile = start.step % walk.k_tiles;
  if (k_tile <= snap) start.step -= k_tile;
  if (walk.k_tiles - k_tile <= snap) start.step += walk.k_tiles - k_tile;
  if (start.step == steps) start = {start.tile + 1, 0};
  return start;
}

__device__ void WriteWalk(const Walk& walk, const Tables& tables, int experts,
                          const TileRule& rule) {
  const int64_t line =
      static_cast<int64_t>(tables.first_cost[experts]) * walk.k_tiles * walk.m_blocks;
  for (int block = threadIdx.x; block <= walk.blocks; block += kThreads) {
    walk.starts[block] = block == walk.blocks || line == 0
                             ? Start{tables.first_tile[experts], 0}
                             : FindStart(walk, tables, experts, rule, line * block / walk.blocks);
  }
  for (int i = threadIdx.x; i < kReadyFlags * walk.blocks; i += kThreads) walk.ready[i] = 0;
}

// All threads of the block, from tables.starts.
__device__ void WriteTilesAndWalks(Tables* tables, int experts, const ExpertRows& rows,
                                   const TileRule& rule, const Walks& walks) {
  for (int i = threadIdx.x; i < experts; i += kThreads) {
    const int32_t count = tables->starts[i + 1] - tables->starts[i];
    const int32_t tiles = (count + rule.tile_rows - 1) / rule.tile_rows;
    tables->first_tile[i] = tiles;
    tables->first_cost[i] = tiles * CostOfTile(RowsOfTiles(count, rule.tile_rows), rule);
  }
  __syncthreads();
  if (threadIdx.x < 32) PrefixSum(tables->first_tile, experts, INT32_MAX, tables->first_tile);
  if (threadIdx.x / 32 == 1) PrefixSum(tables->first_cost, experts, INT32_MAX, tables->first_cost);
  __syncthreads();
  if (walks.count > 0) WriteWalk(walks.walk[0], *tables, experts, rule);
  if (walks.count > 1) WriteWalk(walks.walk[1], *tables, experts, rule);
  for (int i = threadIdx.x; i <= experts; i += kThreads) rows.starts[i] = tables->starts[i];
  if (threadIdx.x == 0) *rows.num_tiles = tables->first_tile[experts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int expert = warp; expert < experts; expert += kWarps) {
    const int32_t begin = tables->starts[expert], end = tables->starts[expert + 1];
    const int32_t tiles = tables->first_tile[expert + 1] - tables->first_tile[expert];
    const int32_t size = RowsOfTiles(end - begin, rule.tile_rows);
    for (int32_t tile = lane; tile < tiles; tile += 32) {
      const int32_t row = begin + tile * size;
      rows.tiles[tables->first_tile[expert] + tile] = {expert, row,
                                                       end - row < size ? end - row : size};
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
    SortByExpert(const int32_t* expert_ids, int num_slots, int num_experts, ExpertRows rows,
                 TileRule rule, Walks walks) {
  __shared__ uint16_t counts[kWarps * kMaxExperts];  // then: rows before this warp's, by expert
  __shared__ Tables tables;
  int32_t* starts = tables.starts;
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
  WriteTilesAndWalks(&tables, num_experts, rows, rule, walks);
}

__global__ void __launch_bounds__(kThreads)
    GroupTiles(const int32_t* group_sizes, int num_rows, int num_experts, ExpertRows rows,
               TileRule rule, Walks walks) {
  __shared__ Tables tables;
  if (threadIdx.x < 32) PrefixSum(group_sizes, num_experts, num_rows, tables.starts);
  __syncthreads();
  WriteTilesAndWalks(&tables, num_experts, rows, rule, walks);
}

}  // namespace

cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                               const Walks& walks) {
  return Launch(stream, dim3(1), kThreads, SortByExpert, expert_ids, static_cast<int>(num_slots),
                static_cast<int>(num_experts), rows, rule, walks);
}

cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t num_rows,
                             int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                             const Walks& walks) {
  return Launch(stream, dim3(1), kThreads, GroupTiles, group_sizes, static_cast<int>(num_rows),
                static_cast<int>(num_experts), rows, rule, walks);
}

}  // namespace nvfp4
