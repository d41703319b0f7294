// Computes out[r] = act(W[expert] @ x[r]) for the rows of at most kFewSlots slots, in bf16 and f16,
// without sorting them first: GEMM 1 of a layer. expert_gemm.cuh has the whole equation.
//
//   expert_ids [slots] -> the plan, in shared memory of each block
//
// An output tile is 64 weight rows of one expert by at most 8 of its slots, over all of k. A block
// of 16 warps computes one output tile after the other. It has four teams of four warps. Each team
// takes every fourth weight tile of k, and loads it from memory to registers. Loads run kDepth
// tiles ahead, also across the end of an output tile. The partial sums of the teams are added in
// the order of the teams.
//
// All rows of x are in shared memory from the start. In W4A4, each slot has its own row there: the
// row of x, rounded to NVFP4 under the scale of the expert of the slot. A block rounds rows only
// for the experts of its own output tiles.
//
// As soon as its own weights are in flight, the kernel prefetches those of GEMM 2 into the L2 cache.
// GEMM 2 (combined_gemm_few.cu) may start before this kernel ends.
//
// Bottleneck: latency of memory, then reading weights.
//
// Needs: sm_80. Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py.
#include "cuda/epilogues/direct_store.cuh"
#include "cuda/gemm/few_slots.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kTeams = 4;
constexpr int kTeamThreads = 128;
constexpr int kThreads = kTeams * kTeamThreads;
constexpr int kBlocksPerSm = 2;
// On 12.x, rounding in f16 would spill registers with two blocks. Layers in W4A4 use another kernel
// there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kRoundingBlocksPerSm = 1;
#else
constexpr int kRoundingBlocksPerSm = kBlocksPerSm;
#endif
constexpr int kDepth = 2;  // weight tiles of a warp in flight
constexpr int kZeroBytes = 2 * kTileK;

// Up to kDepth weight tiles of a team, in the order of k.
struct Round {
  int32_t output_tile;
  int32_t begin;  // first of the weight tiles that the team has in the output tile
  int32_t tile;   // first weight tile, counted over all weights
};

struct Worker {
  const ExpertGemm& p;
  const Plan& plan;
  const int32_t m_tiles, k_tiles;
  const int32_t output_tiles;
  const int32_t items;  // weight tiles that this team has in an output tile
  const int team;
  const int thread;  // in the team

  __device__ __forceinline__ Worker(const ExpertGemm& gemm, const Plan& made)
      : p(gemm),
        plan(made),
        m_tiles(gemm.m_tiles()),
        k_tiles(KTiles(gemm.k)),
        output_tiles(made.num_tiles * m_tiles),
        items((k_tiles - static_cast<int>(threadIdx.x / kTeamThreads) + kTeams - 1) / kTeams),
        team(static_cast<int>(threadIdx.x / kTeamThreads)),
        thread(static_cast<int>(threadIdx.x % kTeamThreads)) {}

  __device__ __forceinline__ Round FirstRound(int32_t output_tile) const {
    if (output_tile >= output_tiles) return {output_tile, 0, 0};
    const uint32_t tile = static_cast<uint32_t>(output_tile) / static_cast<uint32_t>(m_tiles);
    const int32_t m_tile = output_tile - static_cast<int32_t>(tile) * m_tiles;
    return {output_tile, 0, (plan.tiles[tile].expert * m_tiles + m_tile) * k_tiles + team};
  }

  __device__ __forceinline__ Round NextRound(const Round& round) const {
    const bool last = round.begin + kDepth >= items;
    if (last) return FirstRound(round.output_tile + static_cast<int32_t>(gridDim.x));
    return {round.output_tile, round.begin + kDepth, round.tile + kDepth * kTeams};
  }

  // Loads a weight tile. Past the end it loads the first tile, which is then multiplied by zeros.
  // With a branch for each tile, the compiler could not overlap the work on several tiles.
  __device__ __forceinline__ Packed Load(const Round& round, int d) const {
    const bool inside = round.output_tile < output_tiles && round.begin + d < items;
    const int64_t tile = inside ? round.tile + d * kTeams : 0;
    return {
        __ldcs(reinterpret_cast<const uint4*>(p.weight.packed + tile * kTileCodeBytes) + thread),
        __ldcs(reinterpret_cast<const uint2*>(p.weight.block_scale + tile * kTileScaleBytes) +
               thread / 4)};
  }
};

