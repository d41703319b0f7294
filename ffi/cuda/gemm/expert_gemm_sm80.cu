// Computes out = act(W[expert] @ x) for rows that are sorted by expert, with mma.sync in bf16 and
// f16. This is the engine for every GPU since Ampere that has no engine of its own.
//
// mma.sync multiplies 16 x 16 by 16 x 8. Weight rows take the 16 (operand A) and tokens take the 8,
// so that an expert with 3 tokens wastes 5 columns instead of 13 rows.
//
// Bottleneck: memory bandwidth below about 32 tokens per expert, tensor cores above. Unpacking
// takes about 1.7 instructions per weight and hides behind both.
//
// A block multiplies kTiles weight tiles of 64 rows, with two warps for each. A warp multiplies two
// slabs of 16 weight rows by all tokens of the tile. It uses each fragment of x twice, so that
// reads from shared memory take less time than the MMAs. One step of the pipeline covers kStepTiles
// times 64 of k. Shared memory holds kStages steps. For each 64 of k a step has:
//   x        [kRows][128 bytes]. Chunk c (16 bytes) of row r is stored at c ^ (r % 8), so that
//            neither ldmatrix nor cp.async has bank conflicts. Zeros past the last token and k.
//   codes    [kTiles][2048 bytes] and scales [kTiles][256 bytes], in the order of device memory.
//            Zeros past k.
// mma_pipeline.cuh copies and multiplies; tile_scheduler.cuh divides the work; partial_sums.cuh
// adds the sums of blocks that share an output tile.
//
// Needs: sm_80 and 99 KiB of shared memory. Tests: tests/gpu/test_cuda_kernel.py, test_sass.py.
#include "cuda/epilogues/direct_store.cuh"
#include "cuda/epilogues/rounded_store.cuh"
#include "cuda/gemm/mma_pipeline.cuh"
#include "cuda/instructions/mma.cuh"

namespace nvfp4 {
namespace {

constexpr int kTileThreads = 128;      // each copies 16 bytes of codes of a weight tile
constexpr int kRowBytes = 2 * kTileK;  // one row of x, 64 of k
constexpr int kRowChunks = kRowBytes / 16;

// kRows: the most tokens of a tile. The MMAs of a tile cover its tokens rounded up to kRowStep.
// kTiles: weight tiles of a block. kStepTiles: how many times 64 of k a step covers.
template <int kRows_, int kRowStep_, int kTiles_, int kStepTiles_, int kStages_, int kBlocksPerSm_,
          bool kTakesWork_ = false>
struct Config {
  static constexpr int kRows = kRows_;
  static constexpr int kRowStep = kRowStep_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kStepTiles = kStepTiles_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kTakesWork = kTakesWork_;
  static constexpr int kThreads = kTiles * kTileThreads / kSlabs;
  // Up to 64 columns, each number of columns has straight code of its own. Above, only full tiles
  // do, and the others share one body with branches.
  static constexpr bool kExactColumns = kRows <= 64;
  // Several accumulators take turns, so that consecutive MMAs do not depend on each other.
  static constexpr int kTurn = kRows <= 32 ? 4 : 2;
  static constexpr int kBuffers = kRows <= 64 ? 1 : 2;  // buffers for fragments of x
  // How often the loop over 32 of k is unrolled. Longer code overlaps unpacking with MMAs better,
  // and needs more registers.
  static constexpr int kUnroll = kRows <= 16 ? 2 * kStepTiles : kRows <= 32 ? 2 : 1;
  static constexpr int kXBytes = kRows * kRowBytes;  // bytes of x for 64 of k
  static constexpr int kCodesBytes = kTiles * kTileCodeBytes;
  static constexpr int kScalesBytes = kTiles * kTileScaleBytes;
  static constexpr int kCodes = kStepTiles * kXBytes;  // offsets in a stage
  static constexpr int kScales = kCodes + kStepTiles * kCodesBytes;
  static constexpr int kStageBytes = kScales + kStepTiles * kScalesBytes;
  static constexpr int kWorkUnits = kStages + 1;  // one more than can have steps in shared memory
  static constexpr int kRowsApart = kThreads / kRowChunks;
  static constexpr int kCopies =
      (kRows + kRowsApart - 1) / kRowsApart;  // copies of x by one thread
  static constexpr int kSourcesAt = kStages * kStageBytes;
  static constexpr int kWorkUnitsAt = kSourcesAt + kCopies * kThreads * 4;
  static constexpr int kSharedBytes = kWorkUnitsAt + WorkUnitBytes(kWorkUnits, kTakesWork);
  static constexpr int kPartialSumFloats = kThreads * kSlabs * kRows / 2;
  static_assert(kStages > 2, "a barrier between writing a work unit and reading it");
  static_assert(kSharedBytes <= 99 * 1024, "shared memory of a block on sm_86, sm_89, sm_120");
};

// Copies one step after another to shared memory, and finds their work units. For each 64 of k,
// thread t of the block copies
//   codes    16 bytes for each slab of a warp
//   scales   16 bytes, if t is one of the last threads
//   x        16 bytes of rows t / 8 + kRowsApart i: chunk (t % 8) ^ (t / 8 % 8), to place t % 8
// Pointers advance from step to step. Computing addresses anew would take a third of all
// instructions.
template <typename C>
struct Producer : PipelineProducer<Producer<C>, C> {
  using Base = PipelineProducer<Producer<C>, C>;
  using Base::k;
  using Base::p;
  using Base::shared;
  using Base::thread;
  using Base::WeightTile;

