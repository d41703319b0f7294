// Computes out = act(W[expert] @ x) for experts with few rows each, with mma.sync on Hopper, in
// bf16 and f16. expert_gemm.cuh has the whole equation.
//
// As in expert_gemm_sm80.cu, weight rows take the 16 rows of an MMA and tokens its 8 columns. What
// differs is who copies. There, each thread copies its part of a step, and the block meets at a
// barrier in each step. Here, one warp copies and four warps multiply, each at its own pace.
//   producer    takes output tiles (work_taker.cuh), and copies weights and rows of x by bulk
//   copies,
//               up to kStages steps ahead. It announces a tile with the first step of the tile.
//   consumers   wait for a step, multiply it, and release it. At the end of a tile they store its
//               outputs, while the copies of the next tile go on.
//
// Three blocks share a multiprocessor. A block multiplies two weight tiles of 64 rows, and each
// consumer has two slabs of 16 of these rows. A step covers kStepTiles times 64 of k. It has
//   codes    [kTiles][kStepTiles][2048 bytes], in the order of device memory
//   scales   [kTiles][kStepTiles][256 bytes]
//   x        [kRows][kPitch bytes]. The pitch is 16 bytes more than a multiple of 128, so that
//            ldmatrix has no bank conflicts. Rows past the last token of the tile keep old bytes;
//            the sums of such rows are not stored.
//
// Bottleneck: reading weights, and then the time between the last copy and the last output, which
// each of the two GEMMs of a layer pays. On an H200, a layer of Qwen3-30B-A3B with 16 tokens takes
// 70 us, of which reading at 4.2 TB/s takes 51. Without MMAs it takes 59.
//
// Needs: sm_90a. Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py,
// test_sass.py.
#include <algorithm>

#include "cuda/epilogues/direct_store.cuh"
#include "cuda/epilogues/rounded_store.cuh"
#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/scheduling/stage_ring.cuh"
#include "cuda/scheduling/work_taker.cuh"

namespace nvfp4 {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kTiles = 2;      // weight tiles of a block
constexpr int kStepTiles = 4;  // how many times 64 of k a step covers
constexpr int kStages = 3;
constexpr int kRows = 8;
constexpr int kBlocksPerSm = 3;
constexpr int kSlabs = 2;  // slabs of 16 weight rows of a consumer
constexpr int kConsumers = 4 * kTiles / kSlabs;
constexpr int kThreads = 32 * (kConsumers + 1);
constexpr int kStepK = kStepTiles * kTileK;
constexpr int kPitch = 2 * kStepK + 16;
constexpr int kScalesAt = kTiles * kStepTiles * kTileCodeBytes;  // offsets in a stage
constexpr int kRowsAt = kScalesAt + kTiles * kStepTiles * kTileScaleBytes;
constexpr int kStageBytes = kRowsAt + kRows * kPitch;
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kStageBytes % 16 == 0, "bulk copies");
static_assert(kBlocksPerSm * (kSharedBytes + kDynamicAlignment + 1024) <= 228 * 1024,
              "shared memory of a multiprocessor, with what is reserved for each block");

// What the warps of a block share.
struct Pipeline {
  uint32_t stages;  // the dynamic shared memory
  uint32_t full;    // [kStages] mbarriers
  uint32_t empty;   // [kStages]
  // [kStages]: the tile that begins with the stage. After the last tile, one without steps.
  WorkUnit* announced;
};

// The warp that copies. All lanes call all functions.
struct Producer {
  const ExpertGemm& p;
  const Pipeline& pipeline;
  const int lane;
  StageRing<kStages> ring = {};
  bool waited;  // for the preceding kernel

  // The copies of this lane: lane t copies weight tile t, and lane 8 + r row r.
  WorkUnit work = {};
  int32_t tiles = 0;  // weight tiles of the block that exist
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* row = nullptr;

  __device__ __forceinline__ int OwnRow() const { return lane - 8; }

