// Sorts (token, choice) slots by expert, cuts each expert's rows into tiles, and plans the walks.
//
//   expert_ids [slots] -> starts [e + 1], slots [rows], tiles, starts of each walk
//
// Bound by: latency, also that of fetching instructions, hence loops that are not unrolled. Up to
// kSegmentSlots slots are one segment and one block does it all; more are cut into segments, one
// for each block, and a kernel before this one counts them. A block has 16 warps that each own a
// contiguous part of its segment and a row of 16-bit counters:
//   1. each warp loads its ids, all at once, and counts them, 32 at a time; lanes with equal ids
//      find each other by match_any and are ranked by lane
//   2. prefix sums over warps and segments within an expert
//   3. prefix sums over experts, of rows, tiles and costs together; a thread has two experts
//   4. each slot knows its row now, and the first one of a tile writes the tile; in the first block
//      a thread for each block of a walk finds its place in the line of sums by a search
// Three barriers are between. The order is that of a stable sort, and no step depends on timing.
//
// Needs: e <= kMaxExperts, slots <= 65536 (checked in cuda_bindings.cc, kept by moe.cu and
// moe_w4a16.cu). Test: test_cuda_kernel.py.
#include <algorithm>

#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/routing/expert_rows.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kSegmentSlots = 2048;
constexpr int kRounds = kSegmentSlots / kThreads;  // of 32 slots of a warp, at most
static_assert(65536 / kSegmentSlots <= kMaxSegments, "counts of each segment");
static_assert(2 * kThreads >= kMaxExperts, "a pair of experts for each thread");

// A block whose part would begin or end within this share of a sum leaves it to the other.
constexpr int kSnapShare = 8;

// Steps of each block that cutting a few sums has to save: handing shares over takes that long.
constexpr int kWorthCutting = 8;

// Divides numbers below 2^31 by one that the host knows; a division takes ten times as long.
struct Divisor {
  uint32_t factor;
  int32_t shift;

  __device__ __forceinline__ int32_t Divide(uint32_t number) const {
    return static_cast<int32_t>(static_cast<uint64_t>(number) * factor >> shift);
  }
};

Divisor MakeDivisor(int32_t divisor) {
  int32_t shift = 31;
  while ((int64_t{1} << (shift - 31)) < divisor) ++shift;
  return {static_cast<uint32_t>(CeilDiv(int64_t{1} << shift, divisor)), shift};
}

// What a kernel is told about tiles and walks.
struct Plan {
  TileRule rule;
  Walks walks;
  Divisor by_tile_rows;
  Divisor by_blocks[2];  // of each walk
};

Plan MakePlan(const TileRule& rule, const Walks& walks) {
  Plan plan = {rule, walks, MakeDivisor(rule.tile_rows), {}};
  for (int i = 0; i < walks.count; ++i) plan.by_blocks[i] = MakeDivisor(walks.walk[i].blocks);
  return plan;
}

// Of one expert, or of those before it. Costs of all sums of a product together are below 2^31: up
// to 2^18 for a block of weight rows, of which there are up to 2^12.
struct alignas(16) Sums {
  int32_t rows;
  int32_t tiles;
  int32_t cost;  // of the tiles
};

__device__ __forceinline__ Sums operator+(const Sums& a, const Sums& b) {
  return {a.rows + b.rows, a.tiles + b.tiles, a.cost + b.cost};
}

__device__ __forceinline__ Sums operator-(const Sums& a, const Sums& b) {
  return {a.rows - b.rows, a.tiles - b.tiles, a.cost - b.cost};
}

// Of each tile of an expert that has `rows`.
__device__ __forceinline__ int32_t TileCost(int32_t rows, const TileRule& rule) {
  return max(min(rows, rule.tile_rows), rule.min_cost);
}

__device__ __forceinline__ Sums SumsOf(int32_t rows, const Plan& plan) {
  const int32_t tiles = plan.by_tile_rows.Divide(rows + plan.rule.tile_rows - 1);
  return {rows, tiles, tiles * TileCost(rows, plan.rule)};
}

// The sums of a product that are cut, from which on they are a line of steps.
struct Cut {
  int32_t first;  // those before it go around
  int32_t cost;   // of those before it
};

// A search looks at entries before the next multiple of this.
constexpr int kReach = 256;
__device__ __forceinline__ int Reached(int experts) {
  return (experts + kReach - 1) / kReach * kReach;
}

