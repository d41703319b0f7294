// Computes y[r] = W @ x[r] with float32 sums for at most 64 rows, in one launch: routers, the head,
// and linear layers that are not quantized.
//
//   x  [rows, k]  bf16 or f16
//   W  [n, k]     the type of x; or f32, if x is bf16
//   y  [rows, n]  f32, or rounded to the type of x
//
// A block computes an output tile: some weight rows, and all rows of x. Its eight warps form teams,
// which divide k between them.
//
//   weight rows  slabs of a warp  teams      a piece of k  layers
//   16           1                8          256           small ones, such as routers; f32 weights
//   64           1                2 of four  128           others of up to 16 rows
//   128          2                2 of four  64            others of more rows
//
// The first form has the most output tiles, so that a small layer occupies many multiprocessors.
// But each output tile reads all of x from the L2 cache. The other forms read x less often. In the
// last one, a warp multiplies each fragment of x by two slabs of 16 weight rows. Clusters along k
// give each multiprocessor work.
//
// A block brings x and W to shared memory by cp.async, a few pieces ahead. The memory of a piece is
// reused in turn (a ring of stages), so that k has no bound. Registers hold no weights in flight.
//
// Both operands of an MMA may use the same permutation of k. A lane therefore takes eight
// contiguous elements of a row as its part of two MMAs, which cover 32 of k together. In 16 bits
// this is one load of 16 bytes.
//
// A float32 weight is the sum of three bf16 numbers, which are its bits 23 to 16, 15 to 8 and 7 to
// 0. Three MMAs give the exact products. The weights must be finite. If x is infinite, an output
// may be NaN instead of an infinity.
//
// Partial sums are added in the order of the teams, then in that of the blocks of a cluster. The
// bits of a row depend on the other rows of a call only where their number changes the form.
//
// The kernel may start before the preceding one ends. Until that has ended, it only prefetches
// weights into the L2 cache, because the preceding kernel may have written them.
//
// Bottleneck: latency for a router; otherwise reading weights.
//
// Needs: sm_80; k a multiple of 8. Tests: tests/emulation/test_dense_few.py,
// tests/gpu/test_dense_few.py.
#include "cuda/gemm/dense_few.cuh"

#include <algorithm>

#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "nvfp4.h"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSlabRows = 16;
constexpr int kStepK = 32;            // of two MMAs
constexpr int kMaxStages = 4;         // of the ring
constexpr int kRingBytes = 96 << 10;  // any device gives a block 99 KiB
constexpr int32_t kMaxRanks = 8;      // every device with clusters has those of eight blocks
constexpr int kSmall = 16, kMedium = 64, kLarge = 128;  // weight rows of an output tile

// The sizes of a form of the kernel for up to 8 * kEights rows.
template <typename W, int kTile, int kEights>
struct Form {
  static constexpr int kTileRows = kTile, kMostEights = kEights;
  static constexpr int kPieceK = kTile == kSmall ? 256 : kTile == kMedium ? 128 : 64;
  static constexpr int kWarpSlabs = kTile == kLarge ? 2 : 1;
  static constexpr int kTileSlabs = kTile / kSlabRows;
  static constexpr int kTeams = kWarps * kWarpSlabs / kTileSlabs;
  static constexpr int kTeamSteps = kPieceK / kStepK / kTeams;
  static constexpr int kWeightBytes = kTile * kPieceK * static_cast<int>(sizeof(W));
  static constexpr int kRowBytes = kPieceK * 2;  // of x
  static constexpr int kMaxStageBytes = kWeightBytes + 8 * kEights * kRowBytes;
  static constexpr int kStages =
      kRingBytes / kMaxStageBytes < kMaxStages ? kRingBytes / kMaxStageBytes : kMaxStages;
  static constexpr int kPartialBytes =
      kTeams * kEights * kTileSlabs * 32 * static_cast<int>(sizeof(float4));
  static_assert(kStages >= 2, "a piece is in flight while another one is used");
  static_assert(kPartialBytes <= kRingBytes, "the partial sums take the place of the ring");
  static_assert(kTeamSteps >= 1, "each team has a part of each piece");