  __device__ __forceinline__ void BeginTile() {
    const int32_t m_tiles = p.m_tiles(), first = work.m_block * kTiles;
    const int64_t k_tiles = (p.k + kTileK - 1) / kTileK;
    tiles = min(kTiles, m_tiles - first);
    const int64_t tile =
        (static_cast<int64_t>(work.tile.expert) * m_tiles + first + lane) * k_tiles;
    codes = p.weight.packed + tile * kTileCodeBytes;
    scales = p.weight.block_scale + tile * kTileScaleBytes;
  }

  // Finds the row that this lane copies. The preceding kernel may have written it, but not where it
  // is.
  __device__ __forceinline__ void FindRow() {
    if (OwnRow() < 0 || OwnRow() >= work.tile.rows) return;
    int32_t index = work.tile.row + OwnRow();
    if (p.left.slots != nullptr) index = p.left.slots[index] / p.left.slots_per_row;
    row = static_cast<const uint8_t*>(p.left.values) + int64_t{2} * index * p.k;
  }

  // Starts the copies of weights of step `step`. The barrier of the stage also waits for the rows.
  __device__ __forceinline__ void CopyWeights(int32_t step) {
    const int32_t k = min(kStepK, p.k - step * kStepK);  // of this step
    const int32_t k_tiles = (k + kTileK - 1) / kTileK;
    const uint32_t full = pipeline.full + 8 * ring.stage;
    WaitBarrier(pipeline.empty + 8 * ring.stage, ring.phase ^ 1);
    if (lane == 0) {
      if (k % kTileK != 0) ZeroRows(k);
      if (step == 0) pipeline.announced[ring.stage] = work;
      ArriveExpect(full,
                   tiles * k_tiles * (kTileCodeBytes + kTileScaleBytes) + work.tile.rows * 2 * k);
    }
    __syncwarp();
    if (lane >= tiles) return;
    const uint32_t stage = pipeline.stages + ring.stage * kStageBytes;
    BulkCopy(stage + lane * kStepTiles * kTileCodeBytes, codes, k_tiles * kTileCodeBytes, full);
    BulkCopy(stage + kScalesAt + lane * kStepTiles * kTileScaleBytes, scales,
             k_tiles * kTileScaleBytes, full);
    codes += kStepTiles * kTileCodeBytes;
    scales += kStepTiles * kTileScaleBytes;
  }

  // Puts zeros after the first `k` of each row of the stage, up to a multiple of 64. Weights are
  // zeros there, but old bytes could be no numbers. One lane calls it, and then arrives.
  __device__ __forceinline__ void ZeroRows(int32_t k) {
    const uint32_t rows = pipeline.stages + ring.stage * kStageBytes + kRowsAt;
#pragma unroll 1
    for (int32_t own = 0; own < work.tile.rows; ++own) {
#pragma unroll 1
      for (int32_t at = k; at % kTileK != 0; at += 2) StoreShared4(rows + own * kPitch + 2 * at, 0);
    }
    FenceAsyncProxy();  // later copies to these places come after these stores
  }

  // Starts the copies of rows of step `step` to stage `stage`.
  __device__ __forceinline__ void CopyRows(int32_t step, int stage) {
    if (OwnRow() < 0 || OwnRow() >= work.tile.rows) return;
    const int32_t k = min(kStepK, p.k - step * kStepK);
    BulkCopy(pipeline.stages + stage * kStageBytes + kRowsAt + OwnRow() * kPitch,
             row + int64_t{2} * step * kStepK, 2 * k, pipeline.full + 8 * stage);
  }

  // Copies the tile `work`. Weights of the first steps need not wait for the preceding kernel.
  __device__ __forceinline__ void CopyTile() {
    BeginTile();
    int32_t rows_copied = 0;
    const int first_stage = ring.stage;
    if (waited) FindRow();
    for (int32_t step = 0; step < work.end; ++step) {
      CopyWeights(step);
      if (!waited && (step + 1 == work.end || step + 1 == kStages)) {
        WaitForPrecedingKernel();
        StartNextKernel();
        waited = true;
        FindRow();
        for (; rows_copied < step; ++rows_copied) {
          CopyRows(rows_copied, (first_stage + rows_copied) % kStages);
        }
      }
      if (waited) CopyRows(step, ring.stage);
      ring.Next();
    }
  }

