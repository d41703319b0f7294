// The wide form of linear_few.cu, for 9 to 64 rows in bf16 and f16: an output tile is 128 weight
// rows by all rows of x.
//
// With this many rows, x costs more than the weights. Each output tile reads all of x from the L2
// cache, and each warp reads it again from shared memory. Two weight tiles along n share what a
// block brings, and each fragment of x that a warp loads is multiplied by two slabs of 16 weight
// rows.
//
// Weights and x come to shared memory by cp.async in pieces of 128 of k, a few pieces ahead, so
// that MMAs begin with the first piece. The memory of a piece is reused in turn (a ring of stages).
// Registers hold the sums only. The eight warps of a block form two teams of four. Up to 32 rows,
// each team has one of the two weight tiles of a piece along k. With more rows, each team has half
// of the rows.
//
// The blocks of a cluster divide k. CutLinearWide chooses the size of the clusters with which the
// last block is done first. It takes two blocks on a multiprocessor to be as fast as one, because
// blocks mostly wait for latencies.
//
// Partial sums are added in the order of the teams, then in that of the blocks of a cluster. The
// bits of a row depend on the other rows of a call only where these make it more than 32 rows.
//
// Bottleneck: latencies. On an H200, a block alone on its multiprocessor had an instruction to
// issue in a third of the cycles. With 5120 x 2048 weights it took 12,600 cycles for 16 rows, in
// which DRAM reached 9 % of its bandwidth, and 22,000 for 64.
//
// Needs: sm_90, for clusters. Tests: tests/gpu/test_linear_few.py,
// tests/emulation/test_linear_few.py.
#include "cuda/gemm/linear_few_wide.cuh"

#include <algorithm>

#include "cuda/epilogues/direct_store.cuh"
#include "cuda/gemm/add_sums.cuh"
#include "cuda/gemm/piece_ring.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileSlabs = 4;                     // slabs of a weight tile
constexpr int kBlockTiles = 2;                    // weight tiles along n of an output tile
constexpr int kSlabs = kBlockTiles * kTileSlabs;  // of an output tile
constexpr int kTeams = 2;                         // and weight tiles of a piece along k
constexpr int kWarpSlabs = kSlabs * kTeams / kWarps;
constexpr int kPieceK = kTeams * kTileK;
constexpr int kSlabCodeBytes = kTileCodeBytes / kTileSlabs;
constexpr int kSlabScaleBytes = kTileScaleBytes / kTileSlabs;
constexpr int kPieceCodeBytes = kTeams * kTileCodeBytes;  // of one weight tile along n
constexpr int kPieceScaleBytes = kTeams * kTileScaleBytes;
constexpr int kScalesAt = kBlockTiles * kPieceCodeBytes;  // in a stage
constexpr int kRowsAt = kScalesAt + kBlockTiles * kPieceScaleBytes;
constexpr int kRowStride = kPieceK * 2 + 16;  // 16 bytes of padding, against bank conflicts
constexpr int kBlocksPerSm = 2;
constexpr int kMaxStages = 6;
constexpr int kRingBytes = 96 << 10;  // any device gives a block 99 KiB
constexpr int kMaxRanks = 8;          // every device with clusters has those of eight blocks

static_assert(kPieceCodeBytes == kThreads * 16, "a thread brings 16 bytes of a weight tile");
static_assert(kWarpSlabs == 2, "a fragment of x serves two slabs");
static_assert(kSlabs == kWarps, "a warp finishes one slab");

// The sizes of the kernel for up to 8 * kEights rows. If the teams divide rows instead of k, a warp
// has the sums of half of the rows. 64 rows would otherwise need more registers than there are.
template <int kEights>
struct Form {
  static constexpr bool kDividesRows = kEights == 8;
  static constexpr int kWarpEights = kDividesRows ? kEights / kTeams : kEights;
  static constexpr int kPartials = kDividesRows ? 1 : kTeams;  // of each sum
  static constexpr int kStageBytes = kRowsAt + 8 * kEights * kRowStride;
  static constexpr int kStages = std::min(kMaxStages, kRingBytes / kStageBytes);
  static constexpr int kPartialBytes = kPartials * kEights * kSlabs * 32 * int{sizeof(float4)};
  static_assert(kStages >= 3, "two pieces are in flight while another one is used");
  static_assert(kPartialBytes <= kRingBytes, "the partial sums take the place of the ring");
};

// The arguments of the kernel besides the GEMM.
struct WideRows {
  int32_t rows;
  int32_t ranks;
  int32_t rank_tiles;
};

// The weight tiles of a block: `count` along k from tile `first` on, in each of up to two rows of
// tiles. Pointers are computed again for each piece, because registers are scarce.
struct BlockWeights {
  int32_t tile;  // output tile
  int32_t first;
  int32_t count;