// Returns a bit for each slot that belongs to an output tile of this block.
__device__ __forceinline__ uint32_t OwnSlots(const Worker& worker) {
  uint32_t own = 0;
  for (int i = static_cast<int>(blockIdx.x); i < worker.output_tiles; i += gridDim.x) {
    const RowTile& tile = worker.plan.tiles[i / worker.m_tiles];
    for (int row = 0; row < tile.rows; ++row) own |= 1u << worker.plan.slots[tile.row + row];
  }
  return own;
}

// Prefetches the weights of this block's output tiles of the next GEMM.
__device__ __forceinline__ void PrefetchNext(const ExpertWeights& weight, int m_tiles, int k_tiles,
                                             const Plan& plan) {
#if __CUDA_ARCH__ >= 900
  for (int i = static_cast<int>(blockIdx.x); i < plan.num_tiles * m_tiles; i += gridDim.x) {
    const int64_t before =
        (static_cast<int64_t>(plan.tiles[i / m_tiles].expert) * m_tiles + i % m_tiles) * k_tiles;
    PrefetchL2(weight.packed + before * kTileCodeBytes, k_tiles * kTileCodeBytes);
    PrefetchL2(weight.block_scale + before * kTileScaleBytes, k_tiles * kTileScaleBytes);
  }
#endif
}

template <typename T>
__device__ __forceinline__ OutputPairs FinishTile(const TileStore<T>& store,
                                                  const float (&sums)[4]) {
  switch (ChooseFinish(store.p)) {
    case Finish::kPlain:
      return store.template Finished<Finish::kPlain>(0, sums[0], sums[1], sums[2], sums[3]);
    case Finish::kSilu:
      return store.template Finished<Finish::kSilu>(0, sums[0], sums[1], sums[2], sums[3]);
    default:
      return store.template Finished<Finish::kAny>(0, sums[0], sums[1], sums[2], sums[3]);
  }
}

