// Computes out = act(W[expert] @ x) for rows that are sorted by expert, with wgmma on Hopper, in
// bf16 and f16. expert_gemm.cuh has the whole equation.
//
// wgmma wants M = 64. Weight rows take the M dimension and tokens take N, because N can be as small
// as 8: an expert with 3 tokens wastes 5 columns instead of 61 rows. The weights are therefore the
// register operand (A): each thread unpacks FP4 codes into the registers that wgmma reads.
//
// Bottleneck: memory bandwidth below about 50 tokens per expert, tensor cores above. Unpacking
// takes 0.84 logic instructions per weight and hides behind both; test_sass.py has an upper bound.
//
// A block of threads has kGroups consumer warpgroups and one producer warpgroup. One step of the
// pipeline covers kDepth times 64 of k, and kStages steps are in flight:
//   producer warps 0, 1    copy codes and scales by bulk copies, one lane for each weight tile
//   producer warps 2, 3    copy rows of x into the 128-byte swizzle, with zeros past k: by a tensor
//                          map if the rows lie one after the other, otherwise by cp.async
//   consumers              unpack a weight tile to fragments while the MMAs of the previous one run
//
// Transposed weights, for gradients: out = W[expert].T @ x, from the same bytes. Columns of weights
// take the M dimension, and rows are k. So a warp unpacks 16 of the 64 columns of a tile, for all
// of its rows, and transposes each 8x8 matrix of a fragment (movmatrix). The four warps read each
// tile twice. In the layout of a gated layer, the rows of a tile are 32 of the gate and 32 of up,
// which take turns in eights; columns of x must have that order.
//
// tile_scheduler.cuh divides the work. If an output tile is split, the block stores a partial sum,
// or adds the partial sums of other blocks (partial_sums.cuh).
//
// The kernel may start before the preceding one ends. What it reads first, the schedule and the
// weights, is then unchanged since the previous kernel (see moe_w4a16.cu).
//
// Needs: sm_90a. Tests: tests/emulation/test_emulation.py, tests/gpu/test_cuda_kernel.py,
// test_sass.py.
#include <algorithm>

#include "cuda/epilogues/direct_store.cuh"
#include "cuda/epilogues/staged_store.cuh"
#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/scheduling/partial_sums.cuh"
#include "cuda/scheduling/stage_ring.cuh"

