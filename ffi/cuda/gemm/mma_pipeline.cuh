// The software pipeline of the engines on mma.sync (expert_gemm_sm80.cu, expert_gemm_sm120.cu): it
// overlaps copies with MMAs. Each engine says what is copied and multiplied.
//
// A block works through its work units (tile_scheduler.cuh) in steps over k. kStages steps are in
// shared memory. All threads copy and multiply. Copies run kStages - 1 steps ahead of the MMAs,
// also across the ends of work units. The producer finds each work unit once and leaves it in
// shared memory for the consumer.
//
// A Config has kRows, kTiles, kStepTiles, kStages, kThreads, kStageBytes, kWorkUnits, kWorkUnitsAt,
// and kTakesWork: whether blocks take their tiles one by one. Needs: sm_80.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/scheduling/partial_sums.cuh"
#include "cuda/scheduling/work_taker.cuh"

namespace nvfp4 {

constexpr int kSlabs = 2;  // slabs of 16 weight rows that a warp multiplies
constexpr int kPipelineBarrier = 1;

// A work unit with steps in shared memory, and where the next work unit of the block begins.
struct SharedWorkUnit {
  WorkUnit work;  // work.begin is -1 after the last work unit
  int32_t next;
  WorkStart at;
};

// The bytes of `count` work units, and of the next number behind them if blocks take tiles.
constexpr int WorkUnitBytes(int count, bool takes_work) {
  return count * static_cast<int>(sizeof(SharedWorkUnit)) + (takes_work ? int{sizeof(int32_t)} : 0);
}

template <typename C>
__device__ __forceinline__ SharedWorkUnit* SharedWorkUnits(uint8_t* shared) {
  return reinterpret_cast<SharedWorkUnit*>(shared + C::kWorkUnitsAt);
}

struct Nothing {};  // in the place of a WorkTaker

// Returns where the number of the next tile is, if blocks take tiles.
template <typename C>
__device__ __forceinline__ int32_t* SharedTaken(uint8_t* shared) {
  return reinterpret_cast<int32_t*>(SharedWorkUnits<C>(shared) + C::kWorkUnits);
}

// Copies one step after another to shared memory, and finds their work units. An engine defines
//   OwnThread()        this thread; an engine may read it again to save a register
//   BeginWork(work, thread)   points to the first step of a work unit, and sets k
//   Place(stage)       where this thread's copies of a stage go
//   CopyWeights(place), CopyRows(place)   start the copies of one step
template <typename Engine, typename C>
struct PipelineProducer {
  static constexpr int kStepK = C::kStepTiles * kTileK;

  const ExpertGemm& p;
  uint8_t* const shared;
  const int thread;
  int32_t steps = 0;  // steps of the work unit to be copied; -1 after the last work unit
  int32_t k;          // what is left of k
  int slot = -1;      // place of the work unit in shared memory
  std::conditional_t<C::kTakesWork, WorkTaker, Nothing> taker;

  __device__ __forceinline__ Engine& engine() { return static_cast<Engine&>(*this); }

  // Finds the next work unit. A barrier must separate this call from the previous one, because the
  // call reads what one thread has then written to shared memory.
  __device__ __forceinline__ void Next() {
    if constexpr (C::kTakesWork) return NextTaken();
    TileScheduler scheduler(p.rows, p.rule, p.schedule);
    if (slot >= 0) {
      const SharedWorkUnit& before = SharedWorkUnits<C>(shared)[slot];
      scheduler.next = before.next;
      scheduler.at = before.at;
    }
    slot = slot + 1 == C::kWorkUnits ? 0 : slot + 1;
    const bool more = scheduler.Next();
    if (!more) scheduler.work = {{}, -1, 0, -1, -2};
    const int own = engine().OwnThread();
    if (own == 0) SharedWorkUnits<C>(shared)[slot] = {scheduler.work, scheduler.next, scheduler.at};
    steps = scheduler.work.end - scheduler.work.begin;
    if (more) engine().BeginWork(scheduler.work, own);
  }

