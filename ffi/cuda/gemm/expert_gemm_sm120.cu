// Computes out = act(W[expert] @ x) for rows that are sorted by expert, on FP4 tensor cores: both
// operands are NVFP4 codes with block scales. For compute capability 12.x (RTX PRO 6000, RTX 50,
// DGX Spark). Compiled for any other GPU, the one FP4 instruction is emulated (fp4_mma.cuh); that
// is how this engine was tested.
//
// As in expert_gemm_sm80.cu, weight rows are operand A and tokens take N, padded to 8.
//
// Bottleneck by published rates (1.7 PFLOP/s, 1.8 TB/s): memory bandwidth below about 250 tokens
// per expert, tensor cores above. A weight tile has 2304 bytes and takes 64 MMAs of 16 x 8 x 64 for
// 128 tokens.
//
// A block multiplies kTiles weight tiles of 64 rows, with two warps for each. A warp multiplies two
// neighboring slabs of 16 weight rows by all tokens of the tile. One step of the pipeline covers
// 128 of k. Shared memory holds kStages steps. Each step has:
//   x        [kRows][64 bytes] of codes. Chunk c (16 bytes) of row r is stored at c ^ (r / 2 % 4),
//            so that neither ldmatrix nor cp.async has bank conflicts. Zeros past k, as in device
//            memory. Rows past the last token hold anything: nobody reads their columns of the
//            product.
//   codes    [2][kTiles][2048 bytes] and scales [2][kTiles][256 bytes], in the order of device
//            memory (layout "fp4_64x64"). Zeros past k.
//   x scales [kRows][8 bytes]. Zeros past k, as in device memory.
// mma_pipeline.cuh copies and multiplies; tile_scheduler.cuh divides the work; partial_sums.cuh
// adds the sums of blocks that share an output tile.
//
// Needs: 12.x, or any GPU since sm_80 where emulated; 99 KiB of shared memory.
// Tests: tests/emulation/test_emulation_fp4.py, tests/gpu/test_cuda_fp4.py, test_sass.py.
#include "cuda/epilogues/direct_store.cuh"
#include "cuda/epilogues/quantized_store.cuh"
#include "cuda/gemm/mma_pipeline.cuh"
#include "cuda/instructions/fp4_mma.cuh"
#include "cuda/instructions/mma.cuh"