  __device__ __forceinline__ void Run() {
    // The first tile that a block takes is its own number. Lane 0 asks for the next one while it
    // copies.
    int32_t taken = static_cast<int32_t>(blockIdx.x), next = 0;
    while (FindTaken(p.rows, p.rule, p.schedule, taken, &work)) {
      if (lane == 0) next = atomicAdd(p.schedule.ready, 1);
      CopyTile();
      taken = p.schedule.blocks + __shfl_sync(kAllLanes, next, 0);
    }
    WaitBarrier(pipeline.empty + 8 * ring.stage, ring.phase ^ 1);
    if (lane == 0) {
      pipeline.announced[ring.stage].end = 0;
      Arrive(pipeline.full + 8 * ring.stage);
    }
    if (!waited) {
      WaitForPrecedingKernel();
      StartNextKernel();
    }
  }
};

// A warp that multiplies.
template <typename T>
struct Consumer {
  const ExpertGemm& p;
  const Pipeline& pipeline;
  const TileConstants constants;
  const int warp, lane;
  StageRing<kStages> ring = {};
  float sums[kSlabs][kRows / 2];

  // The slabs of this warp are in one weight tile, of which each has four.
  __device__ __forceinline__ int Tile() const { return warp * kSlabs / 4; }
  __device__ __forceinline__ int SlabOfTile(int s) const { return warp * kSlabs % 4 + s; }

  // What 64 of k have in shared memory, in registers.
  struct Packed {
    uint4 codes[kSlabs];
    uint2 scales[kSlabs];
    uint32_t x[2][4];
  };

