// Computes y[r] = W @ x[r] * global_scale + bias for at most kLinearFewRows rows, in bf16 and f16,
// in one launch. It is a linear layer in W4A16. Nothing is scheduled or cleared beforehand.
//
// This file has the forms for up to 8 rows, and chooses between them and the one for more rows
// (linear_few_wide.cu). An output tile has one or four slabs of 16 weight rows, and all rows of x.
// The eight warps of a block form teams, and k is divided between them:
//
//   slabs  teams of a block  k is divided between                 rows
//   1      8 of one warp     the teams                            1 to 4; 1 to 8 without clusters
//   4      2 of four warps   the blocks of a cluster, the teams   5 to 8, from 9.0 on
//   8      see linear_few_wide.cu                                 up to 64, from 9.0 on
//
// The first form has four times as many output tiles as the second, so that a small layer occupies
// all multiprocessors. But each output tile reads all of x from the L2 cache. With several rows,
// that costs more than the weights. The second form reads x a quarter as often, and clusters along
// k give each multiprocessor work.
//
// On 9.0, linear_sm90.cu has all layers of more than four rows, and large ones of two to four.
// Layers of more than eight rows come here on later devices alone.
//
// A warp has one slab. It loads weights from memory to registers, kDepth weight tiles ahead. All
// blocks together have the weights of a small layer in flight at once. While the preceding kernel
// still runs, a warp also unpacks half of these tiles, for which it has registers. The block's part
// of x is in shared memory. Partial sums are added in the order of the teams, then in that of the
// blocks of a cluster. The bits of a row therefore depend on the other rows of a call only where
// their number changes the form.
//
// The kernel may start before the preceding one ends. If that kernel may have written the weights,
// this one only prefetches them into the L2 cache before it waits.
//
// Bottleneck: latency of memory, then reading weights.
//
// Needs: sm_80. Tests: tests/gpu/test_linear_few.py, tests/emulation/test_linear_few.py.
#include "cuda/gemm/linear_few.cuh"

#include <algorithm>

#include "cuda/epilogues/direct_store.cuh"
#include "cuda/gemm/add_sums.cuh"
#include "cuda/gemm/linear_few_wide.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileSlabs = 4;  // slabs of a weight tile
constexpr int kSlabCodeBytes = kTileCodeBytes / kTileSlabs;
constexpr int kSlabScaleBytes = kTileScaleBytes / kTileSlabs;

struct Packed {
  uint4 codes;
  uint2 scales;
};

// The weights of a warp that it has not loaded yet: those of its slab in every kTeams-th weight
// tile of its block. They are numbered from 0 on.
template <int kTeams>
struct SlabWeights {
  const uint8_t* codes;  // of this lane
  const uint8_t* scales;
  int32_t left;  // weight tiles; negative after an advance past the end

  // Loads a weight tile. Past the end, it returns zeros.
  __device__ __forceinline__ Packed Load(int item) const {
    Packed packed = {make_uint4(0, 0, 0, 0), make_uint2(0, 0)};
    if (item < left) {
      packed.codes = __ldcs(reinterpret_cast<const uint4*>(codes + item * kTeams * kTileCodeBytes));
      packed.scales =
          __ldcs(reinterpret_cast<const uint2*>(scales + item * kTeams * kTileScaleBytes));
    }
    return packed;
  }

  __device__ __forceinline__ void Advance(int items) {
    codes += items * kTeams * kTileCodeBytes;
    scales += items * kTeams * kTileScaleBytes;
    left -= items;
  }

  // Prefetches the first kItems weight tiles into the L2 cache. Four lanes name the lines of 128
  // bytes of one weight tile.
  template <int kItems>
  __device__ __forceinline__ void Prefetch() const {
    const int lane = static_cast<int>(threadIdx.x % 32), item = lane / 4;
    const uint8_t* line = codes - lane * 16 + lane % 4 * 128;
    if (item < min(kItems, left)) PrefetchLine(line + item * kTeams * kTileCodeBytes);
    if (lane < min(kItems, left)) PrefetchLine(scales - item * 8 + lane * kTeams * kTileScaleBytes);
  }
};