// What the block keeps in shared memory: prefix sums. Entries past the experts, which a search may
// look at, are sums of all.
struct Tables {
  int32_t starts[kMaxExperts + 1];      // rows before an expert
  int32_t first_tile[kMaxExperts + 1];  // tiles before it
  int32_t first_cost[kMaxExperts + 1];  // cost of those tiles
  Sums all;
  Cut cuts[2];  // of each walk
};

// The last expert that does not begin after place `place`, of prefix sums counted `times`. Three
// looks at once, since each takes as long as all of them.
__device__ __forceinline__ int FindExpert(const int32_t* sums, int experts, int32_t times,
                                          int32_t place) {
  int low = 0;
#pragma unroll
  for (int step = kReach; step > 0; step /= 4) {
    if (step >= experts) continue;
    const bool first = sums[low + step] * times <= place;
    const bool second = 2 * step < experts && sums[low + 2 * step] * times <= place;
    const bool third = 3 * step < experts && sums[low + 3 * step] * times <= place;
    low += third ? 3 * step : second ? 2 * step : first ? step : 0;
  }
  return low;
}
static_assert(kMaxExperts == 4 * kReach, "four steps of the first size");

// Without branches: the two products' run side by side.
__device__ __forceinline__ int32_t FindCut(const Walk& walk, const Divisor& by_blocks,
                                           int32_t sums) {
  const int32_t idle = walk.blocks - sums;  // blocks, if no sum is cut
  const bool whole = (idle >= 0) & (idle * walk.k_steps < kWorthCutting * walk.blocks);
  const int32_t around = max(by_blocks.Divide(sums) - 1, 0) * walk.blocks;
  return (sums == 0) | whole ? sums : around;
}

// A thread's two experts: sums before the first, before the second, and after both.
__device__ __forceinline__ void WriteTables(const Sums (&at)[3], const Sums& all,
                                            const int32_t (&own_rows)[2], int experts,
                                            const ExpertRows& rows, const Plan& plan,
                                            Tables* tables) {
  const int32_t tile_cost[2] = {TileCost(own_rows[0], plan.rule), TileCost(own_rows[1], plan.rule)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int expert = 2 * static_cast<int>(threadIdx.x) + i;
    tables->starts[expert] = at[i].rows;
    tables->first_tile[expert] = at[i].tiles;
    tables->first_cost[expert] = at[i].cost;
    if (blockIdx.x == 0 && expert < experts) rows.starts[expert] = at[i].rows;
  }
  if (threadIdx.x == 0) {
    tables->all = all;
    tables->starts[Reached(experts)] = all.rows;
    if (blockIdx.x == 0) rows.starts[experts] = all.rows;
    if (blockIdx.x == 0) *rows.num_tiles = all.tiles;
  }
#pragma unroll
  for (int product = 0; product < 2; ++product) {
    const Walk& walk = plan.walks.walk[product];  // zeros where there is none
    const int32_t sums = all.tiles * walk.m_blocks;
    const int32_t cut = FindCut(walk, plan.by_blocks[product], sums);
    if (cut == sums && threadIdx.x == 0) tables->cuts[product] = {sums, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the expert that the cut falls into knows what is before it
      const int32_t inside = cut - at[i].tiles * walk.m_blocks;
      if (inside < 0 || cut >= at[i + 1].tiles * walk.m_blocks) continue;
      tables->cuts[product] = {cut, at[i].cost * walk.m_blocks + inside * tile_cost[i]};
    }
  }
}

// Fills `tables`, and writes starts and the number of tiles. Thread t brings the rows of experts
// 2 t and 2 t + 1, zero where there is none. All threads of the block; ends at a barrier.
__device__ __forceinline__ void FillTables(const int32_t (&own_rows)[2], int experts,
                                           const ExpertRows& rows, const Plan& plan,
                                           Tables* tables) {
  __shared__ Sums warp_sums[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);  // uniform
  const int warps = Reached(experts) / 64;  // others would only delay these
  Sums own[2], sums;
  if (warp < warps) {
    own[0] = SumsOf(own_rows[0], plan);
    own[1] = SumsOf(own_rows[1], plan);
    sums = own[0] + own[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const Sums other = {__shfl_up_sync(kAllLanes, sums.rows, step),
                          __shfl_up_sync(kAllLanes, sums.tiles, step),
                          __shfl_up_sync(kAllLanes, sums.cost, step)};
      if (lane >= step) sums = sums + other;
    }
    if (lane == 31) warp_sums[warp] = sums;
  }
  __syncthreads();
  if (warp < warps) {
    Sums all = {}, of_warps = {};  // of the warps before this one
#pragma unroll 1
    for (int i = 0; i < warps; i += 4) {
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        all = all + warp_sums[j];
        if (j < warp) of_warps = all;
      }
    }
    sums = sums + of_warps;
    const Sums middle = sums - own[1];
    WriteTables({middle - own[0], middle, sums}, all, own_rows, experts, rows, plan, tables);
  }
  __syncthreads();
}
static_assert(kReach % 256 == 0, "warps in fours");