  // Loads number d of the stage.
  __device__ __forceinline__ Packed Load(uint32_t stage, int d) const {
    Packed packed;
    const uint32_t x = stage + kRowsAt + lane % 8 * kPitch + lane / 8 * 16 + d * 2 * kTileK;
    const int tile = Tile() * kStepTiles + d;
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      const int owner = SlabOfTile(s) * 32 + lane;
      packed.codes[s] = LoadShared16(stage + tile * kTileCodeBytes + owner * 16);
      packed.scales[s] = LoadShared8(stage + kScalesAt + tile * kTileScaleBytes + owner / 4 * 8);
    }
    LoadMatricesAt(x, packed.x[0]);
    LoadMatricesAt(x + kTileK, packed.x[1]);
    return packed;
  }

  // sums += W @ x for 64 of k. The slabs take turns, so that consecutive MMAs do not wait for each
  // other.
  __device__ __forceinline__ void MultiplyTile(const Packed& packed) {
    uint32_t fragments[kSlabs][4][4];
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      UnpackTile<T>(packed.codes[s], packed.scales[s], constants, fragments[s]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        const uint32_t (&x)[4] = packed.x[i / 2];
        MultiplyAdd<T>(sums[s], fragments[s][i], x[i % 2 * 2], x[i % 2 * 2 + 1]);
      }
    }
  }

  // sums = W @ x for a tile of `steps` steps. What is multiplied next is loaded before.
  __device__ __forceinline__ void Multiply(int32_t steps) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[s][i] = 0.0f;
    }
    for (int32_t step = 0; step < steps; ++step) {
      if (step > 0) WaitBarrier(pipeline.full + 8 * ring.stage, ring.phase);
      const uint32_t stage = pipeline.stages + ring.stage * kStageBytes;
      const int32_t k = p.k - step * kStepK;
      if (k >= kStepK) {
        Packed packed[2] = {Load(stage, 0)};
#pragma unroll
        for (int d = 0; d < kStepTiles; ++d) {
          if (d + 1 < kStepTiles) packed[(d + 1) % 2] = Load(stage, d + 1);
          MultiplyTile(packed[d % 2]);
        }
      } else {
#pragma unroll 1
        for (int d = 0; d * kTileK < k; ++d) MultiplyTile(Load(stage, d));
      }
      Release();
    }
  }

  __device__ __forceinline__ void Release() {
    __syncwarp();
    if (lane == 0) Arrive(pipeline.empty + 8 * ring.stage);
    ring.Next();
  }

  __device__ __forceinline__ void Store(const WorkUnit& work, int m_tile,
                                        const LaneRows (&rows)[kSlabs],
                                        const OutputPlaces<kRows>& places) {
    if (p.output.input_scale != nullptr) {
      const TileStore<T> stores[kSlabs] = {
          MakeTileStore<T>(p, work.tile, rows[0], m_tile, SlabOfTile(0)),
          MakeTileStore<T>(p, work.tile, rows[1], m_tile, SlabOfTile(1))};
      return StoreRoundedSlabs(stores, sums);
    }
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      StoreLoadedTile<T>(p, work.tile, m_tile, SlabOfTile(s), rows[s], places, sums[s]);
    }
  }

  // Returns the tile that begins with the stage. One lane reads it: the lane that releases the
  // stage.
  __device__ __forceinline__ WorkUnit ReadAnnounced() const {
    WorkUnit work = {};
    if (lane == 0) work = pipeline.announced[ring.stage];
    const auto share = [](int32_t value) { return __shfl_sync(kAllLanes, value, 0); };
    return {{share(work.tile.expert), share(work.tile.row), share(work.tile.rows)},
            0,
            share(work.m_block),
            0,
            share(work.end)};
  }

  __device__ __forceinline__ void Run() {
    while (true) {
      WaitBarrier(pipeline.full + 8 * ring.stage, ring.phase);
      const WorkUnit work = ReadAnnounced();
      if (work.end == 0) return;
      // What the outputs need is loaded early, so that the end of the tile does not wait for it.
      const int m_tile = work.m_block * kTiles + Tile();
      const int32_t* slots = p.output.slots == nullptr ? nullptr : p.output.slots + work.tile.row;
      const OutputPlaces<kRows> places(slots, work.tile);
      const LaneRows rows[kSlabs] = {LoadLaneRows(p, work.tile.expert, m_tile, SlabOfTile(0)),
                                     LoadLaneRows(p, work.tile.expert, m_tile, SlabOfTile(1))};
      Multiply(work.end);
      Store(work, m_tile, rows, places);
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    ExpertGemmFewRowsSm90(const __grid_constant__ ExpertGemm p, const TileConstants constants) {
  NVFP4_DYNAMIC_SHARED(dynamic);
  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  __shared__ WorkUnit announced[kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(SharedAddress(barriers + stage), 1);
      InitBarrier(SharedAddress(barriers + kStages + stage), kConsumers);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const Pipeline pipeline = {SharedAddress(dynamic), SharedAddress(barriers),
                             SharedAddress(barriers + kStages), announced};
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (warp == kConsumers) {
    if (!p.schedule_is_unchanged) {
      WaitForPrecedingKernel();
      StartNextKernel();
    }
    Producer producer{p, pipeline, lane, {}, !p.schedule_is_unchanged};
    producer.Run();
  } else {
    Consumer<T> consumer{p, pipeline, constants, warp, lane, {}, {}};
    consumer.Run();
  }
}

cudaError_t LaunchFewRows(cudaStream_t stream, const ExpertGemm& gemm) {
  const auto blocks = dim3(static_cast<unsigned>(gemm.schedule.blocks));
  return gemm.type == DataType::kF16
             ? LaunchWide(stream, blocks, kThreads, kSharedBytes, /*overlaps=*/true,
                          ExpertGemmFewRowsSm90<__half>, gemm, MakeTileConstants<__half>())
             : LaunchWide(stream, blocks, kThreads, kSharedBytes, /*overlaps=*/true,
                          ExpertGemmFewRowsSm90<__nv_bfloat16>, gemm,
                          MakeTileConstants<__nv_bfloat16>());
}

// With this many rows, the MMAs of a weight tile take as long as reading it.
constexpr int32_t kMinCost = 32;

}  // namespace

GemmKernel FewRowsGemmSm90() {
  const int32_t blocks = std::min(MultiprocessorCount() * kBlocksPerSm, kMaxBlocks);
  return {{kRows, kMinCost}, kTiles, kStepTiles, blocks, /*takes_work=*/true, LaunchFewRows};
}

}  // namespace nvfp4