  // Rows of x that a stage has room for. The first eight rows past the last one are copies of it.
  __host__ __device__ static constexpr int64_t RowsKept(int64_t rows) {
    return kEights == 1 ? rows : 8 * kEights;
  }
};

// Rows lie in shared memory without padding. Reads of a quarter of a warp name 64 bytes of two
// rows, or every other 16 bytes of a half of two rows if a lane reads eight float32. Odd rows have
// the chunks of 16 bytes in another order, so that the reads use all banks.
template <typename E>
__device__ __forceinline__ int FlipOf(int row) {
  return row % 2 * (sizeof(E) == 2 ? 64 : 16);
}

// The arguments of the kernel besides the pointers.
struct FewSizes {
  int32_t rows, n, k;
  int32_t ranks;
  int32_t rank_pieces;
  bool rounds;  // whether y has the type of x instead of f32
};

// Starts the copies of kPieceK of k, from k `first` on, of `rows` rows to shared memory. Rows from
// `filled` on, and what lies past the end of k, become zeros.
template <typename E, int kPieceK>
__device__ __forceinline__ void BringPiece(const void* source, int rows, int filled, int first,
                                           int k, uint32_t target) {
  constexpr int kChunk = 16 / sizeof(E), kChunks = kPieceK / kChunk, kStride = kThreads / kChunks;
  static_assert(kStride % 2 == 0, "all rows of a thread have the same flip");
  const int thread = ReadThread();  // otherwise addresses would take registers of the sums
  const int chunk = thread & (kChunks - 1), at = first + chunk * kChunk;
  int row = static_cast<int>(static_cast<unsigned>(thread) / kChunks);
  const E* from = static_cast<const E*>(source) + static_cast<int64_t>(row) * k + at;
  uint32_t to = target + row * (kPieceK * sizeof(E)) + (chunk * 16 ^ FlipOf<E>(row));
  if (at >= k) filled = 0;
#pragma unroll 2
  for (; row < rows; row += kStride) {
    CopyOrZero(to, from, row < filled ? 16 : 0);
    from += static_cast<int64_t>(kStride) * k;
    to += kStride * kPieceK * sizeof(E);
  }
}

// Prefetches `count` elements of k, from k `first` on, of `rows` weight rows into the L2 cache.
template <typename W>
__device__ __forceinline__ void PrefetchRows(const W* rows_begin, int rows, int first, int count,
                                             int k) {
  constexpr int kLine = 128 / sizeof(W);
  const int lines = (min(count, k - first) + kLine - 1) / kLine;
  for (int i = static_cast<int>(threadIdx.x); i < rows * lines; i += kThreads) {
    PrefetchLine(rows_begin + static_cast<int64_t>(i / lines) * k + first + i % lines * kLine);
  }
}

// A lane's part of two MMAs over kStepK of k for a slab of weights: eight elements of rows g and
// g + 8, as kParts numbers each whose sum they are.
template <typename W>
struct WeightFragment {
  static constexpr int kParts = sizeof(W) == 2 ? 1 : 3;
  uint32_t words[kParts][2][4];