// Starts the copies of the block's part of x to shared memory, `stride` bytes between rows, with
// zeros past k. Neighboring threads copy neighboring chunks of 16 bytes.
__device__ __forceinline__ void BringRows(const ExpertGemm& p, int rows, int first_tile, int tiles,
                                          int stride, uint8_t* shared) {
  constexpr int kTileChunks = kTileK / 8;
  const int chunks = tiles * kTileChunks, begin = first_tile * kTileK;
  const auto* x = static_cast<const uint16_t*>(p.left.values) + begin;
  uint32_t target = SharedAddress(shared);
#pragma unroll 1
  for (int row = 0; row < rows; ++row, x += p.k, target += stride) {
#pragma unroll 1
    for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += kThreads) {
      const bool inside = begin + chunk * 8 < p.k;
      CopyOrZero(target + chunk * 16, x + (inside ? chunk * 8 : 0), inside ? 16 : 0);
    }
  }
  CommitCopies();
}

// The sums of a warp, which are a fragment for eight rows of x. An MMA waits for the preceding one
// on the same fragment, so that there are two chains of MMAs.
struct SlabSums {
  float sums[2][4] = {};

  __device__ __forceinline__ float4 Sum() const {
    return make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                       sums[0][3] + sums[1][3]);
  }
};

// The fragments of a warp's part of a weight tile: two halves of two.
struct Fragments {
  uint32_t words[2][2][4];

  // Computes the fragments where the call stands, even if they are used much later.
  __device__ __forceinline__ void ComputeHere() {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(words[i / 8][i / 4 % 2][i % 4]));
  }
};

template <typename T>
__device__ __forceinline__ Fragments Unpack(const Packed& packed, const TileConstants& constants) {
  const uint32_t words[4] = {packed.codes.x, packed.codes.y, packed.codes.z, packed.codes.w};
  const uint32_t scales[2] = {packed.scales.x, packed.scales.y};
  Fragments fragments;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    auto& [even, odd] = fragments.words[half];
    UnpackPair<T>(words[2 * half], words[2 * half + 1], scales[half], constants, even, odd);
  }
  return fragments;
}

// sums += W @ x for one slab of a weight tile. Lane l gives the address of row l % 8 of x at k
// 8 (l / 8).
template <typename T>
__device__ __forceinline__ void MultiplySlab(const Fragments& fragments, const uint8_t* rows,
                                             SlabSums& slab) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t b[4];
    LoadMatrices(rows + 64 * half, b);
    MultiplyAdd<T>(slab.sums[0], fragments.words[half][0], b[0], b[1]);
    MultiplyAdd<T>(slab.sums[1], fragments.words[half][1], b[2], b[3]);
  }
}

// The partial sums of a block in shared memory: a fragment for each team and each warp of it.
template <int kSlabs>
struct BlockPartials {
  static constexpr int kTeams = kWarps / kSlabs;
  float4* begin;
  int thread;  // in its team

  __device__ __forceinline__ float4* At(int team) const {
    return begin + team * kSlabs * 32 + thread;
  }

  // Returns the sum over the teams.
  __device__ __forceinline__ float4 Total() const {
    float4 total = *At(0);
#pragma unroll
    for (int team = 1; team < kTeams; ++team) Add(total, *At(team));
    return total;
  }
};

// The arguments of the kernel besides the GEMM.
struct FewRows {
  int32_t rows;
  int32_t ranks_log2;
  int32_t rank_tiles;
};

// Adds the sums of the blocks of a cluster, which are partials.At(0), and calls finish(sums) in the
// first team of the first block.
template <typename Partials, typename Function>
__device__ __forceinline__ void FinishInCluster(const Partials& partials, const FewRows& few,
                                                int rank, int team, const Function& finish) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  SyncCluster();
  if (rank == 0 && team == 0) {
    const uint32_t address = SharedAddress(partials.At(0));
    float4 total = LoadPeer16(address, 0);
#pragma unroll 4
    for (int peer = 1; peer < 1 << few.ranks_log2; ++peer) Add(total, LoadPeer16(address, peer));
    finish(total);
  }
  LeaveCluster();  // until then, other blocks may read the shared memory of this one
#endif
}