  __device__ __forceinline__ void NextTaken() {
    const auto block = static_cast<int32_t>(blockIdx.x);
    const int32_t tile =
        slot < 0 ? block : p.schedule.blocks + taker.Take(p.schedule.ready, SharedTaken<C>(shared));
    slot = slot + 1 == C::kWorkUnits ? 0 : slot + 1;
    WorkUnit work;
    const bool more = FindTaken(p.rows, p.rule, p.schedule, tile, &work);
    if (!more) work = {{}, -1, 0, -1, -2};
    const int own = engine().OwnThread();
    if (own == 0) SharedWorkUnits<C>(shared)[slot].work = work;
    steps = work.end - work.begin;
    if (more) engine().BeginWork(work, own);
  }

  // Returns the first weight tile, in the order of k, of tile `tile` of the block. Past the last
  // tile of the expert it returns that last tile. The sums of such a tile are not stored.
  __device__ __forceinline__ uint32_t WeightTile(const WorkUnit& work, int tile) const {
    const int index = min(work.m_block * C::kTiles + tile, p.m_tiles() - 1);
    const uint32_t k_tiles = (p.k + kTileK - 1) / kTileK;
    return (static_cast<uint32_t>(work.tile.expert) * p.m_tiles() + index) * k_tiles +
           work.begin * C::kStepTiles;
  }

  // Starts the copies of weights of the first stages, as far as they belong to the first work unit.
  // Returns the number of these stages.
  __device__ __forceinline__ int CopyFirstWeights() {
    Next();
    const int count = min(steps, C::kStages - 1);
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) {
      engine().CopyWeights(engine().Place(stage));
      k -= kStepK;
    }
    k += max(count, 0) * kStepK;
    return count;
  }

  // Starts the copies of the next step, if there is one, and ends their group.
  __device__ __forceinline__ void CopyStep(int stage, bool has_weights = false) {
    if constexpr (C::kTakesWork) taker.Advance(SharedTaken<C>(shared));
    if (steps == 0) Next();
    if (steps > 0) {
      const auto place = engine().Place(stage);
      if (!has_weights) engine().CopyWeights(place);
      engine().CopyRows(place);
      k -= kStepK;
      --steps;
      if constexpr (C::kTakesWork) {
        if (steps <= 1) taker.Ask(p.schedule.ready);
      }
    }
    CommitCopies();
  }
};

// Multiplies steps in shared memory. An engine defines
//   OwnThread()                    this thread, as in PipelineProducer
//   Multiply(stage, rows, full)    sums += W @ x for one step and the rows of a tile
//   Store(work)                    stores the outputs of a tile
template <typename Engine, typename C>
struct PipelineConsumer {
  const ExpertGemm& p;
  const uint8_t* const shared;
  const int thread;
  float sums[kSlabs][C::kRows / 2];

  __device__ __forceinline__ Engine& engine() { return static_cast<Engine&>(*this); }

  __device__ __forceinline__ FixUp<kSlabs, C::kRows / 2> MakeFixUp() {
    return {p.schedule, p.partial_sums, 0, 1, engine().OwnThread(), C::kThreads, kPipelineBarrier};
  }

  // Stores a partial sum; or adds the partial sums of other blocks, and stores the outputs.
  __device__ __forceinline__ void Finish(const WorkUnit& work) {
    if constexpr (!C::kTakesWork) {  // taken tiles are whole
      if (work.begin > 0) return MakeFixUp().StorePartialSums(sums);
      if (work.end < p.schedule.k_steps) MakeFixUp().AddPartialSums(work.output_tile, sums);
    }
    engine().Store(work);
  }
};