  // Loads a step from a piece. `row` is row g in shared memory, `lower_bytes` before row g + 8.
  __device__ __forceinline__ void Load(const uint8_t* row, int lower_bytes, int step, int flip) {
    const int q = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const uint8_t* begin = row + lower * lower_bytes;
      if constexpr (kParts == 1) {
        const uint4 loaded = *reinterpret_cast<const uint4*>(begin + ((step * 64 + q * 16) ^ flip));
        Set(0, lower, loaded.x, loaded.y, loaded.z, loaded.w);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int offset = (step * 128 + q * 32 + half * 16) ^ flip;
          const float4 loaded = *reinterpret_cast<const float4*>(begin + offset);
          Split(lower, 2 * half, loaded.x, loaded.y);
          Split(lower, 2 * half + 1, loaded.z, loaded.w);
        }
      }
    }
  }

  // Returns the fragment a of an MMA.
  __device__ __forceinline__ void Fragment(int part, int half, uint32_t (&a)[4]) const {
    a[0] = words[part][0][2 * half];
    a[1] = words[part][1][2 * half];
    a[2] = words[part][0][2 * half + 1];
    a[3] = words[part][1][2 * half + 1];
  }

 private:
  __device__ __forceinline__ void Set(int part, int lower, uint32_t x, uint32_t y, uint32_t z,
                                      uint32_t w) {
    words[part][lower][0] = x;
    words[part][lower][1] = y;
    words[part][lower][2] = z;
    words[part][lower][3] = w;
  }

  // Each part takes the upper 16 bits of what the parts before it have left. The subtraction is
  // exact.
  __device__ __forceinline__ void Split(int lower, int word, float first, float second) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t low = FloatBits(first) & 0xffff0000u, high = FloatBits(second) & 0xffff0000u;
      words[part][lower][word] = low >> 16 | high;
      first -= BitsFloat(low);
      second -= BitsFloat(high);
    }
  }
};

// The sums of a warp: a fragment for each slab and each eight rows of x, in one or two chains of
// MMAs. An MMA waits for the preceding one on the same fragment, so that a single fragment has two
// chains. The lower parts of float32 weights have their own chain, because each addition to a large
// sum rounds it.
template <int kSlabs, int kEights, bool kParts>
struct WarpSums {
  static constexpr int kChains = kParts || kSlabs * kEights == 1 ? 2 : 1;
  float sums[kChains][kSlabs][kEights][4] = {};

  // Returns the chain of an MMA.
  static constexpr __device__ __forceinline__ int Chain(int part, int half) {
    return kParts ? (part > 0 ? 1 : 0) : kChains == 2 ? half : 0;
  }

  __device__ __forceinline__ float4 Sum(int slab, int eight) const {
    float total[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[i] = sums[0][slab][eight][i];
      if constexpr (kChains == 2) total[i] += sums[1][slab][eight][i];
    }
    return make_float4(total[0], total[1], total[2], total[3]);
  }
};

// sums += W @ x for a team's part of a piece. `weights` is row g of the warp's first slab and
// `rows` is row g of x, both in shared memory. The flips are those of these rows.
template <typename T, typename W, typename F, typename Sums>
__device__ __forceinline__ void MultiplyPiece(const uint8_t* weights, int weight_flip,
                                              const uint8_t* rows, int row_flip, int team,
                                              Sums& warp) {
  constexpr int kWeightRow = F::kPieceK * static_cast<int>(sizeof(W));
  const int q = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < F::kTeamSteps; ++i) {
    const int step = team * F::kTeamSteps + i;
    WeightFragment<W> fragments[F::kWarpSlabs];
#pragma unroll
    for (int slab = 0; slab < F::kWarpSlabs; ++slab) {
      fragments[slab].Load(weights + slab * kSlabRows * kWeightRow, 8 * kWeightRow, step,
                           weight_flip);
    }
#pragma unroll
    for (int eight = 0; eight < F::kMostEights; ++eight) {
      const uint8_t* row = rows + eight * 8 * F::kRowBytes;
      const uint4 x = *reinterpret_cast<const uint4*>(row + ((step * 64 + q * 16) ^ row_flip));
#pragma unroll
      for (int part = 0; part < WeightFragment<W>::kParts; ++part) {
#pragma unroll
        for (int slab = 0; slab < F::kWarpSlabs; ++slab) {
          uint32_t a[4];
          fragments[slab].Fragment(part, 0, a);
          MultiplyAdd<T>(warp.sums[Sums::Chain(part, 0)][slab][eight], a, x.x, x.y);
          fragments[slab].Fragment(part, 1, a);
          MultiplyAdd<T>(warp.sums[Sums::Chain(part, 1)][slab][eight], a, x.z, x.w);
        }
      }
    }
  }
}