namespace nvfp4 {
namespace {

constexpr int kTilesOfStep = 2;  // a step covers this many times 64 of k
constexpr int kStepK = kTilesOfStep * kTileK;
constexpr int kRowBytes = kStepK / 2;  // codes of one row of x in a step
constexpr int kRowChunks = kRowBytes / 16;
constexpr int kRowScaleBytes = kStepK / kBlock;
constexpr int kSlabCodeBytes = kTileCodeBytes / 4;
constexpr int kSlabScaleBytes = kTileScaleBytes / 4;
constexpr float kUnit = 1.0f;  // factor of the sums; see kProductUnit

// kRows: the most tokens of a tile. kTiles: weight tiles of a block.
template <int kRows_, int kTiles_, int kStages_, int kBlocksPerSm_>
struct Config {
  static constexpr int kRows = kRows_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kStepTiles = kTilesOfStep;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kThreads = kTiles * 32 * 4 / kSlabs;
  static constexpr int kCodesBytes = kTiles * kTileCodeBytes;  // for 64 of k
  static constexpr int kScalesBytes = kTiles * kTileScaleBytes;
  static constexpr int kCodes = kRows * kRowBytes;  // offsets in a stage
  static constexpr int kScales = kCodes + kTilesOfStep * kCodesBytes;
  static constexpr int kRowScales = kScales + kTilesOfStep * kScalesBytes;
  static constexpr int kStageBytes = kRowScales + kRows * kRowScaleBytes;
  static constexpr bool kTakesWork = false;
  static constexpr int kWorkUnits = kStages + 1;  // one more than can have steps in shared memory
  static constexpr int kRowsApart = kThreads / kRowChunks;
  static constexpr int kCopies =
      (kRows + kRowsApart - 1) / kRowsApart;  // copies of x by one thread
  static constexpr int kWorkUnitsAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kWorkUnitsAt + WorkUnitBytes(kWorkUnits, kTakesWork);
  static constexpr int kPartialSumFloats = kThreads * kSlabs * kRows / 2;
  static_assert(kStages > 2, "a barrier between writing a work unit and reading it");
  static_assert(kStageBytes % 16 == 0, "aligned copies");
  static_assert(kTilesOfStep * kScalesBytes / 16 <= kThreads / 2,
                "half of the threads copy scales");
  static_assert(kRows <= kThreads / 2, "and the others those of x");
  static_assert(kSharedBytes <= 99 * 1024, "shared memory of a block on sm_120");
};

// Copies one step after another to shared memory, and finds their work units. Thread t copies
//   codes     for each 64 of k, those of the slabs that it multiplies itself
//   x         16 bytes of rows t / 4 + kRowsApart i: chunk (t % 4) ^ (t / 8 % 4), to place t % 4
//   scales    16 bytes, if t is in the lower half of the threads
//   x scales  of row t - kThreads / 2, if t is in the upper half
// Pointers advance from step to step, in units of 16 bytes (8 bytes for scales of x).
template <typename C>
struct Producer : PipelineProducer<Producer<C>, C> {
  using Base = PipelineProducer<Producer<C>, C>;
  using Base::k;
  using Base::p;
  using Base::shared;
  using Base::thread;
  using Base::WeightTile;

  static constexpr uint32_t kCodeUnits = kTileCodeBytes / 16, kScaleUnits = kTileScaleBytes / 16;
  static constexpr int kChunks = C::kScalesBytes / 16;  // 16-byte chunks of scales for 64 of k

  int32_t rows;    // tokens of the tile
  uint32_t codes;  // where the next step begins, for these four operands
  uint32_t scales;
  uint32_t row;
  uint32_t row_scales;

  __device__ __forceinline__ int OwnThread() const { return thread; }

  __device__ __forceinline__ uint32_t RowUnits() const {
    return static_cast<uint32_t>(PadK(p.k)) / (2 * 16);
  }

  __device__ __forceinline__ void BeginWork(const WorkUnit& work, int) {
    const int slab = kSlabs * (thread / 32), chunk = thread % kChunks;
    codes = WeightTile(work, slab / 4) * kCodeUnits + slab % 4 * 32 + thread % 32;
    scales =
        (WeightTile(work, chunk / 16) + thread / kChunks % kTilesOfStep) * kScaleUnits + chunk % 16;
    const uint32_t first = work.tile.row;
    row = (first + thread / kRowChunks) * RowUnits() + work.begin * kRowChunks + Chunk();
    row_scales = (first + thread % (C::kThreads / 2)) * (RowUnits() / kRowChunks) + work.begin;
    rows = work.tile.rows;
    k = p.k - work.begin * kStepK;
  }

  // Returns the chunk of a row that this thread copies.
  __device__ __forceinline__ int Chunk() const {
    return (thread ^ thread / (2 * kRowChunks)) % kRowChunks;
  }

  // Copies all weights of a step. What lies past k becomes zeros and is not read.
  __device__ __forceinline__ void CopyWeights(uint8_t* stage) {
    const int slab = kSlabs * (thread / 32);
    const uint32_t target =
        SharedAddress(stage + C::kCodes + slab * kSlabCodeBytes + thread % 32 * 16);
#pragma unroll
    for (int d = 0; d < kTilesOfStep; ++d) {
      const int bytes = d == 0 || d * kTileK < k ? 16 : 0;
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        CopyOrZero(target + d * C::kCodesBytes + s * kSlabCodeBytes,
                   reinterpret_cast<const uint4*>(p.weight.packed) +
                       (codes + static_cast<uint64_t>(d * kCodeUnits + s * 32)),
                   bytes);
      }
    }
    codes += kTilesOfStep * kCodeUnits;
    if (thread < kTilesOfStep * kChunks) {
      CopyOrZero(SharedAddress(stage + C::kScales + thread * 16),
                 reinterpret_cast<const uint4*>(p.weight.block_scale) + scales,
                 thread < kChunks || kTileK < k ? 16 : 0);
      scales += kTilesOfStep * kScaleUnits;
    }
  }

