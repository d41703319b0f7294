// The grouped product with mma.sync: out[r] = act(W[e(r)] @ x[r]), bf16 and f16; see
// expert_gemm.cuh. For everything since Ampere that has no kernel of its own.
//
// The weights are the A operand and the sorted rows its N, so that a tile of rows is padded to 8
// and not to 16. Bound by: reading weights up to about 32 rows of an expert, tensor cores above.
// Unpacking costs about 1.7 instructions a weight, of a thread, and hides behind either.
//
// A block of threads is 8 warps and works on 4 weight tiles, 256 rows. A warp owns two slabs of 16
// weight rows, eight slabs apart, and all rows of the tile: two slabs for each fragment of x keep
// reads of shared memory below the time of the products. A step is 64 of k; kStages of them are
// in shared memory:
//   x        [kRows][128 bytes], chunk c of 16 bytes of row r at c ^ (r % 8): ldmatrix and cp.async
//            both touch all banks; zeros past the tile's rows and past k
//   codes    [4][2048 bytes], scales [4][256 bytes]: as they are in memory
// Copies run kStages - 1 steps ahead of the products, across the ends of sums over k. A block works
// on the pieces of walk.cuh and hands over or collects sums at its ends
// (partial_sums.cuh).
//
// Needs: sm_80; 99 KiB of shared memory. Test: test_cuda_kernel.py, test_sass.py.
#include <algorithm>
#include <iterator>

#include "async_copy.cuh"
#include "epilogue.cuh"
#include "expert_gemm.cuh"
#include "launch_kernel.cuh"
#include "mma.cuh"
#include "partial_sums.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kTileThreads = 128;      // that a weight tile has 16 bytes for
constexpr int kTiles = 4;              // weight tiles of a block
constexpr int kSlabs = 2;              // of 16 weight rows, of a warp
constexpr int kRowBytes = 2 * kTileK;  // of a row of x in a step
constexpr int kRowChunks = kRowBytes / 16;
constexpr int kRowsApart = kThreads / kRowChunks;
constexpr int kBarrier = 1;

// kRows: most rows of a tile; a tile runs the products of its rows rounded up to kRowStep.
template <int kRows_, int kRowStep_, int kStages_, int kBlocksPerSm_>
struct Config {
  static constexpr int kRows = kRows_;
  static constexpr int kRowStep = kRowStep_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  // Straight code for each number of columns, or one body with branches, which saves registers.
  static constexpr bool kExactColumns = kRows <= 32;
  static constexpr int kCodes = kRows * kRowBytes;  // offsets in a stage
  static constexpr int kScales = kCodes + kTiles * kTileCodeBytes;
  static constexpr int kStageBytes = kScales + kTiles * kTileScaleBytes;
  static constexpr int kCopies = (kRows + kRowsApart - 1) / kRowsApart;  // of x by a thread
  static constexpr int kSharedBytes = kStages * kStageBytes + kCopies * kThreads * 4;
  static constexpr int kShareFloats = kThreads * kSlabs * kRows / 2;
  static_assert(kSharedBytes <= 99 * 1024, "shared memory of a block on sm_86, sm_89, sm_120");
};

// Brings one step after another to shared memory. Thread t copies
//   codes    16 bytes, those of thread t % 128 of a tile, for tiles t / 128 and t / 128 + 2
//   scales   where t >= 192: 16 bytes of tile (t - 192) / 16
//   x        chunk t % 8 of rows t / 8 + 32 i
// Where its rows lie it keeps in shared memory: the sums need the registers.
template <typename C>
struct Producer {
  static constexpr int kScaleThread = kThreads - kTiles * kTileScaleBytes / 16;
  static constexpr uint32_t kZeros = 0xffffffffu;    // in place of a source: past the tile's rows
  static constexpr uint32_t kNothing = 0xfffffffeu;  // and past those that are multiplied

  const ExpertGemm& p;
  uint8_t* const shared;
  const int thread;
  Pieces pieces;
  bool more;             // steps to copy
  int32_t step;          // the next one
  uint32_t weight_tile;  // its first one

  __device__ __forceinline__ Producer(const ExpertGemm& gemm, uint8_t* memory, int id)
      : p(gemm), shared(memory), thread(id), pieces(gemm.rows, gemm.rule, gemm.walk) {
    Next();
  }

  __device__ __forceinline__ void Next() {
    more = pieces.Next();
    if (more) BeginSum();
  }