// `more` is a copy, so that it is loaded 16 bytes at a time.
__device__ __forceinline__ void Add(float4& total, float4 more) {
  total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
}

// Stores a fragment of sums: two rows of x, `first` and the next one, by two columns.
template <typename Y>
__device__ __forceinline__ void StoreFragment(const FewSizes& p, Y* y, int first, int column,
                                              const float4& sums) {
  Y* at = y + static_cast<int64_t>(first) * p.n + column;
  const bool two = first + 1 < p.rows;
  if (first >= p.rows) return;
  if (column < p.n) {
    at[0] = FromFloat<Y>(sums.x);
    if (two) at[p.n] = FromFloat<Y>(sums.y);
  }
  if (column + 8 < p.n) {
    at[8] = FromFloat<Y>(sums.z);
    if (two) at[p.n + 8] = FromFloat<Y>(sums.w);
  }
}

// Adds the partial sums of the teams and of the blocks of the cluster, and stores them. `partials`
// has a fragment for each team, each eight rows of x, and each slab of the output tile.
template <typename T, typename F, int kEights>
__device__ __forceinline__ void FinishTile(const FewSizes& p, void* y, int rank, int tile,
                                           float4* partials) {
  constexpr int kFragments = kEights * F::kTileSlabs;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int used = (p.rows + 7) / 8 * F::kTileSlabs;
  const auto store = [&](int fragment, const float4& total) {
    const int row = fragment / F::kTileSlabs * 8 + lane % 4 * 2;
    const int column = (tile * F::kTileSlabs + fragment % F::kTileSlabs) * kSlabRows + lane / 4;
    if (p.rounds) {
      StoreFragment(p, static_cast<T*>(y), row, column, total);
    } else {
      StoreFragment(p, static_cast<float*>(y), row, column, total);
    }
  };
#pragma unroll 1
  for (int fragment = warp; fragment < used; fragment += kWarps) {
    float4 total = partials[fragment * 32 + lane];
#pragma unroll
    for (int team = 1; team < F::kTeams; ++team) {
      Add(total, partials[(team * kFragments + fragment) * 32 + lane]);
    }
    if (p.ranks == 1) {
      store(fragment, total);
    } else {
      partials[fragment * 32 + lane] = total;
    }
  }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (p.ranks == 1) return;
  SyncCluster();
  const int ranks = p.ranks;
#pragma unroll 1
  for (int fragment = rank + ranks * warp; fragment < used; fragment += ranks * kWarps) {
    const uint32_t address = SharedAddress(partials + fragment * 32 + lane);
    float4 total = LoadPeer16(address, 0);
#pragma unroll 4
    for (int peer = 1; peer < ranks; ++peer) Add(total, LoadPeer16(address, peer));
    store(fragment, total);
  }
  SyncCluster();  // until then, other blocks may read the shared memory of this one
#endif
}