namespace nvfp4 {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kGroupThreads = 128;  // threads of a warpgroup
constexpr int kGatherThreads = 64;
constexpr int kRowBytes = 2 * kTileK;  // one row of x, 64 of k
constexpr int kPartRows = 32;          // rows of x that a copy by the tensor map brings
constexpr int kTileBytes = kTileCodeBytes + kTileScaleBytes;

// kRows: the most tokens of a tile. The MMAs of a tile cover its tokens rounded up to kRowStep.
// kTiles: weight tiles of a consumer warpgroup. kDepth: how many times 64 of k a step covers. In
// each step, a warpgroup has two weight tiles, either side by side or along k.
template <int kRows_, int kRowStep_, int kTiles_, int kGroups_, int kStages_,
          bool kTransposed_ = false>
struct Config {
  static constexpr int kRows = kRows_;
  static constexpr int kRowStep = kRowStep_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kDepth = 2 / kTiles;
  static constexpr int kGroups = kGroups_;
  static constexpr int kStages = kStages_;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kBlockTiles = kTiles * kGroups;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  // Registers of a thread. The launch gives each thread the same number, and setmaxnreg then moves
  // registers from producers to consumers.
  enum {
    kLaunchRegisters = 65536 / kThreads / 8 * 8,
    kProducerRegisters = kRows <= 64 ? 40 : 56,
    kConsumerRegisters = ((kGroups + 1) * kLaunchRegisters - kProducerRegisters) / kGroups / 8 * 8,
  };
  static constexpr int kSliceBytes = kRows * kRowBytes;  // rows of x for 64 of k
  static constexpr int kRowsBytes = kDepth * kSliceBytes;
  // Whether rows that lie one after the other come by a tensor map. Smaller tiles have too few.
  static constexpr bool kCopiesParts = kRows % kPartRows == 0;
  static constexpr int kScaleOffset = 2 * kGroups * kTileCodeBytes;
  static constexpr int kWeightBytes = 2 * kGroups * kTileBytes;
  using Staged = StagedStore<kRows, kTiles>;
  static constexpr int kAlignment = 1024;  // that the swizzle needs
  static constexpr int kSharedBytes =
      kStages * (kRowsBytes + kWeightBytes) + kGroups * Staged::kBytes + kAlignment;
  static_assert(kSharedBytes + 1024 + 48 * kStages <= 228 * 1024, "shared memory of an SM");
  static_assert(48 * kStages <= kDynamicAlignment, "barriers, before the dynamic shared memory");
};

// Returns a value that is the same for all lanes, in a way that lets the compiler know it.
template <typename Value>
__device__ __forceinline__ Value Uniform(Value value) {
  return __shfl_sync(kAllLanes, value, 0);
}

struct Shared {
  uint32_t rows;     // [kStages][kDepth][kRows][128 bytes]
  uint32_t weights;  // [kStages]: codes [kBlockTiles][kDepth][2048], scales [..][256]
  uint32_t outputs;  // [kGroups]: see staged_store.cuh
  uint32_t full;     // [kStages] mbarriers
  uint32_t empty;
};

// Copies codes or scales of weight tiles, kBytes for each tile, from `weights` to `target` in the
// stage. One warp copies codes, and another one scales. Lane t copies tile t of the block.
//
// If `announced` is set, the warp also announces each work unit with its first stage, and the end
// by an empty work unit. Consumers therefore need not run the tile scheduler.
template <typename C, int kBytes>
__device__ __forceinline__ void ProduceWeights(const ExpertGemm& p, const Shared& shared,
                                               const uint8_t* weights, uint32_t target,
                                               WorkUnit* announced, int lane) {
  StageRing<C::kStages> ring;
  const int32_t m_tiles = p.m_tiles(), k_tiles = (p.k + kTileK - 1) / kTileK;
  target += lane * C::kDepth * kBytes;
  TileScheduler scheduler(p.rows, p.rule, p.schedule);
  while (scheduler.Next()) {
    const WorkUnit& work = scheduler.work;
    const int32_t first = work.m_block * C::kBlockTiles;
    const int32_t count = min(C::kBlockTiles, m_tiles - first);
    // Weight tiles lie row by row. Of transposed weights, m is the column.
    const int64_t expert = work.tile.expert, m = first + lane, k = work.begin * C::kDepth;
    const int64_t next = (C::kTransposed ? m_tiles : 1) * kBytes;  // from tile to tile along k
    const uint8_t* source = weights + (C::kTransposed ? (expert * k_tiles + k) * m_tiles + m
                                                      : (expert * m_tiles + m) * k_tiles + k) *
                                          kBytes;
    for (int32_t step = work.begin; step < work.end; ++step) {
      const uint32_t full = shared.full + 8 * ring.stage;
      const uint32_t stage = target + ring.stage * C::kWeightBytes;
      WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
      if (lane == 0) {
        if (announced != nullptr && step == work.begin) announced[ring.stage] = work;
        ArriveExpect(full, count * C::kDepth * kBytes);
      }
      __syncwarp();
      if (lane < count) {
        // If k ends inside a step, the last tile is copied twice. The second copy is multiplied by
        // zeros.
        const bool whole = C::kDepth == 1 || (step + 1) * C::kDepth <= k_tiles;
        const bool at_once = whole && (C::kDepth == 1 || !C::kTransposed);
        BulkCopy(stage, source, at_once ? C::kDepth * kBytes : kBytes, full);
        if (!at_once) BulkCopy(stage + kBytes, whole ? source + next : source, kBytes, full);
      }
      source += C::kDepth * next;
      ring.Next();
    }
  }
  WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
  if (lane == 0) {
    if (announced != nullptr) announced[ring.stage].begin = announced[ring.stage].end = 0;
    Arrive(shared.full + 8 * ring.stage);
  }
}

// Copies rows of x. Thread `thread` of 64 copies 16 bytes, chunk thread % 8, of rows thread / 8 + 8
// i. Shared memory past the rows of the tile keeps its old bytes; the sums of such rows are not
// stored.
template <typename C>
__device__ __forceinline__ void ProduceRows(const ExpertGemm& p, const Shared& shared, int thread) {
  constexpr int kCopies = C::kRows * 8 / kGatherThreads;
  StageRing<C::kStages> ring;
  const int chunk = thread % 8;
  const uint32_t place = thread / 8 * kRowBytes + ((chunk ^ (thread / 8)) << 4);
  const uint4* values = static_cast<const uint4*>(p.left.values);
  TileScheduler scheduler(p.rows, p.rule, p.schedule);
  while (scheduler.Next()) {
    const WorkUnit& work = scheduler.work;
    const int copies = (work.tile.rows - thread / 8 + 7) / 8;
    uint32_t source[kCopies];  // in units of 16 bytes; see kMaxEngineExtent
    // All slots are loaded before the first one is used, because its use waits for the load.
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i >= copies) break;
      source[i] = work.tile.row + thread / 8 + 8 * i;
      if (p.left.slots != nullptr) source[i] = p.left.slots[source[i]];
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i >= copies) break;
      if (p.left.slots != nullptr) source[i] /= static_cast<uint32_t>(p.left.slots_per_row);
      source[i] = source[i] * static_cast<uint32_t>(p.k / 8) + chunk;
    }
    for (int32_t step = work.begin; step < work.end; ++step) {
      WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
      uint32_t target = shared.rows + ring.stage * C::kRowsBytes + place;
#pragma unroll
      for (int d = 0; d < C::kDepth; ++d) {
        const int32_t k = (step * C::kDepth + d) * kTileK;
        const int bytes = k + chunk * 8 < p.k ? 16 : 0;
        const void* base = values + (bytes == 0 ? 0 : k / 8);
        if (copies == kCopies) {
#pragma unroll
          for (int i = 0; i < kCopies; ++i) {
            CopyOrZero(target + 8 * i * kRowBytes, Advance(base, source[i]), bytes);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kCopies; ++i) {
            if (i < copies) {
              CopyOrZero(target + 8 * i * kRowBytes, Advance(base, source[i]), bytes);
            }
          }
        }
        target += C::kSliceBytes;
      }
      ArriveWhenCopied(shared.full + 8 * ring.stage);
      ring.Next();
    }
  }
  WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
  Arrive(shared.full + 8 * ring.stage);
}