  // Returns the number of the first tile in row `row`.
  static __device__ __forceinline__ int64_t TileAt(const ExpertGemm& p, int tile, int row, int at) {
    const int k_tiles = (p.k + kTileK - 1) / kTileK;
    return static_cast<int64_t>(tile * kBlockTiles + row) * k_tiles + at;
  }
  __device__ __forceinline__ int Rows(const ExpertGemm& p) const {
    return min((p.columns + kTileM - 1) / kTileM - tile * kBlockTiles, kBlockTiles);
  }

  // Prefetches the first `tiles` weight tiles along k into the L2 cache.
  __device__ __forceinline__ void Prefetch(const ExpertGemm& p, int tiles) const {
    const int thread = static_cast<int>(threadIdx.x), used = min(tiles, count);
    for (int row = 0; row < Rows(p); ++row) {
      const int64_t begin = TileAt(p, tile, row, first);
      for (int line = thread; line < used * (kTileCodeBytes / 128); line += kThreads) {
        PrefetchLine(p.weight.packed + begin * kTileCodeBytes + line * 128);
      }
      if (thread < used * (kTileScaleBytes / 128)) {
        PrefetchLine(p.weight.block_scale + begin * kTileScaleBytes + thread * 128);
      }
    }
  }

  // Starts the copies of a piece to a stage. It leaves out what does not exist.
  __device__ __forceinline__ void Bring(const ExpertGemm& p, int piece, uint32_t stage) const {
    const int thread = ReadThread(), at = piece * kTeams, rows = Rows(p);
    const uint32_t byte = thread * 16;
#pragma unroll
    for (int row = 0; row < kBlockTiles; ++row) {
      if (row < rows && at + static_cast<int>(byte / kTileCodeBytes) < count) {
        const int64_t begin = TileAt(p, tile, row, first + at) * kTileCodeBytes;
        Copy(stage + row * kPieceCodeBytes + byte, p.weight.packed + begin + byte);
      }
    }
    const int row = static_cast<int>(byte / kPieceScaleBytes);
    const uint32_t within = byte % kPieceScaleBytes;
    if (row < rows && at + static_cast<int>(within / kTileScaleBytes) < count) {
      const int64_t begin = TileAt(p, tile, row, first + at) * kTileScaleBytes;
      Copy(stage + kScalesAt + byte, p.weight.block_scale + begin + within);
    }
  }
};

// Starts the copies of a piece of x to a stage, with zeros past k. `first` is its first k.
__device__ __forceinline__ void BringRows(const ExpertGemm& p, int rows, int first,
                                          uint32_t target) {
  constexpr int kChunks = kPieceK / 8, kStride = kThreads / kChunks;
  const int thread = ReadThread();
  const int k = first + thread % kChunks * 8;
  int row = thread / kChunks;
  const auto* from = static_cast<const uint16_t*>(p.left.values) + static_cast<int64_t>(row) * p.k;
  from += k < p.k ? k : 0;
  uint32_t to = target + row * kRowStride + thread % kChunks * 16;
#pragma unroll 1
  for (; row < rows; row += kStride) {
    CopyOrZero(to, from, k < p.k ? 16 : 0);
    from += static_cast<int64_t>(kStride) * p.k;
    to += kStride * kRowStride;
  }
}

// What a warp multiplies: two slabs from `slab` on, by the part of x of its team.
struct WarpPlace {
  int32_t lane, team, slab;

  __device__ __forceinline__ explicit WarpPlace(int thread)
      : lane(thread % 32), team(thread / 32 % kTeams), slab(thread / 32 / kTeams * kWarpSlabs) {}

  // Return where in a stage the codes and the scales of this lane lie, in the first weight tile
  // along k.
  __device__ __forceinline__ int codes() const {
    return slab / kTileSlabs * kPieceCodeBytes + slab % kTileSlabs * kSlabCodeBytes + lane * 16;
  }
  __device__ __forceinline__ int scales() const {
    return kScalesAt + slab / kTileSlabs * kPieceScaleBytes + slab % kTileSlabs * kSlabScaleBytes +
           lane / 4 * 8;
  }
  // Returns where the row of x lies whose address this lane gives to LoadMatrices.
  __device__ __forceinline__ int rows() const {
    return kRowsAt + lane % 8 * kRowStride + lane / 8 * 16;
  }
};

template <int kEights>
struct WideSums {
  float sums[kWarpSlabs][kEights][4] = {};
};