// The kernel for up to eight rows. Each warp has kDepth weight tiles in flight.
template <typename T, int kSlabs, int kDepth>
__global__ void __launch_bounds__(kThreads, kDepth <= 4 ? 3 : 2)
    LinearFew(const __grid_constant__ ExpertGemm p, const FewRows few,
              const TileConstants constants) {
  constexpr int kTeams = kWarps / kSlabs, kReady = kDepth / 2;
  NVFP4_DYNAMIC_SHARED(shared);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int team = warp / kSlabs, rank = static_cast<int>(blockIdx.x) & ((1 << few.ranks_log2) - 1);
  const int unit = static_cast<int>(blockIdx.x >> few.ranks_log2);
  const int m_tile = kSlabs == 1 ? unit / kTileSlabs : unit;
  const int slab = kSlabs == 1 ? unit % kTileSlabs : warp % kSlabs;
  const int k_tiles = (p.k + kTileK - 1) / kTileK, first_tile = rank * few.rank_tiles;
  const int tiles = max(min(few.rank_tiles, k_tiles - first_tile), 0);
  const int64_t tile = static_cast<int64_t>(m_tile) * k_tiles + first_tile;
  SlabWeights<kTeams> weights = {
      p.weight.packed + (tile + team) * kTileCodeBytes + slab * kSlabCodeBytes + lane * 16,
      p.weight.block_scale + (tile + team) * kTileScaleBytes + slab * kSlabScaleBytes +
          lane / 4 * 8,
      (tiles - team + kTeams - 1) / kTeams};
  Packed packed[kDepth];
  if (!p.schedule_is_unchanged) {
    weights.template Prefetch<kDepth>();
    WaitForPrecedingKernel();
  }
#pragma unroll
  for (int d = 0; d < kDepth; ++d) packed[d] = weights.Load(d);
  const LaneRows lane_rows = LoadLaneRows(p, 0, m_tile, slab);
  Fragments ready[kReady];
#pragma unroll
  for (int d = 0; d < kReady; ++d) {
    ready[d] = Unpack<T>(packed[d], constants);
    ready[d].ComputeHere();
  }
  if (p.schedule_is_unchanged) WaitForPrecedingKernel();
  StartNextKernel();
  const int stride = RowStride(few.rank_tiles * kTileK);
  BringRows(p, few.rows, first_tile, tiles, stride, shared);
  WaitCopies<0>();
  __syncthreads();

  // Rows past the last one are copies of it.
  SlabSums sums;
  const uint8_t* rows =
      shared + min(lane % 8, few.rows - 1) * stride + lane / 8 * 16 + team * kTileK * 2;
  // Multiplies kDepth weight tiles by their parts of x. fragments(d) returns those of tile d.
  const auto multiply = [&](const auto& fragments) {
    weights.Advance(kDepth);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (weights.left > d - kDepth) {
        MultiplySlab<T>(fragments(d), rows + d * kTeams * kTileK * 2, sums);
      }
      packed[d] = weights.Load(d);
    }
    rows += kDepth * kTeams * kTileK * 2;
  };
  const auto unpack = [&](int d) { return Unpack<T>(packed[d], constants); };
  multiply([&](int d) { return d < kReady ? ready[d % kReady] : unpack(d); });
  while (weights.left > 0) multiply(unpack);
  const BlockPartials<kSlabs> partials = {reinterpret_cast<float4*>(shared),
                                          static_cast<int>(threadIdx.x % (32 * kSlabs))};
  __syncthreads();  // the partial sums take the place of x
  *partials.At(team) = sums.Sum();
  __syncthreads();

  const RowTile row_tile = {0, 0, few.rows};
  const TileStore<T> store = MakeTileStore<T>(p, row_tile, lane_rows, m_tile, slab);
  const auto finish = [&](const float4& total) {
    if (store.first >= p.columns) return;  // padding, for the whole warp
    StoreRows(store, 0, store.g,
              store.template Finished<Finish::kPlain>(0, total.x, total.y, total.z, total.w));
  };
  const bool alone = kSlabs == 1 || few.ranks_log2 == 0;
  if (team == 0) {
    const float4 total = partials.Total();
    if (alone) {
      finish(total);
    } else {
      *partials.At(0) = total;
    }
  }
  if (!alone) FinishInCluster(partials, few, rank, team, finish);
}