  static constexpr int kScaleThread = C::kThreads - C::kScalesBytes / 16;
  static constexpr uint32_t kCodeUnits = kTileCodeBytes / 16, kScaleUnits = kTileScaleBytes / 16;
  static constexpr int kSlabTiles = C::kTiles / kSlabs;  // tiles between the slabs of a thread
  // Two values that can stand in place of a source. kZeros is for a row past the last token of the
  // tile that MMAs still read; it must be zeros. kNothing is for a row that no MMA reads.
  static constexpr uint32_t kZeros = 0xffffffffu;
  static constexpr uint32_t kNothing = 0xfffffffeu;

  uint32_t codes[kSlabs];  // where the next step begins, in units of 16 bytes
  uint32_t scales;

  // Returns where the source of a row is stored. Sources count units of 16 bytes of x, in 32 bits,
  // which bounds rows * k.
  __device__ __forceinline__ uint32_t& Source(int thread, int i) {
    return reinterpret_cast<uint32_t*>(shared + C::kSourcesAt)[i * C::kThreads + thread];
  }

  __device__ __forceinline__ int OwnThread() const { return ReadThread(); }

  // Returns how many rows the MMAs of a tile of `rows` tokens cover.
  static __device__ __forceinline__ int32_t PadRows(int32_t rows) {
    return (rows + C::kRowStep - 1) / C::kRowStep * C::kRowStep;
  }

  __device__ __forceinline__ void BeginWork(const WorkUnit& work, int own) {
    const RowTile& tile = work.tile;
    const int first = work.begin * C::kStepTiles * kTileK;
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      codes[s] =
          WeightTile(work, s * kSlabTiles + own / kTileThreads) * kCodeUnits + own % kTileThreads;
    }
    const int chunk = max(own - kScaleThread, 0);
    scales = WeightTile(work, chunk / 16) * kScaleUnits + chunk % 16;
    k = p.k - first;
#pragma unroll 1
    for (int i = 0; i < C::kCopies; ++i) {
      const int row = own / kRowChunks + C::kRowsApart * i;
      uint32_t source = row < PadRows(tile.rows) ? kZeros : kNothing;
      if (row < tile.rows) {
        int32_t index = tile.row + row;
        if (p.left.slots != nullptr) index = p.left.slots[index] / p.left.slots_per_row;
        source = static_cast<uint32_t>(index) * static_cast<uint32_t>(p.k / 8) + Chunk(own);
      }
      Source(own, i) = source;
    }
  }