// sums += W @ x for two slabs of a weight tile. `codes` and `scales` are those of this lane in the
// first slab. Lane l gives the address of row l % 8 of the first eight rows at k 8 (l / 8).
template <typename T, int kEights>
__device__ __forceinline__ void MultiplySlabs(const uint8_t* codes, const uint8_t* scales,
                                              const uint8_t* rows, const TileConstants& constants,
                                              WideSums<kEights>& warp) {
#pragma unroll 1  // otherwise fragments of both halves would take registers
  for (int half = 0; half < 2; ++half) {
    uint32_t even[kWarpSlabs][4], odd[kWarpSlabs][4];
#pragma unroll
    for (int slab = 0; slab < kWarpSlabs; ++slab) {
      const uint2 words = *reinterpret_cast<const uint2*>(codes + slab * kSlabCodeBytes + half * 8);
      const uint32_t scale =
          *reinterpret_cast<const uint32_t*>(scales + slab * kSlabScaleBytes + half * 4);
      UnpackPair<T>(words.x, words.y, scale, constants, even[slab], odd[slab]);
    }
    // All fragments of x are loaded before the MMAs, and MMAs that follow each other add to
    // different sums. A multiprocessor has few warps of this kernel to hide latencies with.
    uint32_t b[kEights][4];
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      LoadMatrices(rows + eight * 8 * kRowStride + 64 * half, b[eight]);
    }
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int slab = 0; slab < kWarpSlabs; ++slab) {
        MultiplyAdd<T>(warp.sums[slab][eight], even[slab], b[eight][0], b[eight][1]);
      }
    }
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int slab = 0; slab < kWarpSlabs; ++slab) {
        MultiplyAdd<T>(warp.sums[slab][eight], odd[slab], b[eight][2], b[eight][3]);
      }
    }
  }
}

// Returns where partial sums for eight rows of x and a slab lie in shared memory.
template <int kEights>
__device__ __forceinline__ float4* PartialAt(uint8_t* shared, int part, int eight, int slab) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return reinterpret_cast<float4*>(shared) + ((part * kEights + eight) * kSlabs + slab) * 32 + lane;
}

// Adds the partial sums of the teams and of the blocks of the cluster, and calls finish(eight,
// sums) for the eights of rows that this block finishes. A warp finishes the slab of its number.
template <int kEights, typename Function>
__device__ __forceinline__ void FinishSlab(uint8_t* shared, const WideRows& wide, int rank,
                                           const Function& finish) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int eight = 0; 8 * eight < wide.rows; ++eight) {
    float4* const first = PartialAt<kEights>(shared, 0, eight, warp);
    float4 total = *first;
    if constexpr (Form<kEights>::kPartials == 2) {
      Add(total, *PartialAt<kEights>(shared, 1, eight, warp));
    }
    if (wide.ranks == 1) {
      finish(eight, total);
    } else {
      *first = total;
    }
  }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (wide.ranks == 1) return;
  SyncCluster();
#pragma unroll 1
  for (int eight = rank; 8 * eight < wide.rows; eight += wide.ranks) {
    const uint32_t address = SharedAddress(PartialAt<kEights>(shared, 0, eight, warp));
    float4 total = LoadPeer16(address, 0);
#pragma unroll 4
    for (int peer = 1; peer < wide.ranks; ++peer) Add(total, LoadPeer16(address, peer));
    finish(eight, total);
  }
  LeaveCluster();  // until then, other blocks may read the shared memory of this one
#endif
}