// Where the part of a block starts that has `place` cost before it.
__device__ __forceinline__ Start FindStart(const Walk& walk, const TileRule& rule,
                                           const Tables& tables, int experts, int32_t place) {
  const int expert = FindExpert(tables.first_cost, experts, walk.m_blocks, place);
  // Unsigned: division of numbers with a sign takes half as long again.
  const uint32_t cost = TileCost(tables.starts[expert + 1] - tables.starts[expert], rule);
  const uint32_t inside = place - tables.first_cost[expert] * walk.m_blocks;
  const uint32_t sum = inside / cost;
  Start start = {tables.first_tile[expert] * walk.m_blocks + static_cast<int32_t>(sum),
                 static_cast<int32_t>((inside - sum * cost) * walk.k_steps / cost)};
  const int32_t snap = walk.k_steps / kSnapShare;
  if (start.step <= snap) start.step = 0;
  if (walk.k_steps - start.step <= snap) start = {start.sum + 1, 0};
  return start;
}

// All threads of a block, half of them for each product.
__device__ __forceinline__ void WriteWalks(const Plan& plan, const Tables& tables, int experts) {
  const int product = threadIdx.x < kThreads / 2 ? 0 : 1;
  if (product >= plan.walks.count) return;
  // Not by an index, for which the compiler would copy the plan.
  const Walk walk = product == 0 ? plan.walks.walk[0] : plan.walks.walk[1];
  const Divisor by_blocks = product == 0 ? plan.by_blocks[0] : plan.by_blocks[1];
  const Cut cut = tables.cuts[product];
  const int32_t sums = tables.all.tiles * walk.m_blocks;
  const int32_t cost = tables.all.cost * walk.m_blocks - cut.cost;
  const int32_t share = by_blocks.Divide(cost);
  const int32_t rest = cost - share * walk.blocks;  // blocks that have one unit more
#pragma unroll 1
  for (int block = threadIdx.x % (kThreads / 2); block <= walk.blocks; block += kThreads / 2) {
    const int32_t place = cut.cost + share * block + min(block, rest);
    walk.starts[block] = cut.first < sums && block < walk.blocks
                             ? FindStart(walk, plan.rule, tables, experts, place)
                             : Start{sums, 0};
  }
}

__device__ __forceinline__ void ZeroReadyFlags(const Walks& walks) {
#pragma unroll
  for (int product = 0; product < 2; ++product) {
    if (product >= walks.count) break;
    uint4* flags = reinterpret_cast<uint4*>(walks.walk[product].ready);
    const int count = kReadyFlags / 4 * walks.walk[product].blocks;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) flags[i] = uint4{};
  }
}
static_assert(kReadyFlags % 4 == 0, "flags are zeroed by fours");

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
    if (id >= 0 && id < num_experts) atomicAdd(&sums[id], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    counts[static_cast<int>(blockIdx.x) * num_experts + i] = sums[i];
  }
}

// Counters of a warp; the last ones, which nobody reads, are for slots that are not routed.
using WarpCounts = uint16_t[kMaxExperts + 8];

// counts[warp][expert] = rows of the expert before those of the warp, for experts `first` and
// first + 1; `own_rows` = rows of each. `segment_counts` are those of CountSegment, if it ran.
__device__ __forceinline__ void SumCounts(WarpCounts (&counts)[kWarps], int first, int num_experts,
                                          const int32_t* segment_counts, int32_t (&own_rows)[2]) {
  // Both experts in one word: a half overflows only at 65536, where the other has no rows.
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
                 Plan plan) {
  // Rows of a warp, by expert; then: rows before it.
  __shared__ __align__(16) WarpCounts counts[kWarps];
  __shared__ Tables tables;
#if __CUDA_ARCH__ >= 900
  StartNextKernel();  // it waits for what is written here, but has its barriers ready
#endif
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint16_t* warp_counts = counts[warp];
  // A lone segment may have fewer slots; its warps share them evenly, for fewest rounds.
  const int rounds = gridDim.x > 1 ? kRounds : (num_slots + kThreads - 1u) / kThreads;
  const int first_slot = (static_cast<int>(blockIdx.x) * kWarps + warp) * 32 * rounds + lane;
  int32_t ids[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int slot = first_slot + 32 * round;
    ids[round] = round < rounds && slot < num_slots ? expert_ids[slot] : -1;
  }
  // What follows does not need the ids, which take a while.
#pragma unroll 1
  for (int i = lane; 8 * i < num_experts; i += 32) {
    reinterpret_cast<uint4*>(warp_counts)[i] = uint4{};
  }
  if (blockIdx.x == 0) ZeroReadyFlags(plan.walks);
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
    __syncwarp();  // every lane has read the counter that the last of the equal ones moves on
    if (equal >> lane == 1) *counter = static_cast<uint16_t>(places[round] + 1);
    __syncwarp();
  }
  __syncthreads();

  const int first = 2 * static_cast<int>(threadIdx.x);  // of two experts
  int32_t own_rows[2] = {};
  if (first < num_experts) SumCounts(counts, first, num_experts, rows.counts, own_rows);
  FillTables(own_rows, num_experts, rows, plan, &tables);