// Computes this block's part of the GEMM. Calls `make_consumer` when the first copies have started.
template <typename C, typename Producer, typename MakeConsumer>
__device__ __forceinline__ void RunPipeline(const ExpertGemm& p, uint8_t* shared,
                                            Producer& producer, const MakeConsumer& make_consumer) {
  // If the schedule is unchanged since the previous kernel, copies of weights need not wait for
  // that kernel.
  const int copied = p.schedule_is_unchanged ? producer.CopyFirstWeights() : 0;
  WaitForPrecedingKernel();
  StartNextKernel();
#pragma unroll 1
  for (int stage = 0; stage < C::kStages - 1; ++stage) {
    __syncthreads();
    producer.CopyStep(stage, stage < copied);
  }
  __syncthreads();

  auto consumer = make_consumer();
  int stage = 0;
  const SharedWorkUnit* const work_units = SharedWorkUnits<C>(shared);
  for (int slot = 0; work_units[slot].work.begin >= 0;
       slot = slot + 1 == C::kWorkUnits ? 0 : slot + 1) {
    const WorkUnit& work = work_units[slot].work;
    const bool full = work.tile.rows > C::kRows - 8;
    ClearSums(consumer.sums);
#pragma unroll 1
    for (int32_t steps = work.end - work.begin; steps > 0; --steps) {
      // After this barrier, the copies of all threads have arrived, and all threads have read the
      // previous stage.
      WaitCopies<C::kStages - 2>();
      __syncthreads();
      producer.CopyStep((stage == 0 ? C::kStages : stage) - 1);
      consumer.Multiply(shared + stage * C::kStageBytes, work.tile.rows, full);
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    consumer.Finish(work);
  }
}

// A kernel of an engine. It is used up to `max_mean_rows` rows of an expert, on average.
struct PipelineVariant {
  int64_t max_mean_rows;
  int32_t rows, tiles, step_tiles, blocks_per_sm, shared_bytes, partial_sum_bytes;
  bool takes_work;
  cudaError_t (*launch)(cudaStream_t stream, const ExpertGemm& gemm);
};

template <typename C>
constexpr PipelineVariant MakePipelineVariant(int64_t max_mean_rows,
                                              cudaError_t (*launch)(cudaStream_t stream,
                                                                    const ExpertGemm& gemm)) {
  return {max_mean_rows,
          C::kRows,
          C::kTiles,
          C::kStepTiles,
          C::kBlocksPerSm,
          C::kSharedBytes,
          C::kPartialSumFloats * 4,
          C::kTakesWork,
          launch};
}

// Whether a variant is for GEMMs with so many rows. A single expert has all of them. Of many
// experts, some have several times the mean.
inline bool IsFor(const PipelineVariant& variant, int64_t rows, int64_t experts) {
  const int64_t mean = rows / std::max<int64_t>(experts, 1);
  return mean <= (experts == 1 ? variant.rows : variant.max_mean_rows);
}

template <size_t kCount>
const PipelineVariant& ChooseVariant(const PipelineVariant (&variants)[kCount], int64_t rows,
                                     int64_t experts) {
  for (const PipelineVariant& variant : variants) {
    if (IsFor(variant, rows, experts)) return variant;
  }
  return variants[kCount - 1];
}

// Returns how many blocks of a kernel run on one multiprocessor, as far as shared memory allows.
inline int BlocksPerSm(const PipelineVariant& variant) {
  constexpr int kReservedBytes = 1024;  // shared memory that the driver reserves for each block
  const int fitting = MultiprocessorSharedBytes() / (variant.shared_bytes + kReservedBytes);
  return std::clamp(fitting, 1, variant.blocks_per_sm);
}

// Returns the kernel of a variant, with blocks for the current device. `min_cost` is that of
// TileRule.
inline GemmKernel MakeGemmKernel(const PipelineVariant& variant, int32_t min_cost) {
  const int64_t blocks = int64_t{MultiprocessorCount()} * BlocksPerSm(variant);
  const int64_t most = std::min<int64_t>(kMaxBlocks, kPartialSumBytes / variant.partial_sum_bytes);
  return {{variant.rows, min_cost}, variant.tiles,
          variant.step_tiles,       static_cast<int32_t>(std::min(blocks, most)),
          variant.takes_work,       variant.launch};
}

}  // namespace nvfp4