template <typename T, int kSlabs, int kDepth>
cudaError_t LaunchTyped(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows,
                        const LinearFewCut& cut) {
  int32_t ranks_log2 = 0;
  while (1 << ranks_log2 < cut.ranks) ++ranks_log2;
  const FewRows few = {static_cast<int32_t>(rows), ranks_log2, cut.rank_tiles};
  const int64_t units = CeilDiv(gemm.columns, kSlabs * kTileM / kTileSlabs);
  const dim3 grid(static_cast<unsigned>(units * cut.ranks));
  return LaunchClusters(stream, grid, cut.ranks, kThreads, cut.shared_bytes, /*overlaps=*/true,
                        LinearFew<T, kSlabs, kDepth>, gemm, few, MakeTileConstants<T>());
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows,
                     const LinearFewCut& cut) {
  if (cut.slabs == kTileSlabs) return LaunchTyped<T, kTileSlabs, 4>(stream, gemm, rows, cut);
  return cut.rank_tiles <= 4 * kWarps ? LaunchTyped<T, 1, 4>(stream, gemm, rows, cut)
                                      : LaunchTyped<T, 1, 8>(stream, gemm, rows, cut);
}

// Returns the cut into output tiles of `slabs` slabs, one or four, with clusters of `ranks` blocks.
LinearFewCut MakeCut(int64_t rows, int64_t k_tiles, int32_t slabs, int32_t ranks) {
  const int64_t rank_tiles = CeilDiv(k_tiles, ranks);
  const int64_t x = rows * RowStride(static_cast<int32_t>(rank_tiles) * kTileK);
  const int64_t bytes = std::max<int64_t>(x, kThreads * sizeof(float4));
  const bool fits = bytes <= BlockSharedBytes();
  return {slabs, ranks, static_cast<int32_t>(rank_tiles), fits ? static_cast<int32_t>(bytes) : 0};
}

// Returns the cut with the largest clusters with which all blocks still run at once, about two and
// a half on a multiprocessor, and each team has a weight tile. If x does not fit, clusters are
// larger.
LinearFewCut CutInClusters(int64_t rows, int64_t n, int64_t k_tiles) {
  constexpr int32_t kMaxRanks = 8;  // every device with clusters has those of eight blocks
  const int64_t most_blocks = 5 * MultiprocessorCount() / 2;
  LinearFewCut cut = MakeCut(rows, k_tiles, kTileSlabs, 1);
  for (int32_t ranks = 2; ranks <= kMaxRanks; ranks *= 2) {
    const bool useful = CeilDiv(n, kTileM) * ranks <= most_blocks &&
                        k_tiles >= int64_t{kWarps / kTileSlabs} * ranks;
    if (!useful && cut.fits()) break;
    cut = MakeCut(rows, k_tiles, kTileSlabs, ranks);
  }
  return cut;
}

}  // namespace

bool LinearFewHasClusters() { return MayOverlap(LinearFew<__half, kTileSlabs, 4>); }

LinearFewCut CutLinearFew(int64_t rows, int64_t n, int64_t k, bool clusters) {
  constexpr int64_t kSlabRows = 4;
  // With more slabs, four slabs for each output tile are enough to occupy the device.
  const int64_t most_slabs = 4 * MultiprocessorCount();
  const int64_t k_tiles = CeilDiv(k, kTileK);
  if (rows > MostLinearRows(k, {MultiprocessorCount(), BlockSharedBytes(), clusters, false})) {
    return {};
  }
  if (rows > kLinearNarrowRows) return CutLinearWide(rows, n, k_tiles);
  const LinearFewCut cut = MakeCut(rows, k_tiles, 1, 1);
  const bool small = rows <= kSlabRows && CeilDiv(n, kTileM / kTileSlabs) <= most_slabs;
  if (!clusters || (small && cut.fits())) return cut;
  const LinearFewCut in_clusters = CutInClusters(rows, n, k_tiles);
  return in_clusters.fits() ? in_clusters : CutLinearWide(rows, n, k_tiles);
}

cudaError_t LaunchLinearFew(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows,
                            const LinearFewCut& cut) {
  if (cut.slabs > kTileSlabs) return LaunchLinearWide(stream, gemm, rows, cut);
  return gemm.type == DataType::kF16 ? LaunchOf<__half>(stream, gemm, rows, cut)
                                     : LaunchOf<__nv_bfloat16>(stream, gemm, rows, cut);
}

}  // namespace nvfp4