#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (round >= rounds) break;
    const int32_t id = ids[round];
    if (id == kMaxExperts) continue;
    const int32_t start = tables.starts[id];
    const int32_t place = warp_counts[id] + places[round];  // among the rows of the expert
    rows.slots[start + place] = first_slot + 32 * round;
    const int32_t tile = plan.by_tile_rows.Divide(place);
    if (tile * plan.rule.tile_rows != place) continue;
    rows.tiles[tables.first_tile[id] + tile] = {id, start + place, start, tables.starts[id + 1]};
  }
  if (blockIdx.x == 0) WriteWalks(plan, tables, num_experts);
}

// values[0 .. count] = exclusive prefix sums of values[0 .. count), negative values as 0, counted
// from `first_counted` on and cut to [0, limit]. All threads of the block; count <= 2 * kThreads.
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
  // The last entry, where the pairs of all threads end before it.
  if (first + 2 == count && count == 2 * kThreads) values[count] = clip(before + a + b);
  __syncthreads();
}
constexpr int kZeroedRows = 64;  // of a block

// The first block writes the tables, all of them zeros.
__global__ void __launch_bounds__(kThreads, 1)
    GroupTiles(const int32_t* group_sizes, int64_t first_row, int num_rows, int num_experts,
               ExpertRows rows, Plan plan, OutputRows y) {
  __shared__ int32_t starts[kMaxExperts + 1];
  __shared__ Tables tables;
#if __CUDA_ARCH__ >= 900
  StartNextKernel();
#endif
  for (int i = threadIdx.x; i < num_experts; i += kThreads) starts[i] = group_sizes[i];
  if (blockIdx.x == 0) ZeroReadyFlags(plan.walks);
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
  FillTables(own_rows, num_experts, rows, plan, &tables);
  WriteWalks(plan, tables, num_experts);
  for (int32_t tile = threadIdx.x; tile < tables.all.tiles; tile += kThreads) {
    const int expert = FindExpert(tables.first_tile, num_experts, 1, tile);
    const int32_t start = tables.starts[expert];
    const int32_t row = start + (tile - tables.first_tile[expert]) * plan.rule.tile_rows;
    rows.tiles[tile] = {expert, row, start, tables.starts[expert + 1]};
  }
}

}  // namespace

cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                               const Walks& walks) {
  const auto slots = static_cast<int>(num_slots), experts = static_cast<int>(num_experts);
  const auto segments =
      static_cast<unsigned>(std::max<int64_t>(CeilDiv(num_slots, kSegmentSlots), 1));
  if (segments > 1) {
    NVFP4_RETURN_IF_CUDA_ERROR(Launch(stream, dim3(segments), kThreads, CountSegment, expert_ids,
                                      slots, experts, rows.counts));
  }
  return Launch(stream, dim3(segments), kThreads, SortByExpert, expert_ids, slots, experts, rows,
                MakePlan(rule, walks));
}

cudaError_t LaunchGroupTiles(cudaStream_t stream, const int32_t* group_sizes, int64_t first_row,
                             int64_t num_rows, int64_t num_experts, const ExpertRows& rows,
                             const TileRule& rule, const Walks& walks, const OutputRows& y) {
  return Launch(stream, dim3(static_cast<unsigned>(CeilDiv(num_rows, kZeroedRows))), kThreads,
                GroupTiles, group_sizes, first_row, static_cast<int>(num_rows),
                static_cast<int>(num_experts), rows, MakePlan(rule, walks), y);
}

}  // namespace nvfp4