// Whether rows of x are copied by their tensor map.
template <typename C>
__host__ __device__ __forceinline__ bool CopiesParts(const ExpertGemm& p) {
  return C::kCopiesParts && p.left.slots == nullptr;
}

// Copies rows of x that lie one after the other, by their tensor map. Lane i copies part i of a
// tile. The last part also brings rows behind the tile, whose sums are not stored.
template <typename C>
__device__ __forceinline__ void ProduceParts(const ExpertGemm& p, const TensorMap& x,
                                             const Shared& shared, int lane) {
  StageRing<C::kStages> ring;
  TileScheduler scheduler(p.rows, p.rule, p.schedule);
  while (scheduler.Next()) {
    const WorkUnit& work = scheduler.work;
    const int parts = (work.tile.rows + kPartRows - 1) / kPartRows;
    for (int32_t step = work.begin; step < work.end; ++step) {
      const uint32_t full = shared.full + 8 * ring.stage;
      WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
      if (lane == 0) ArriveExpect(full, C::kDepth * parts * kPartRows * kRowBytes);
      __syncwarp();
      if (lane < parts) {
        const uint32_t target =
            shared.rows + ring.stage * C::kRowsBytes + lane * kPartRows * kRowBytes;
#pragma unroll
        for (int d = 0; d < C::kDepth; ++d) {
          CopyTile(target + d * C::kSliceBytes, x, (step * C::kDepth + d) * kTileK,
                   work.tile.row + lane * kPartRows, 0, 0, full);
        }
      }
      ring.Next();
    }
  }
  WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
  if (lane == 0) Arrive(shared.full + 8 * ring.stage);
}

template <typename T, typename C>
struct Consumer {
  const ExpertGemm& p;
  const Shared& shared;
  const TileConstants constants;
  const uint32_t codes;   // codes of this thread in the first stage
  const uint32_t scales;  // scales of this thread in the first stage
  const uint32_t rows;    // descriptor address of the rows in the first stage
  StageRing<C::kStages> ring;
  float sums[C::kTiles][C::kRows / 2];