  // Returns the chunk of a row that this thread copies.
  static __device__ __forceinline__ int Chunk(int thread) {
    return (thread ^ thread / kRowChunks) % kRowChunks;
  }

  __device__ __forceinline__ void CopyWeights(uint32_t target) {
#pragma unroll
    for (int d = 0; d < C::kStepTiles; ++d) {
      const int bytes = d == 0 || d * kTileK < k ? 16 : 0;
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        CopyOrZero(
            target + C::kCodes + d * C::kCodesBytes + s * C::kThreads * 16,
            reinterpret_cast<const uint4*>(p.weight.packed) + (codes[s] + uint64_t{d * kCodeUnits}),
            bytes);
      }
    }
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) codes[s] += C::kStepTiles * kCodeUnits;
    if (thread >= kScaleThread) {
#pragma unroll
      for (int d = 0; d < C::kStepTiles; ++d) {
        const int bytes = d == 0 || d * kTileK < k ? 16 : 0;
        CopyOrZero(target + C::kScales + d * C::kScalesBytes - kScaleThread * 16,
                   reinterpret_cast<const uint4*>(p.weight.block_scale) +
                       (scales + uint64_t{d * kScaleUnits}),
                   bytes);
      }
      scales += C::kStepTiles * kScaleUnits;
    }
  }

  __device__ __forceinline__ void CopyRows(uint32_t target) {
    const int column = 8 * Chunk(thread);
    const uint4* values = static_cast<const uint4*>(p.left.values) + (p.k - k) / 8;
#pragma unroll
    for (int i = 0; i < C::kCopies; ++i) {
      const uint32_t source = Source(thread, i);
      if (source == kNothing) break;
      const uint4* row = values + (source == kZeros ? 0u : source);
#pragma unroll
      for (int d = 0; d < C::kStepTiles; ++d) {
        const bool copied = column + d * kTileK < k && source != kZeros;
        CopyOrZero(target + d * C::kXBytes + C::kRowsApart * i * kRowBytes, row + d * kRowChunks,
                   copied ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ uint32_t Place(int stage) const {
    return SharedAddress(shared + stage * C::kStageBytes + thread * 16);
  }
};

template <typename T, typename C>
struct Consumer : PipelineConsumer<Consumer<T, C>, C> {
  using Base = PipelineConsumer<Consumer<T, C>, C>;
  using Base::p;
  using Base::sums;
  using Base::thread;

  const TileConstants constants;

  __device__ __forceinline__ int OwnThread() const { return ReadThread(); }

  // Returns slab s of a warp, counted in the block. A tile has 4 slabs. The two slabs of a warp
  // hold whole blocks of 16 outputs.
  static __device__ __forceinline__ int Slab(int s, int thread) { return thread / 32 * kSlabs + s; }

  // sums += W @ x for 32 of k and the first `rows` rows, which are at most kColumns. `x` is the
  // address from which this lane loads the first eight rows. Fragments of x are loaded one turn
  // ahead.
  template <int kColumns, bool kExact>
  __device__ __forceinline__ void MultiplyHalf(const uint8_t* x, int rows,
                                               const uint32_t (&even)[kSlabs][4],
                                               const uint32_t (&odd)[kSlabs][4],
                                               uint32_t (&words)[C::kBuffers][C::kTurn][4]) {
    constexpr int kTurn = C::kTurn;
#pragma unroll
    for (int first = 0; first < kColumns / 8; first += kTurn) {
      if (!kExact && first * 8 >= rows) break;
      const uint32_t (&b)[kTurn][4] = words[first / kTurn % C::kBuffers];
      if (C::kBuffers > 1)
        LoadTurn<kColumns>(x, first + kTurn, words[(first / kTurn + 1) % C::kBuffers]);
#pragma unroll
      for (int j = 0; j < 2 * kTurn * kSlabs; ++j) {
        const int s = j % kSlabs, turn = j / kSlabs % kTurn, column = first + turn;
        if (column >= kColumns / 8) continue;
        auto& column_sums = reinterpret_cast<float (&)[4]>(sums[s][4 * column]);
        if (j < kTurn * kSlabs) {
          MultiplyAdd<T>(column_sums, even[s], b[turn][0], b[turn][1]);
        } else {
          MultiplyAdd<T>(column_sums, odd[s], b[turn][2], b[turn][3]);
        }
      }
      if (C::kBuffers == 1) LoadTurn<kColumns>(x, first + kTurn, words[0]);
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void LoadTurn(const uint8_t* x, int first,
                                           uint32_t (&words)[C::kTurn][4]) const {
#pragma unroll
    for (int j = 0; j < C::kTurn; ++j) {
      if (first + j < kColumns / 8) LoadMatrices(x + (first + j) * 8 * kRowBytes, words[j]);
    }
  }

  template <int kColumns, bool kExact>
  __device__ __forceinline__ void MultiplyColumns(const uint8_t* stage, int rows) {
    const int lane = thread % 32;
    const int place = lane % 8 * kRowBytes + (lane / 8 ^ lane % 8) * 16;
#pragma unroll(C::kUnroll)
    for (int h = 0; h < 2 * C::kStepTiles; ++h) {
      const int d = h / 2, half = h % 2;
      const uint8_t* codes = stage + C::kCodes + d * C::kCodesBytes + half * 8;
      const uint8_t* scales = stage + C::kScales + d * C::kScalesBytes + half * 4;
      const uint8_t* x = stage + d * C::kXBytes + (place ^ half * 64);
      uint32_t even[kSlabs][4], odd[kSlabs][4], words[C::kBuffers][C::kTurn][4];
      LoadTurn<kColumns>(x, 0, words[0]);
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        const int owner = Slab(s, thread) * 32 + lane;
        const uint2 pair = *reinterpret_cast<const uint2*>(codes + owner * 16);
        const uint32_t scale = *reinterpret_cast<const uint32_t*>(scales + owner / 4 * 8);
        UnpackPair<T>(pair.x, pair.y, scale, constants, even[s], odd[s]);
      }
      MultiplyHalf<kColumns, kExact>(x, rows, even, odd, words);
    }
  }

  // sums += W @ x for one step and the rows of a tile.
  template <int kColumns = C::kExactColumns ? C::kRowStep : C::kRows>
  __device__ __forceinline__ void MultiplyStep(const uint8_t* stage, int rows) {
    if constexpr (kColumns < C::kRows) {
      if (rows > kColumns) return MultiplyStep<kColumns + C::kRowStep>(stage, rows);
    } else if constexpr (!C::kExactColumns) {
      if (rows <= C::kRows - C::kRowStep) return MultiplyColumns<kColumns, false>(stage, rows);
    }
    MultiplyColumns<kColumns, true>(stage, rows);
  }

  __device__ __forceinline__ void Multiply(const uint8_t* stage, int rows, bool) {
    MultiplyStep(stage, rows);
  }

  // Stores one slab after the other. The sums of the second slab move to the place of the first: an
  // index would put all sums into local memory. Everything is loaded before the first store.
  __device__ __forceinline__ void Store(const WorkUnit& work) {
    const int own = ReadThread();
    const int32_t* slots = p.output.slots == nullptr ? nullptr : p.output.slots + work.tile.row;
    const OutputPlaces<C::kRows> places(slots, work.tile);
    LaneRows rows[kSlabs];
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      rows[s] = LoadLaneRows(p, work.tile.expert, MTile(work, s, own), Slab(s, own) % 4);
    }
    if (p.output.input_scale != nullptr) return StoreRounded(work, rows, own);
#pragma unroll 1
    for (int s = 0; s < kSlabs; ++s) {
      StoreLoadedTile<T>(p, work.tile, MTile(work, s, own), Slab(s, own) % 4, rows[0], places,
                         sums[0]);
      rows[0] = rows[1];
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) sums[0][i] = sums[1][i];
    }
  }

  __device__ __forceinline__ void StoreRounded(const WorkUnit& work, const LaneRows (&rows)[kSlabs],
                                               int own) {
    const auto make = [&](int s) {
      return MakeTileStore<T>(p, work.tile, rows[s], MTile(work, s, own), Slab(s, own) % 4);
    };
    const TileStore<T> stores[kSlabs] = {make(0), make(1)};
    StoreRoundedSlabs(stores, sums);
  }

  static __device__ __forceinline__ int MTile(const WorkUnit& work, int s, int thread) {
    return work.m_block * C::kTiles + Slab(s, thread) / 4;
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    ExpertGemmSm80(const __grid_constant__ ExpertGemm p, const TileConstants constants) {
  NVFP4_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  Producer<C> producer{{p, shared, thread}};
  RunPipeline<C>(p, shared, producer,
                 [&] { return Consumer<T, C>{{p, shared, thread, {}}, constants}; });
}

// The arguments are kRows, kRowStep, kTiles, kStepTiles, kStages, kBlocksPerSm and kTakesWork.
// Rows8 has long steps, so that its warps wait for each other less often. On an H200, a layer of
// Qwen3-30B-A3B with 4, 16 and 64 tokens took 37, 82 and 115 us, instead of 41, 84 and 119 us with
// Rows16.
using Rows8 = Config<8, 8, 2, 4, 3, 3>;
using Rows16 = Config<16, 8, 2, 2, 3, 5>;
using Rows32 = Config<32, 8, 2, 2, 3, 4>;
// Taking tiles one by one pays if each block computes several. On an H200, the layer took 71, 93
// and 109 us with 16, 32 and 64 tokens, instead of 76, 101 and 112 us, and with 4 tokens 38 instead
// of 37.
using Taking8 = Config<8, 8, 2, 4, 3, 3, true>;
using Taking16 = Config<16, 8, 2, 2, 3, 5, true>;
using Rows48 = Config<48, 8, 4, 1, 4, 2>;
using Rows64 = Config<64, 16, 2, 1, 4, 3>;
using Rows128 = Config<128, 16, 2, 1, 3, 2>;

template <typename T, typename C>
cudaError_t LaunchConfig(cudaStream_t stream, const ExpertGemm& gemm) {
  return LaunchWide(stream, dim3(static_cast<unsigned>(gemm.schedule.blocks)), C::kThreads,
                    C::kSharedBytes, /*overlaps=*/true, ExpertGemmSm80<T, C>, gemm,
                    MakeTileConstants<T>());
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
    MakeVariant<Rows16>(10), MakeVariant<Rows32>(26),         MakeVariant<Rows48>(40),
    MakeVariant<Rows64>(56), MakeVariant<Rows128>(INT64_MAX),
};

static_assert(MaxSharedBytes(kVariants) == kSharedBytesSm80, "limits.h");

// Taken for experts with so few rows, on devices whose multiprocessors have room for all blocks.
constexpr PipelineVariant kFewRows = MakeVariant<Rows8>(4);

// Taken instead if there are half as many rows as experts, or more.
constexpr PipelineVariant kTakenFewRows = MakeVariant<Taking8>(4);
constexpr PipelineVariant kTakenRows = MakeVariant<Taking16>(10);

// With this many rows, the MMAs of a weight tile take as long as reading it, on the devices that
// were measured.
constexpr int32_t kMinCost = 32;

}  // namespace

GemmKernel ChooseGemmSm80(int64_t rows, int64_t experts) {
  const bool takes_work = experts > 1 && 2 * rows >= experts;
  const bool fits = BlocksPerSm(kFewRows) == kFewRows.blocks_per_sm;
  if (fits && IsFor(kFewRows, rows, experts)) {
    return MakeGemmKernel(takes_work ? kTakenFewRows : kFewRows, kMinCost);
  }
  if (takes_work && IsFor(kTakenRows, rows, experts)) return MakeGemmKernel(kTakenRows, kMinCost);
  return MakeGemmKernel(ChooseVariant(kVariants, rows, experts), kMinCost);
}

}  // namespace nvfp4