  // Rows that are multiplied for a tile of `rows`.
  static __device__ __forceinline__ int32_t PadRows(int32_t rows) {
    return (rows + C::kRowStep - 1) / C::kRowStep * C::kRowStep;
  }

  // Place of a row's source, in units of 16 bytes, which bounds rows * k.
  __device__ __forceinline__ uint32_t& Source(int i) {
    return reinterpret_cast<uint32_t*>(shared + C::kStages * C::kStageBytes)[i * kThreads + thread];
  }

  __device__ __forceinline__ void BeginSum() {
    const RowTile& tile = pieces.piece.tile;
    step = pieces.piece.begin;
    weight_tile =
        (static_cast<uint32_t>(tile.expert) * p.m_tiles() + pieces.piece.m_block * kTiles) *
            p.walk.k_steps +
        step;
#pragma unroll 1
    for (int i = 0; i < C::kCopies; ++i) {
      const int row = thread / kRowChunks + kRowsApart * i;
      uint32_t source = row < PadRows(tile.rows) ? kZeros : kNothing;
      if (row < tile.rows) {
        int32_t index = tile.row + row;
        if (p.left.slots != nullptr) index = p.left.slots[index] / p.left.slots_per_row;
        source =
            static_cast<uint32_t>(index) * static_cast<uint32_t>(p.k / 8) + thread % kRowChunks;
      }
      Source(i) = source;
    }
  }

  __device__ __forceinline__ void CopyWeights(uint8_t* target) {
    const int tiles = p.m_tiles() - pieces.piece.m_block * kTiles, tile = thread / kTileThreads;
    const uint32_t k_tiles = p.walk.k_steps;
    const uint8_t* codes = p.weight.packed + thread % kTileThreads * 16;
    uint8_t* const place = target + C::kCodes + thread * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (tile + 2 * i >= tiles) break;
      Copy(SharedAddress(place + i * kThreads * 16),
           codes + uint64_t{weight_tile + (tile + 2 * i) * k_tiles} * kTileCodeBytes);
    }
    const int chunk = thread - kScaleThread;
    if (chunk >= 0 && chunk / 16 < tiles) {
      Copy(SharedAddress(target + C::kScales + chunk * 16),
           p.weight.block_scale + chunk % 16 * 16 +
               uint64_t{weight_tile + chunk / 16 * k_tiles} * kTileScaleBytes);
    }
  }

  __device__ __forceinline__ void CopyRows(uint8_t* target) {
    const int chunk = thread % kRowChunks, row = thread / kRowChunks;
    uint8_t* const place = target + row * kRowBytes + ((chunk ^ (row % 8)) << 4);
    const bool in_k = step * kTileK + chunk * 8 < p.k;
    const uint4* values = static_cast<const uint4*>(p.left.values);
#pragma unroll
    for (int i = 0; i < C::kCopies; ++i) {
      const uint32_t source = Source(i);
      if (source == kNothing) break;
      const bool copied = in_k && source != kZeros;
      CopyOrZero(SharedAddress(place + kRowsApart * i * kRowBytes),
                 values + (copied ? source + step * kRowChunks : 0u), copied ? 16 : 0);
    }
  }

  // Starts the copies of the next step, if there is one, and ends their group.
  __device__ __forceinline__ void CopyStep(int stage) {
    if (more && step == pieces.piece.end) Next();
    if (more) {
      uint8_t* const target = shared + stage * C::kStageBytes;
      CopyWeights(target);
      CopyRows(target);
      ++step;
      ++weight_tile;
    }
    CommitCopies();
  }
};

template <typename T, typename C>
struct Consumer {
  const ExpertGemm& p;
  const uint8_t* const shared;
  const TileConstants constants;
  const int thread;
  float sums[kSlabs][C::kRows / 2];

  // Slab of the block: 4 of them are a tile.
  __device__ __forceinline__ int Slab(int s) const { return s * (kThreads / 32) + thread / 32; }