template <typename T, typename W, int kTile, int kEights>
__global__ void __launch_bounds__(kThreads, kTile == kMedium ? 3
                                            : sizeof(W) == 2 ? 2
                                                             : 1)
    DenseFew(const DenseFewBuffers buffers, const FewSizes p) {
  using F = Form<W, kTile, kEights>;
  NVFP4_DYNAMIC_SHARED(shared);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int team = warp % F::kTeams, group = warp / F::kTeams;
  const int rank = static_cast<int>(blockIdx.x) % p.ranks;
  const int tile = static_cast<int>(blockIdx.x) / p.ranks;
  const int first_piece = rank * p.rank_pieces;
  const int pieces = max(min(p.rank_pieces, (p.k + F::kPieceK - 1) / F::kPieceK - first_piece), 0);
  const int filled = min(p.n - tile * kTile, kTile);  // weight rows of the tile that exist
  const auto* weight =
      static_cast<const W*>(buffers.weight) + static_cast<int64_t>(tile) * kTile * p.k;
#if __CUDA_ARCH__ >= 900
  PrefetchRows(weight, filled, first_piece * F::kPieceK, min(pieces, F::kStages) * F::kPieceK, p.k);
  WaitForPrecedingKernel();
  StartNextKernel();
#endif
  const int stage_bytes = F::kWeightBytes + static_cast<int>(F::RowsKept(p.rows)) * F::kRowBytes;
  const uint32_t ring = SharedAddress(shared);
  const auto bring = [&](int piece) {
    if (piece < pieces) {
      const uint32_t stage = ring + piece % F::kStages * stage_bytes;
      const int first = (first_piece + piece) * F::kPieceK;
      BringPiece<W, F::kPieceK>(weight, kTile, filled, first, p.k, stage);
      BringPiece<T, F::kPieceK>(buffers.x, p.rows, p.rows, first, p.k, stage + F::kWeightBytes);
    }
    CommitCopies();
  };

  // Rows of x past the last one are a copy of it, or what memory holds. No output depends on them.
  const int row = kEights == 1 ? min(lane / 4, p.rows - 1) : lane / 4;
  const int first_row = group * F::kWarpSlabs * kSlabRows + lane / 4;
  WarpSums<F::kWarpSlabs, kEights, (WeightFragment<W>::kParts > 1)> sums;
  // The first rounds only bring pieces.
#pragma unroll 1
  for (int piece = 1 - F::kStages; piece < pieces; ++piece) {
    if (piece >= 0) {
      WaitCopies<F::kStages - 2>();
      __syncthreads();  // all threads have brought this piece, and have used the one before it
    }
    bring(piece + F::kStages - 1);
    if (piece < 0) continue;
    const uint8_t* stage = shared + piece % F::kStages * stage_bytes;
    MultiplyPiece<T, W, F>(stage + first_row * (F::kPieceK * static_cast<int>(sizeof(W))),
                           FlipOf<W>(first_row), stage + F::kWeightBytes + row * F::kRowBytes,
                           FlipOf<T>(row), team, sums);
  }
  __syncthreads();  // the partial sums take the place of the ring
  auto* partials = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
    for (int slab = 0; slab < F::kWarpSlabs; ++slab) {
      const int fragment = (team * kEights + eight) * F::kTileSlabs + group * F::kWarpSlabs + slab;
      partials[fragment * 32 + lane] = sums.Sum(slab, eight);
    }
  }
  __syncthreads();
  FinishTile<T, F, kEights>(p, buffers.y, rank, tile, partials);
}

// The number of fragments for `rows` rows: kEights of the kernel.
int EightsOf(int64_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8; }

// Calls function(form) for the form of the kernel with `tile` weight rows.
template <typename W, typename Function>
auto WithForm(int tile, int64_t rows, const Function& function) {
  const int eights = EightsOf(rows);
  if constexpr (sizeof(W) == 2) {
    if (tile == kMedium && eights == 1) return function(Form<W, kMedium, 1>());
    if (tile == kMedium) return function(Form<W, kMedium, 2>());
    if (tile == kLarge && eights <= 4) return function(Form<W, kLarge, 4>());
    if (tile == kLarge) return function(Form<W, kLarge, 8>());
  }
  if (eights == 1) return function(Form<W, kSmall, 1>());
  if (eights == 2) return function(Form<W, kSmall, 2>());
  if (eights == 4) return function(Form<W, kSmall, 4>());
  return function(Form<W, kSmall, 8>());
}

// Returns the weight rows of an output tile. The smallest tile reads x most often. It is for layers
// whose weights are few, or for so few rows that x costs less than the weights.
int TileOf(const DenseFewCall& call) {
  const int64_t small_tiles = CeilDiv(call.n, kSmall), eights = EightsOf(call.rows);
  const bool few = small_tiles * eights <= int64_t{eights == 1 ? 32 : 2} * MultiprocessorCount();
  if (few || call.weight_type != call.type) return kSmall;
  return eights <= 2 ? kMedium : kLarge;
}