  __device__ __forceinline__ void CopyRows(uint8_t* stage) {
    const uint32_t target = SharedAddress(stage + thread * 16);
#pragma unroll
    for (int i = 0; i < C::kCopies; ++i) {
      if (thread / kRowChunks + C::kRowsApart * i >= rows) break;
      CopyOrZero(target + C::kRowsApart * i * kRowBytes,
                 static_cast<const uint4*>(p.left.values) +
                     (row + static_cast<uint64_t>(C::kRowsApart * i) * RowUnits()),
                 16);
    }
    row += kRowChunks;
    const int own = thread - C::kThreads / 2;
    if (own >= 0 && own < rows) {
      Copy8OrZero(SharedAddress(stage + C::kRowScales + own * kRowScaleBytes),
                  reinterpret_cast<const uint2*>(p.left.block_scale) + row_scales, kRowScaleBytes);
      ++row_scales;
    }
  }

  __device__ __forceinline__ uint8_t* Place(int stage) const {
    return shared + stage * C::kStageBytes;
  }
};

template <typename T, typename C>
struct Consumer : PipelineConsumer<Consumer<T, C>, C> {
  using Base = PipelineConsumer<Consumer<T, C>, C>;
  using Base::p;
  using Base::sums;
  using Base::thread;

  __device__ __forceinline__ int OwnThread() const { return thread; }

  // Returns the first slab of a warp, counted in the block. A tile has 4 slabs.
  static __device__ __forceinline__ int Slab(int thread) { return kSlabs * (thread / 32); }

  // sums += W @ x for one step and the rows of a tile. If the tile is full, the code has no
  // branches.
  template <bool kFull>
  __device__ __forceinline__ void MultiplyStep(const uint8_t* stage, int rows) {
    const int lane = thread % 32, g = lane / 4, slab = Slab(thread);
    uint32_t a[kTilesOfStep][kSlabs][4], scales_a[kTilesOfStep][kSlabs];
#pragma unroll
    for (int d = 0; d < kTilesOfStep; ++d) {
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        const uint4 words = *reinterpret_cast<const uint4*>(
            stage + C::kCodes + d * C::kCodesBytes + (slab + s) * kSlabCodeBytes + lane * 16);
        a[d][s][0] = words.x, a[d][s][1] = words.y, a[d][s][2] = words.z, a[d][s][3] = words.w;
        scales_a[d][s] = *reinterpret_cast<const uint32_t*>(
            stage + C::kScales + d * C::kScalesBytes + (slab + s) * kSlabScaleBytes +
            (lane % 2 * 8 + g) * 4);
      }
    }
    const uint8_t* x = stage + lane % 8 * kRowBytes + (lane / 8 ^ lane % 8 / 2) * 16;
    const uint8_t* x_scales = stage + C::kRowScales + g * kRowScaleBytes;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      if (!kFull && 8 * j >= rows) break;
      uint32_t b[4];
      LoadMatrices(x + 8 * j * kRowBytes, b);
      const uint2 scales = *reinterpret_cast<const uint2*>(x_scales + 8 * j * kRowScaleBytes);
#pragma unroll
      for (int d = 0; d < kTilesOfStep; ++d) {
#pragma unroll
        for (int s = 0; s < kSlabs; ++s) {
          MultiplyAddFp4(reinterpret_cast<float (&)[4]>(sums[s][4 * j]), a[d][s],
                         reinterpret_cast<const uint32_t (&)[2]>(b[2 * d]), scales_a[d][s],
                         d == 0 ? scales.x : scales.y);
        }
      }
    }
  }

  __device__ __forceinline__ void Multiply(const uint8_t* stage, int rows, bool full) {
    if (full) {
      MultiplyStep<true>(stage, rows);
    } else {
      MultiplyStep<false>(stage, rows);
    }
  }

  // Stores the outputs. Everything is loaded before the first output is computed.
  __device__ __forceinline__ void Store(const WorkUnit& work) {
    const int m_tile = work.m_block * C::kTiles + Slab(thread) / 4, warp = Slab(thread) % 4;
    LaneRows rows[kSlabs];
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      rows[s] = LoadLaneRows(p, work.tile.expert, m_tile, warp + s);
    }
    if (p.output.block_scale != nullptr) {
      return QuantizeTile<T>(p, work.tile, m_tile, warp, rows, kUnit, sums);
    }
    const int32_t* slots = p.output.slots == nullptr ? nullptr : p.output.slots + work.tile.row;
    const OutputPlaces<C::kRows> places(slots, work.tile);
    // The sums of the second slab move to the place of the first: an index would put all sums into
    // local memory.