  // These two are read from the hardware each time, which saves registers in the loops.
  static __device__ __forceinline__ uint32_t Group() {
    return Uniform(threadIdx.x / kGroupThreads);
  }
  static __device__ __forceinline__ uint32_t Thread() { return threadIdx.x % kGroupThreads; }

  __device__ __forceinline__ void AwaitStage() {
    WaitBarrier(shared.full + 8 * ring.stage, ring.phase);
    FenceAsyncProxy();  // without it, tensor cores do not see rows that came by cp.async
  }

  static __device__ __forceinline__ WorkUnit BroadcastWork(const WorkUnit& work) {
    const RowTile& tile = work.tile;
    return {{Uniform(tile.expert), Uniform(tile.row), Uniform(tile.rows)},
            Uniform(work.output_tile),
            Uniform(work.m_block),
            Uniform(work.begin),
            Uniform(work.end)};
  }

  struct PackedTile {
    uint4 codes;
    uint2 scales;
  };
  // Of each 16 rows of a tile, the pair of steps with the columns of this warp.
  struct PackedColumns {
    uint2 codes[4];
    uint32_t scales[4];
  };
  using Packed = std::conditional_t<C::kTransposed, PackedColumns, PackedTile>;

  // Loads the weights of tile `tile`, one of the two tiles that this warpgroup has in the stage.
  __device__ __forceinline__ Packed Load(int tile) {
    const uint32_t offset = ring.stage * C::kWeightBytes;
    const uint32_t own_codes = codes + offset + tile * kTileCodeBytes;
    const uint32_t own_scales = scales + offset + tile * kTileScaleBytes;
    if constexpr (C::kTransposed) {
      Packed packed;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packed.codes[j] = LoadShared8(own_codes + j * (kTileCodeBytes / 4));
        packed.scales[j] = LoadShared4(own_scales + j * (kTileScaleBytes / 4));
      }
      return packed;
    } else {
      return {LoadShared16(own_codes), LoadShared8(own_scales)};
    }
  }

  __device__ __forceinline__ void Unpack(const Packed& packed, uint32_t (&fragments)[4][4]) {
    if constexpr (C::kTransposed) {
      const bool odd = Uniform(threadIdx.x / 32) & 1;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        UnpackTransposed<T>(packed.codes[j].x, packed.codes[j].y, packed.scales[j], odd, constants,
                            fragments[j]);
      }
    } else {
      UnpackTile<T>(packed.codes, packed.scales, constants, fragments);
    }
  }

  // Returns the descriptor address of the rows of this stage.
  __device__ __forceinline__ uint32_t Rows() const {
    return rows + ring.stage * (C::kRowsBytes / 16);
  }

  // Multiplies `columns` rows, rounded up to at most kLast * kRowStep. A bisection finds the code
  // for that number of rows.
  template <int kFirst, int kLast>
  __device__ __forceinline__ void Multiply(int columns, uint32_t b,
                                           float (&tile_sums)[C::kRows / 2],
                                           const uint32_t (&fragments)[4][4]) {
    if constexpr (kFirst < kLast) {
      constexpr int kMiddle = (kFirst + kLast) / 2;
      if (columns > kMiddle * C::kRowStep) {
        return Multiply<kMiddle + 1, kLast>(columns, b, tile_sums, fragments);
      }
      return Multiply<kFirst, kMiddle>(columns, b, tile_sums, fragments);
    } else {
      WgmmaFence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Wgmma<T, kLast * C::kRowStep>::Run(tile_sums, fragments[j], TileDescriptor(b + 2 * j));
      }
      WgmmaCommit();
    }
  }

  __device__ __forceinline__ void Release(int stage) {
    if (Thread() % 32 == 0) Arrive(shared.empty + 8 * stage);
  }

  // sums = W @ x over `steps` stages. Two sets of fragments take turns: the MMAs of one set run
  // while the other is unpacked. Each set has a name, because an index would move it to local
  // memory. Loads from shared memory start before each wait for MMAs.
  template <int kFirst, int kLast>
  __device__ __forceinline__ void AccumulateSteps(int columns, int steps) {
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) sums[t][i] = 0.0f;
    }
    uint32_t even[4][4], odd[4][4];
    uint32_t b = Rows();
    Unpack(Load(0), even);
    int before = -1;  // stage that MMAs in flight read
    while (true) {
      Multiply<kFirst, kLast>(columns, b, sums[0], even);
      const Packed second = Load(1);
      WgmmaWait<1>();
      if (before >= 0) Release(before);
      before = ring.stage;
      Unpack(second, odd);
      Multiply<kFirst, kLast>(columns, b + (C::kDepth - 1) * (C::kSliceBytes / 16),
                              sums[C::kTiles - 1], odd);
      ring.Next();
      if (--steps == 0) break;
      AwaitStage();
      b = Rows();
      const Packed first = Load(0);
      WgmmaWait<1>();
      Unpack(first, even);
    }
    WgmmaWait<0>();
    Release(before);
  }

  // Finds the code for `columns` rows before the loop over k, if registers allow. Inside the loop,
  // the branches would take a fifth of the time of the tensor cores at 128 rows. With four
  // warpgroups there are not enough registers, and the gain would be small.
  __device__ __forceinline__ void Accumulate(int columns, int steps) {
    constexpr int kLast = C::kRows / C::kRowStep;
    if constexpr (C::kTiles == 2) {
      if (columns > (kLast - 1) * C::kRowStep) {
        AccumulateSteps<kLast, kLast>(columns, steps);
      } else {
        AccumulateSteps<1, kLast - 1>(columns, steps);
      }
    } else {
      AccumulateSteps<1, kLast>(columns, steps);
    }
  }

  __device__ __forceinline__ FixUp<C::kTiles, C::kRows / 2> MakeFixUp() const {
    const int group = static_cast<int>(Group());
    return {p.schedule,    p.partial_sums, group, C::kGroups, static_cast<int>(Thread()),
            kGroupThreads, group + 1};
  }

  // Returns the output row of the sorted row that this thread has.
  __device__ __forceinline__ int32_t OutputRow(const RowTile& tile) const {
    const int row = static_cast<int>(Thread());
    const bool listed = p.output.slots != nullptr && row < tile.rows;
    return listed ? p.output.slots[tile.row + row] : tile.row + row;
  }

  __device__ __forceinline__ void Store(const RowTile& tile, int m_tile, int32_t output_row,
                                        const LaneRows (&lane_rows)[C::kTiles]) {
    if (!CanStage(p)) {
#pragma unroll
      for (int t = 0; t < C::kTiles; ++t) {
        StoreTile<T>(p, tile, m_tile + t, Thread() / 32, sums[t]);
      }
      return;
    }
    const typename C::Staged staged = {p, shared.outputs + Group() * C::Staged::kBytes,
                                       static_cast<int>(Group() + 1), static_cast<int>(Thread())};
    staged.Begin(output_row);
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
      staged.template Put<T>(tile, m_tile + t, t, lane_rows[t], sums[t]);
    }
    staged.template Send<T>(tile, FirstRow(p, m_tile, 0));
  }

  __device__ __forceinline__ void Run(const WorkUnit* announced) {
    while (true) {
      AwaitStage();
      const WorkUnit work = BroadcastWork(announced[ring.stage]);
      if (work.begin == work.end) return;
      // Loads for the outputs start early, so that they have arrived when the sums are ready.
      const int32_t output_row = OutputRow(work.tile);
      LaneRows lane_rows[C::kTiles];
      const int m_tile = work.m_block * C::kBlockTiles + Group() * C::kTiles;
#pragma unroll
      for (int t = 0; t < C::kTiles; ++t) {
        lane_rows[t] = LoadLaneRows(p, work.tile.expert, m_tile + t, Thread() / 32);
      }
      Accumulate(work.tile.rows, work.end - work.begin);
      if (work.begin > 0) {
        MakeFixUp().StorePartialSums(sums);
        continue;
      }
      if (work.end < p.schedule.k_steps) MakeFixUp().AddPartialSums(work.output_tile, sums);
      Store(work.tile, m_tile, output_row, lane_rows);
    }
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    ExpertGemmSm90(const __grid_constant__ ExpertGemm p, const TileConstants constants,
                   const __grid_constant__ TensorMap x) {
  NVFP4_DYNAMIC_SHARED(dynamic);
  __shared__ __align__(8) uint64_t barriers[2 * C::kStages];
  __shared__ WorkUnit announced[C::kStages];
  if (threadIdx.x == 0) {
    const uint32_t row_producers = CopiesParts<C>(p) ? 1 : kGatherThreads;
    for (int stage = 0; stage < C::kStages; ++stage) {
      InitBarrier(SharedAddress(barriers + stage), row_producers + 2);
      InitBarrier(SharedAddress(barriers + C::kStages + stage), C::kGroups * (kGroupThreads / 32));
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (!p.schedule_is_unchanged) WaitForPrecedingKernel();

  // The shuffles keep these addresses in registers. Computing them again would be slower.
  const auto find_shared = [&] {
    Shared shared;
    shared.rows = (SharedAddress(dynamic) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
    shared.rows = Uniform(shared.rows);
    shared.weights = shared.rows + C::kStages * C::kRowsBytes;
    shared.outputs = shared.weights + C::kStages * C::kWeightBytes;
    shared.full = Uniform(SharedAddress(barriers));
    shared.empty = shared.full + 8 * C::kStages;
    return shared;
  };
  const uint32_t group = Uniform(threadIdx.x / kGroupThreads), thread = threadIdx.x % kGroupThreads;
  if (group == C::kGroups) {
    ShrinkRegisters<C::kProducerRegisters>();
    const Shared shared = find_shared();
    if (thread < 32) {
      ProduceWeights<C, kTileCodeBytes>(p, shared, p.weight.packed, shared.weights, announced,
                                        thread);
    } else if (thread < 64) {
      ProduceWeights<C, kTileScaleBytes>(p, shared, p.weight.block_scale,
                                         shared.weights + C::kScaleOffset, nullptr, thread - 32);
    } else {
      WaitForPrecedingKernel();
      if (thread == kGroupThreads - 1) StartNextKernel();
      if (!CopiesParts<C>(p)) {
        ProduceRows<C>(p, shared, thread - 64);
      } else if (thread < 96) {
        ProduceParts<C>(p, x, shared, thread - 64);
      }
    }
  } else {
    GrowRegisters<C::kConsumerRegisters>();
    const Shared shared = find_shared();
    const uint32_t pair = thread / 32 / 2;  // of steps, with the columns of a warp if transposed
    const uint32_t lane = thread % 32;
    const uint32_t codes = shared.weights + 2 * group * kTileCodeBytes +
                           (C::kTransposed ? lane * 16 + pair * 8 : thread * 16);
    const uint32_t scales = shared.weights + C::kScaleOffset + 2 * group * kTileScaleBytes +
                            (C::kTransposed ? lane / 4 * 8 + pair * 4 : thread / 4 * 8);
    Consumer<T, C> consumer{p,  shared, constants, codes, scales, DescriptorAddress(shared.rows),
                            {}, {}};
    consumer.Run(announced);
  }
}

// The arguments are kRows, kRowStep, kTiles, kGroups and kStages. On an H200, one block of four
// warpgroups on a multiprocessor reads weights faster than two blocks of two warpgroups, which copy
// the rows twice.
using Rows8 = Config<8, 8, 1, 4, 10>;
using Rows16 = Config<16, 8, 1, 4, 9>;
using Rows32 = Config<32, 8, 1, 4, 7>;
using Rows64 = Config<64, 16, 1, 4, 5>;
using Rows96 = Config<96, 16, 1, 3, 4>;
using Rows128 = Config<128, 16, 2, 2, 6>;

template <typename C>
using Transposed = Config<C::kRows, C::kRowStep, C::kTiles, C::kGroups, C::kStages, true>;

constexpr int kMaxSms = 132;  // multiprocessors of a Hopper GPU, at most
// Up to this many rows, hardly any expert has two, and the smallest tile is used.
constexpr int64_t kFewRows = 16;

struct Variant {
  int64_t max_mean_rows;  // used up to this mean number of rows of an expert
  int32_t rows, min_cost, block_tiles, step_tiles, shared_bytes;
  cudaError_t (*launch)(cudaStream_t stream, const ExpertGemm& gemm);
};

// Returns an empty map where the kernel does not use it.
template <typename C>
cudaError_t MakeRowMap(const ExpertGemm& gemm, TensorMap* x) {
  *x = {};
  if (!CopiesParts<C>(gemm)) return cudaSuccess;
  const auto k = static_cast<uint64_t>(gemm.k), rows = static_cast<uint64_t>(gemm.left.rows);
  const uint64_t row_bytes = 2 * k, all_bytes = rows * row_bytes;
  return MakeTensorMap(
      {gemm.left.values, {k, rows, 1, 1}, {row_bytes, all_bytes, all_bytes}, {kPartRows, 1, 1}}, x);
}

template <typename T, typename C>
cudaError_t LaunchConfig(cudaStream_t stream, const ExpertGemm& gemm) {
  TensorMap x;
  NVFP4_RETURN_IF_CUDA_ERROR(MakeRowMap<C>(gemm, &x));
  return LaunchWide(stream, dim3(static_cast<unsigned>(gemm.schedule.blocks)), C::kThreads,
                    C::kSharedBytes, /*overlaps=*/true, ExpertGemmSm90<T, C>, gemm,
                    MakeTileConstants<T>(), x);
}

template <typename C>
cudaError_t LaunchVariant(cudaStream_t stream, const ExpertGemm& gemm) {
  return gemm.type == DataType::kF16 ? LaunchConfig<__half, C>(stream, gemm)
                                     : LaunchConfig<__nv_bfloat16, C>(stream, gemm);
}

template <typename C>
constexpr Variant MakeVariant(int64_t max_mean_rows) {
  static_assert(int64_t{kMaxSms} * C::kGroups * kGroupThreads * C::kTiles * (C::kRows / 2) * 4 <=
                    kPartialSumBytes,
                "the workspace holds a partial sum of each block");
  return {max_mean_rows,   C::kRows,  C::kRows >= 64 ? 64 : 32,
          C::kBlockTiles,  C::kDepth, C::kSharedBytes + kDynamicAlignment,
          LaunchVariant<C>};
}

constexpr Variant kVariants[] = {
    MakeVariant<Rows8>(-1),  MakeVariant<Rows16>(5),  MakeVariant<Rows32>(18),
    MakeVariant<Rows64>(56), MakeVariant<Rows96>(80), MakeVariant<Rows128>(INT64_MAX),
};

static_assert(MaxSharedBytes(kVariants) == kSharedBytesSm90, "limits.h");
static_assert(kSharedBytesSm80 <= kSharedBytesSm90, "some layers run on that engine");

// Gradients of few rows are rare, so fewer sizes of tiles do.
constexpr Variant kTransposedVariants[] = {
    MakeVariant<Transposed<Rows16>>(5),
    MakeVariant<Transposed<Rows64>>(56),
    MakeVariant<Transposed<Rows128>>(INT64_MAX),
};

static_assert(MaxSharedBytes(kTransposedVariants) <= kSharedBytesSm90, "limits.h");

template <size_t kCount>
const Variant& ChooseVariant(const Variant (&variants)[kCount], int64_t rows, int64_t experts) {
  if (experts > 1 && rows <= kFewRows) return variants[0];
  const int64_t mean = rows / std::max<int64_t>(experts, 1);
  for (const Variant& variant : variants) {
    // A single expert has all rows. Of many experts, some have several times the mean.
    if (mean <= (experts == 1 ? variant.rows : variant.max_mean_rows)) return variant;
  }
  return variants[kCount - 1];
}

GemmKernel MakeKernel(const Variant& variant) {
  return {{variant.rows, variant.min_cost},
          variant.block_tiles,
          variant.step_tiles,
          std::min(MultiprocessorCount(), kMaxSms),
          /*takes_work=*/false,
          variant.launch};
}

}  // namespace

GemmKernel ChooseGemmSm90(int64_t rows, int64_t experts) {
  const Sm90Form form = ChooseSm90Form(rows, experts);
  if (form == Sm90Form::kFewRows) return FewRowsGemmSm90();
  if (form == Sm90Form::kMma) return ChooseGemmSm80(rows, experts);
  return MakeKernel(ChooseVariant(kVariants, rows, experts));
}

GemmKernel ChooseTransposedGemmSm90(int64_t rows, int64_t experts) {
  return MakeKernel(ChooseVariant(kTransposedVariants, rows, experts));
}

}  // namespace nvfp4