// Returns the blocks of a cluster. For the smallest tile, clusters are as large as possible: all
// blocks run at once, about two on a multiprocessor, and each one has a piece. Larger tiles are
// few. For these, the multiprocessor that has the most pieces is done first. The beginning and the
// end of a block cost about as much as a piece.
int32_t RanksOf(int tile, int64_t tiles, int64_t pieces) {
  const int64_t multiprocessors = MultiprocessorCount();
  int32_t best = 1;
  for (int32_t ranks = 2; ranks <= kMaxRanks && tile == kSmall; ranks *= 2) {
    if (tiles * ranks <= 2 * multiprocessors && pieces >= ranks) best = ranks;
  }
  const auto cost = [&](int64_t ranks) {
    return CeilDiv(tiles * ranks, multiprocessors) * (CeilDiv(pieces, ranks) + 1);
  };
  for (int32_t ranks = 2; ranks <= kMaxRanks && tile != kSmall; ++ranks) {
    if (cost(ranks) < cost(best)) best = ranks;
  }
  return best;
}

template <typename F>
DenseFewCut CutOf(const DenseFewCall& call, bool clusters) {
  const int64_t tiles = CeilDiv(call.n, F::kTileRows), pieces = CeilDiv(call.k, F::kPieceK);
  const int32_t ranks = clusters ? RanksOf(F::kTileRows, tiles, pieces) : 1;
  const int64_t rank_pieces = CeilDiv(pieces, ranks);
  const int64_t stages = std::min<int64_t>(rank_pieces, F::kStages);
  const int64_t bytes = std::max<int64_t>(
      stages * (F::kWeightBytes + F::RowsKept(call.rows) * F::kRowBytes), F::kPartialBytes);
  return {F::kTileRows, ranks, static_cast<int32_t>(rank_pieces), static_cast<int32_t>(bytes)};
}

template <typename T, typename W>
cudaError_t LaunchTyped(cudaStream_t stream, const DenseFewCall& call,
                        const DenseFewBuffers& buffers, const DenseFewCut& cut) {
  const FewSizes sizes = {static_cast<int32_t>(call.rows),
                          static_cast<int32_t>(call.n),
                          static_cast<int32_t>(call.k),
                          cut.ranks,
                          cut.rank_pieces,
                          call.output_type != DataType::kF32};
  const dim3 grid(static_cast<unsigned>(CeilDiv(call.n, cut.tile) * cut.ranks));
  return WithForm<W>(cut.tile, call.rows, [&](auto form) {
    using F = decltype(form);
    return LaunchClusters(stream, grid, cut.ranks, kThreads, cut.shared_bytes,
                          /*overlaps=*/true, DenseFew<T, W, F::kTileRows, F::kMostEights>, buffers,
                          sizes);
  });
}

}  // namespace

DenseFewCut CutDenseFew(const DenseFewCall& call, bool clusters) {
  const auto cut = [&](auto form) { return CutOf<decltype(form)>(call, clusters); };
  return call.weight_type == call.type ? WithForm<uint16_t>(TileOf(call), call.rows, cut)
                                       : WithForm<float>(kSmall, call.rows, cut);
}

cudaError_t LaunchDenseCut(cudaStream_t stream, const DenseFewCall& call,
                           const DenseFewBuffers& buffers, const DenseFewCut& cut) {
  if (call.weight_type == DataType::kF32) {
    return LaunchTyped<__nv_bfloat16, float>(stream, call, buffers, cut);
  }
  return call.type == DataType::kF16
             ? LaunchTyped<__half, uint16_t>(stream, call, buffers, cut)
             : LaunchTyped<__nv_bfloat16, uint16_t>(stream, call, buffers, cut);
}

cudaError_t LaunchDenseFew(cudaStream_t stream, const DenseFewCall& call,
                           const DenseFewBuffers& buffers) {
  if (call.rows == 0 || call.n == 0) return cudaSuccess;
  const bool clusters = MayOverlap(DenseFew<__half, uint16_t, kSmall, 1>);
  return LaunchDenseCut(stream, call, buffers, CutDenseFew(call, clusters));
}

}  // namespace nvfp4