template <typename T, int kEights>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    LinearFewWide(const __grid_constant__ ExpertGemm p, const WideRows wide,
                  const TileConstants constants) {
  using F = Form<kEights>;
  NVFP4_DYNAMIC_SHARED(shared);
  const int tile = static_cast<int>(blockIdx.x) / wide.ranks;
  const int rank = static_cast<int>(blockIdx.x) % wide.ranks;
  const int first_tile = rank * wide.rank_tiles;
  const int tiles = max(min(wide.rank_tiles, (p.k + kTileK - 1) / kTileK - first_tile), 0);
  const int pieces = (tiles + kTeams - 1) / kTeams;
  const BlockWeights weights = {tile, first_tile, tiles};
  weights.Prefetch(p, 2 * F::kStages * kTeams);
  const uint32_t ring = SharedAddress(shared);
  const auto bring_weights = [&](int piece, int stage) {
    weights.Bring(p, piece, ring + stage * F::kStageBytes);
  };
  if (p.schedule_is_unchanged) BringFirst<F::kStages>(pieces, bring_weights);
  WaitForPrecedingKernel();
  StartNextKernel();
  const auto bring = [&](int piece, int stage) {
    const uint32_t at = ring + stage * F::kStageBytes;
    if (!p.schedule_is_unchanged || !IsFirst<F::kStages>(piece)) bring_weights(piece, stage);
    BringRows(p, wide.rows, first_tile * kTileK + piece * kPieceK, at + kRowsAt);
  };

  WideSums<F::kWarpEights> sums;
  RunThroughRing<F::kStages>(pieces, bring, [&](int piece, int stage_index) {
    // Addresses are computed for each piece, because registers are scarce. Rows of x past the last
    // one, and weight rows of a tile that does not exist, are what memory holds. No output depends
    // on them.
    const WarpPlace at(ReadThread());
    const uint8_t* stage = shared + stage_index * F::kStageBytes;
    const uint8_t* rows =
        stage + at.rows() + (F::kDividesRows ? at.team * 8 * F::kWarpEights * kRowStride : 0);
#pragma unroll 1
    for (int i = F::kDividesRows ? 0 : at.team; i < min(tiles - piece * kTeams, kTeams);
         i += F::kDividesRows ? 1 : kTeams) {
      MultiplySlabs<T>(stage + at.codes() + i * kTileCodeBytes,
                       stage + at.scales() + i * kTileScaleBytes, rows + i * kTileK * 2, constants,
                       sums);
    }
  });
  __syncthreads();  // the partial sums take the place of the ring
  const WarpPlace at(ReadThread());
#pragma unroll
  for (int eight = 0; eight < F::kWarpEights; ++eight) {
#pragma unroll
    for (int i = 0; i < kWarpSlabs; ++i) {
      const float (&own)[4] = sums.sums[i][eight];
      const int part = F::kDividesRows ? 0 : at.team;
      const int place = F::kDividesRows ? at.team * F::kWarpEights + eight : eight;
      *PartialAt<kEights>(shared, part, place, at.slab + i) =
          make_float4(own[0], own[1], own[2], own[3]);
    }
  }
  const int warp = ReadThread() / 32, m_tile = tile * kBlockTiles + warp / kTileSlabs;
  const LaneRows lane_rows = LoadLaneRows(p, 0, m_tile, warp % kTileSlabs);
  __syncthreads();

  const RowTile row_tile = {0, 0, wide.rows};
  const TileStore<T> store = MakeTileStore<T>(p, row_tile, lane_rows, m_tile, warp % kTileSlabs);
  FinishSlab<kEights>(shared, wide, rank, [&](int eight, const float4& total) {
    if (store.first >= p.columns) return;  // padding, for the whole warp
    const OutputPairs pairs =
        store.template Finished<Finish::kPlain>(8 * eight, total.x, total.y, total.z, total.w);
    StoreRows(store, 8 * eight, 8 * eight + store.g, pairs);
  });
}

// Calls function(form) for the form of the kernel for `rows` rows.
template <typename Function>
auto WithForm(int64_t rows, const Function& function) {
  if (rows <= 16) return function(std::integral_constant<int, 2>());
  if (rows <= 32) return function(std::integral_constant<int, 4>());
  return function(std::integral_constant<int, 8>());
}

template <typename T>
cudaError_t LaunchTyped(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows,
                        const LinearFewCut& cut) {
  const WideRows wide = {static_cast<int32_t>(rows), cut.ranks, cut.rank_tiles};
  const int64_t tiles = CeilDiv(gemm.columns, kBlockTiles * kTileM);
  const dim3 grid(static_cast<unsigned>(tiles * cut.ranks));
  return WithForm(rows, [&](auto eights) {
    return LaunchClusters(stream, grid, cut.ranks, kThreads, cut.shared_bytes, /*overlaps=*/true,
                          LinearFewWide<T, eights>, gemm, wide, MakeTileConstants<T>());
  });
}

}  // namespace

LinearFewCut CutLinearWide(int64_t rows, int64_t n, int64_t k_tiles) {
  // The beginning and the end of a block cost about as much as a piece.
  constexpr int64_t kOverhead = 1;
  const int64_t tiles = CeilDiv(n, kBlockTiles * kTileM), pieces = CeilDiv(k_tiles, kTeams);
  const int64_t resident = kBlocksPerSm * MultiprocessorCount();
  const auto cost = [&](int64_t ranks) {
    return CeilDiv(tiles * ranks, resident) * (CeilDiv(pieces, ranks) + kOverhead);
  };
  int32_t best = 1;
  for (int32_t ranks = 2; ranks <= kMaxRanks; ++ranks) {
    if (cost(ranks) < cost(best)) best = ranks;
  }
  const int64_t rank_pieces = CeilDiv(pieces, best);
  const int64_t bytes = WithForm(rows, [&](auto eights) {
    using F = Form<eights>;
    const int64_t stages = std::min<int64_t>(rank_pieces, F::kStages);
    return std::max<int64_t>(stages * F::kStageBytes, F::kPartialBytes);
  });
  return {kSlabs, best, static_cast<int32_t>(rank_pieces * kTeams), static_cast<int32_t>(bytes)};
}

cudaError_t LaunchLinearWide(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows,
                             const LinearFewCut& cut) {
  return gemm.type == DataType::kF16 ? LaunchTyped<__half>(stream, gemm, rows, cut)
                                     : LaunchTyped<__nv_bfloat16>(stream, gemm, rows, cut);
}

}  // namespace nvfp4