template <typename T, bool kRounds>
__global__ void __launch_bounds__(kThreads, kRounds ? kRoundingBlocksPerSm : kBlocksPerSm)
    ExpertGemmFew(const __grid_constant__ ExpertGemm p, const __grid_constant__ FewSlots few,
                  const TileConstants constants) {
  NVFP4_DYNAMIC_SHARED(rows);
  __shared__ Plan plan;
  __shared__ __align__(16) uint8_t zeros[kZeroBytes];
  __shared__ float4 partials[2][(kTeams - 1) * kTeamThreads];
#if __CUDA_ARCH__ >= 900
  StartNextKernel();
#endif
  const int stride = RowStride(p.k);
  const int num_rows = (few.num_slots + p.left.slots_per_row - 1) / p.left.slots_per_row;
  BringRows(p, kAllLanes, num_rows, kThreads, rows);
  if (threadIdx.x < sizeof(zeros)) zeros[threadIdx.x] = 0;
  if (threadIdx.x < 32) MakePlan(few.expert_ids, few.num_slots, few.num_experts, &plan);
  __syncthreads();
  const Worker worker(p, plan);
  Round round = worker.FirstRound(static_cast<int32_t>(blockIdx.x));
  Packed packed[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; ++d) packed[d] = worker.Load(round, d);
  WaitCopies<0>();
  __syncthreads();
  const uint8_t* left = rows;  // rows of slots if rounded, otherwise of tokens
  if constexpr (kRounds) {
    uint8_t* rounded = p.left.slots_per_row == 1 ? rows : rows + num_rows * stride;
    RoundRows<T>(p, few, OwnSlots(worker), kThreads, rows, rounded);
    __syncthreads();
    left = rounded;
  }

  const int lane = static_cast<int>(threadIdx.x % 32), warp = worker.thread / 32;
  int buffer = 0;
  bool prefetched = false;
  while (round.output_tile < worker.output_tiles) {
    const int32_t output_tile = round.output_tile;
    const RowTile tile = plan.tiles[output_tile / worker.m_tiles];
    const int m_tile = output_tile % worker.m_tiles;
    LaneRows lane_rows = {};
    if (worker.team == 0) lane_rows = LoadLaneRows(p, tile.expert, m_tile, warp);
    const int slot = plan.slots[tile.row + min(lane % 8, tile.rows - 1)];
    const int row = kRounds ? slot : slot / p.left.slots_per_row;
    const uint8_t* b = left + row * stride + lane / 8 * 16 + worker.team * kTileK * 2;
    float halves[2][4] = {};
    do {
      const Round next = worker.NextRound(round);
      if (!prefetched && next.output_tile >= worker.output_tiles) {
        if (threadIdx.x == 0) PrefetchNext(few.next, few.next_m_tiles, few.next_k_tiles, plan);
        prefetched = true;
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const uint8_t* source =
            round.begin + d < worker.items ? b + d * kTeams * kTileK * 2 : zeros + lane / 8 * 16;
        MultiplyTile<T>(packed[d], source, constants, halves);
        packed[d] = worker.Load(next, d);
      }
      b += kDepth * kTeams * kTileK * 2;
      round = next;
    } while (round.output_tile == output_tile);
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = halves[0][i] + halves[1][i];
    if (worker.team > 0) {
      partials[buffer][(worker.team - 1) * kTeamThreads + worker.thread] =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
    __syncthreads();
    if (worker.team == 0) {
#pragma unroll
      for (int team = 0; team < kTeams - 1; ++team) {
        const float4 partial = partials[buffer][team * kTeamThreads + worker.thread];
        sums[0] += partial.x, sums[1] += partial.y, sums[2] += partial.z, sums[3] += partial.w;
      }
      const TileStore<T> store = MakeTileStore<T>(p, tile, lane_rows, m_tile, warp);
      if (store.first < p.columns) {
        StoreRows(store, 0, plan.slots[tile.row + min(store.g, tile.rows - 1)],
                  FinishTile(store, sums));
      }
    }
    buffer ^= 1;
  }
}

// Returns the bytes of dynamic shared memory: for the rows of x, and for those of the slots if they
// are separate.
int64_t RowsBytes(int64_t slots, int64_t slots_per_row, int64_t k, bool rounds) {
  const int64_t rows = CeilDiv(slots, slots_per_row) + (rounds && slots_per_row > 1 ? slots : 0);
  return rows * RowStride(static_cast<int32_t>(k));
}

// With more weights, a sort and an engine are faster. On an H200, a layer with 38 million weights
// (one token of Qwen3-30B-A3B) took 17 us with this kernel and 26 us with an engine. With 75
// million weights it was 32 us and 30 us.
constexpr int64_t kMaxWeights = int64_t{64} << 20;

// Two blocks share the 228 KiB of a multiprocessor. Other devices may have less; see FewSlotsFit.
constexpr int64_t kMaxRowsBytes = 90 * 1024;

// Static shared memory of a block, rounded up to where the dynamic shared memory may begin.
constexpr int64_t kStaticBytes =
    CeilDiv(sizeof(Plan) + kZeroBytes + sizeof(float4) * 2 * (kTeams - 1) * kTeamThreads,
            kDynamicAlignment) *
    kDynamicAlignment;

template <typename T, bool kRounds>
cudaError_t LaunchTyped(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  const int64_t bytes = RowsBytes(few.num_slots, gemm.left.slots_per_row, gemm.k, kRounds);
  const auto blocks = static_cast<unsigned>(kBlocksPerSm * MultiprocessorCount());
  return LaunchWide(stream, dim3(blocks), kThreads, static_cast<int>(bytes), /*overlaps=*/false,
                    ExpertGemmFew<T, kRounds>, gemm, few, MakeTileConstants<T>());
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  return gemm.left.input_scale == nullptr ? LaunchTyped<T, false>(stream, gemm, few)
                                          : LaunchTyped<T, true>(stream, gemm, few);
}

}  // namespace

bool FewSlotsFit(int64_t slots, int64_t slots_per_row, int64_t k, bool rounds, int64_t weights) {
  return slots <= kFewSlots && weights <= kMaxWeights &&
         RowsBytes(slots, slots_per_row, k, rounds) <= kMaxRowsBytes &&
         FewSlotsSharedBytes(slots, slots_per_row, k, rounds) <= BlockSharedBytes();
}

int64_t FewSlotsSharedBytes(int64_t slots, int64_t slots_per_row, int64_t k, bool rounds) {
  return RowsBytes(slots, slots_per_row, k, rounds) + kStaticBytes;
}

cudaError_t LaunchExpertGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  return gemm.type == DataType::kF16 ? LaunchOf<__half>(stream, gemm, few)
                                     : LaunchOf<__nv_bfloat16>(stream, gemm, few);
}

}  // namespace nvfp4