#pragma unroll 1
    for (int s = 0; s < kSlabs; ++s) {
      StoreLoadedTile<T>(p, work.tile, m_tile, warp + s, rows[0], places, sums[0], kUnit);
      rows[0] = rows[1];
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) sums[0][i] = sums[1][i];
    }
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    ExpertGemmSm120(const __grid_constant__ ExpertGemm p) {
  NVFP4_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  Producer<C> producer{{p, shared, thread}};
  RunPipeline<C>(p, shared, producer, [&] { return Consumer<T, C>{{p, shared, thread, {}}}; });
}

// The arguments are kRows, kTiles, kStages and kBlocksPerSm.
using Rows16 = Config<16, 2, 4, 2>;
using Rows32 = Config<32, 2, 4, 2>;
using Rows64 = Config<64, 2, 3, 2>;
using Rows128 = Config<128, 4, 3, 1>;

template <typename T, typename C>
cudaError_t LaunchConfig(cudaStream_t stream, const ExpertGemm& gemm) {
  return LaunchWide(stream, dim3(static_cast<unsigned>(gemm.schedule.blocks)), C::kThreads,
                    C::kSharedBytes, /*overlaps=*/true, ExpertGemmSm120<T, C>, gemm);
}

template <typename C>
cudaError_t LaunchVariant(cudaStream_t stream, const ExpertGemm& gemm) {
  return gemm.type == DataType::kF16 ? LaunchConfig<__half, C>(stream, gemm)
                                     : LaunchConfig<__nv_bfloat16, C>(stream, gemm);
}

template <typename C>
constexpr PipelineVariant MakeVariant(int64_t max_mean_rows) {
  return MakePipelineVariant<C>(max_mean_rows, LaunchVariant<C>);
}

constexpr PipelineVariant kVariants[] = {
    MakeVariant<Rows16>(10),
    MakeVariant<Rows32>(26),
    MakeVariant<Rows64>(56),
    MakeVariant<Rows128>(INT64_MAX),
};

static_assert(MaxSharedBytes(kVariants) == kSharedBytesSm120, "limits.h");

// Reading a weight tile from memory takes as long as the MMAs of a full tile of rows. Later row
// tiles of an expert read it from the L2 cache, which takes a fifth of that time. This number is
// between the two; it was not measured.
constexpr int32_t kMinCost = 96;

}  // namespace

bool HasSm120() { return HasCode(ExpertGemmSm120<__nv_bfloat16, Rows16>); }

GemmKernel ChooseGemmSm120(int64_t rows, int64_t experts) {
  return MakeGemmKernel(ChooseVariant(kVariants, rows, experts), kMinCost);
}

}  // namespace nvfp4