  // sums += W @ x for the first `rows` rows, at most kColumns, and 32 of k. Products of one sum
  // must not follow each other closely: kTurn times 8 rows take turns.
  template <int kColumns>
  __device__ __forceinline__ void MultiplyHalf(const uint8_t* x, int rows,
                                               const uint32_t (&even)[kSlabs][4],
                                               const uint32_t (&odd)[kSlabs][4]) {
    constexpr int kTurn = C::kRows == 40 ? 2 : 4;
#pragma unroll
    for (int first = 0; first < kColumns / 8; first += kTurn) {
      if (!C::kExactColumns && first * 8 >= rows) break;
      uint32_t words[kTurn][4];
#pragma unroll
      for (int j = 0; j < kTurn; ++j) {
        if (first + j < kColumns / 8) LoadMatrices(x + (first + j) * 8 * kRowBytes, words[j]);
      }
#pragma unroll
      for (int j = 0; j < 2 * kTurn * kSlabs; ++j) {
        const int s = j % kSlabs, turn = j / kSlabs % kTurn, column = first + turn;
        if (column >= kColumns / 8) continue;
        auto& column_sums = reinterpret_cast<float (&)[4]>(sums[s][4 * column]);
        if (j < kTurn * kSlabs) {
          MultiplyAdd<T>(column_sums, even[s], words[turn][0], words[turn][1]);
        } else {
          MultiplyAdd<T>(column_sums, odd[s], words[turn][2], words[turn][3]);
        }
      }
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void MultiplyColumns(const uint8_t* stage, int rows) {
    const int lane = thread % 32;
    uint4 codes[kSlabs];
    uint2 scales[kSlabs];
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      const int owner = Slab(s) * 32 + lane;
      codes[s] = *reinterpret_cast<const uint4*>(stage + C::kCodes + owner * 16);
      scales[s] = *reinterpret_cast<const uint2*>(stage + C::kScales + owner / 4 * 8);
    }
    const uint8_t* row = stage + lane % 8 * kRowBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t even[kSlabs][4], odd[kSlabs][4];
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        UnpackPair<T>(half == 0 ? codes[s].x : codes[s].z, half == 0 ? codes[s].y : codes[s].w,
                      half == 0 ? scales[s].x : scales[s].y, constants, even[s], odd[s]);
      }
      const int chunk = (4 * half + lane / 8) ^ (lane % 8);
      MultiplyHalf<kColumns>(row + chunk * 16, rows, even, odd);
    }
  }

  // sums += W @ x for the rows of a tile and one step.
  template <int kColumns = C::kExactColumns ? C::kRowStep : C::kRows>
  __device__ __forceinline__ void MultiplyStep(const uint8_t* stage, int rows) {
    if constexpr (kColumns < C::kRows) {
      if (rows > kColumns) return MultiplyStep<kColumns + C::kRowStep>(stage, rows);
    }
    MultiplyColumns<kColumns>(stage, rows);
  }

  __device__ __forceinline__ float* Share(int block, int slab) const {
    return p.partial_sums +
           (static_cast<int64_t>(block) * kSlabs + slab) * (C::kShareFloats / kSlabs);
  }
  __device__ __forceinline__ int32_t* Flag(int block) const {
    return p.walk.ready + block * kReadyFlags;
  }

  __device__ __forceinline__ void HandOver() {
    const int block = static_cast<int>(blockIdx.x);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) StoreShare(Share(block, s), thread, kThreads, sums[s]);
    RaiseFlag(Flag(block), kBarrier, thread, kThreads);
  }

  // Adds the later shares of a sum whose first steps this block has done.
  __device__ __forceinline__ void Collect(const Piece& piece) {
    for (int other = static_cast<int>(blockIdx.x) + 1; other < p.walk.blocks; ++other) {
      const Start start = p.walk.starts[other], stop = p.walk.starts[other + 1];
      if (start.sum != piece.sum) break;
      if (start.sum == stop.sum && start.step == stop.step) continue;
      AwaitFlag(Flag(other), kBarrier, thread, kThreads);
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) AddShare(Share(other, s), thread, kThreads, sums[s]);
    }
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) sums[s][i] = 0.0f;
    }
  }

  // Slab after slab, the sums of the second in place of the first's: an index would put them into
  // memory.
  __device__ __forceinline__ void Store(int32_t sum) {
    Piece piece;  // found again, since registers are dear in the loop before
    FindSum(p.rows, p.rule, p.walk.m_blocks, sum, &piece);
#pragma unroll 1
    for (int s = 0; s < kSlabs; ++s) {
      const int m_tile = piece.m_block * kTiles + Slab(s) / 4, warp = Slab(s) % 4;
      StoreTile<T>(p, piece.tile, m_tile, warp, sums[0]);
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) sums[0][i] = sums[1][i];
    }
  }

  // What happens to the block's share of a sum.
  __device__ __forceinline__ void Finish(const Piece& piece) {
    if (piece.begin > 0) return HandOver();
    if (piece.end < p.walk.k_steps) Collect(piece);
    Store(piece.sum);
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads, C::kBlocksPerSm)
    ExpertGemmSm80(const __grid_constant__ ExpertGemm p, const TileConstants constants) {
  NVFP4_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  Producer<C> producer(p, shared, thread);
#pragma unroll 1
  for (int stage = 0; stage < C::kStages - 1; ++stage) producer.CopyStep(stage);

  Consumer<T, C> consumer{p, shared, constants, thread, {}};
  int stage = 0;
  Pieces pieces(p.rows, p.rule, p.walk);
  while (pieces.Next()) {
    const Piece& piece = pieces.piece;
    consumer.Clear();
#pragma unroll 1
    for (int32_t step = piece.begin; step < piece.end; ++step) {
      // After the barrier the copies of all threads are here, and all have read the stage before.
      WaitCopies<C::kStages - 2>();
      __syncthreads();
      producer.CopyStep((stage == 0 ? C::kStages : stage) - 1);
      consumer.MultiplyStep(shared + stage * C::kStageBytes, piece.tile.rows);
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    consumer.Finish(piece);
  }
}

// rows of a tile, step of rows, stages, blocks of an SM
using Rows16 = Config<16, 8, 6, 2>;
using Rows32 = Config<32, 8, 5, 2>;
using Rows40 = Config<40, 8, 4, 2>;
using Rows128 = Config<128, 32, 3, 1>;

struct Variant {
  int64_t max_mean_rows;  // of an expert, up to which this is the one
  int32_t rows, blocks_per_sm, shared_bytes, share_bytes;
  cudaError_t (*launch)(cudaStream_t stream, const ExpertGemm& gemm);
};

template <typename T, typename C>
cudaError_t LaunchConfig(cudaStream_t stream, const ExpertGemm& gemm) {
  return LaunchWide(stream, dim3(static_cast<unsigned>(gemm.walk.blocks)), kThreads,
                    C::kSharedBytes, /*overlaps=*/false, ExpertGemmSm80<T, C>, gemm,
                    MakeTileConstants<T>());
}

template <typename C>
cudaError_t LaunchVariant(cudaStream_t stream, const ExpertGemm& gemm) {
  return gemm.type == DataType::kF16 ? LaunchConfig<__half, C>(stream, gemm)
                                     : LaunchConfig<__nv_bfloat16, C>(stream, gemm);
}

template <typename C>
constexpr Variant MakeVariant(int64_t max_mean_rows) {
  return {max_mean_rows,       C::kRows,        C::kBlocksPerSm, C::kSharedBytes,
          C::kShareFloats * 4, LaunchVariant<C>};
}

constexpr Variant kVariants[] = {
    MakeVariant<Rows16>(5),
    MakeVariant<Rows32>(18),
    MakeVariant<Rows40>(26),
    MakeVariant<Rows128>(INT64_MAX),
};

// Rows for which the products of a weight take as long as reading it, on the devices known.
constexpr int32_t kMinCost = 32;
constexpr int kReservedBytes = 1024;  // of shared memory, for each block

const Variant& ChooseVariant(int64_t rows, int64_t experts) {
  const int64_t mean = rows / std::max<int64_t>(experts, 1);
  for (const Variant& variant : kVariants) {
    if (mean <= variant.max_mean_rows) return variant;
  }
  return kVariants[std::size(kVariants) - 1];
}

// Blocks of one multiprocessor: as many as its shared memory holds.
int BlocksPerSm(const Variant& variant) {
  const int fitting = MultiprocessorSharedBytes() / (variant.shared_bytes + kReservedBytes);
  return std::clamp(fitting, 1, variant.blocks_per_sm);
}

GemmPlan PlanSm80(int64_t rows, int64_t experts) {
  const Variant& variant = ChooseVariant(rows, experts);
  const int64_t blocks = int64_t{MultiprocessorCount()} * BlocksPerSm(variant);
  const int64_t most = std::min<int64_t>(kMaxBlocks, kPartialSumBytes / variant.share_bytes);
  return {{variant.rows, kMinCost},
          kTiles,
          /*step_tiles=*/1,
          static_cast<int32_t>(std::min(blocks, most))};
}

cudaError_t LaunchSm80(cudaStream_t stream, const ExpertGemm& gemm) {
  for (const Variant& variant : kVariants) {
    if (variant.rows == gemm.rule.tile_rows) return variant.launch(stream, gemm);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

const Engine kEngineSm80 = {PlanSm80, LaunchSm80, /*overlaps=*/false};

}  // namespace nvfp4
