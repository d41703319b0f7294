// The grouped product on Hopper: out[r] = act(W[e(r)] @ x[r]), bf16 and f16; see expert_gemm.cuh.
//
// The weights are the register operand of wgmma and the sorted rows its N, so that a tile of rows
// is padded to 8 and not to 64. Bound by: reading weights up to about 50 rows of an expert, tensor
// cores above; unpacking costs about 1.2 logic operations a weight and hides behind either.
//
// A block of threads is kGroups consumer warpgroups and one producer warpgroup. A step is 64 of k:
//   producer warp 0   weight tiles by bulk copies, 2304 bytes each, as many as the block has
//   producer warps 2, 3   rows of x by 16-byte cp.async into the 128-byte swizzle, zeros for what
//                     is past the tile's rows or past k
//   consumers         unpack a tile to fragments while the products of the one before run
// kStages steps are in flight. A block works on an equal part of the line of steps (routing.cuh)
// and hands over or collects sums at its ends (partial_sums.cuh).
//
// The kernel may start while the one before it ends: what it reads first, the plan and the
// weights, is older than that (see moe.cu).
//
// Needs: sm_90a. Test: test_cuda_kernel.py, test_sass.py.
#include <algorithm>

#include "epilogue.cuh"
#include "expert_gemm.cuh"
#include "launch_kernel.cuh"
#include "partial_sums.cuh"
#include "sm90.cuh"

namespace nvfp4 {
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGatherThreads = 64;
constexpr int kRowBytes = 2 * kTileK;  // of a row of x in a step
constexpr int kTileBytes = kTileCodeBytes + kTileScaleBytes;

// kRows: most rows of a tile; a tile runs the products of its rows rounded up to kRowStep.
// kTiles: weight tiles of a consumer warpgroup.
template <int kRows_, int kTiles_, int kGroups_, int kStages_, int kBlocksPerSm_>
struct Config {
  static constexpr int kRows = kRows_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kRowStep = kRows <= 32 ? 8 : kRows / 4;
  static constexpr int kBlockTiles = kTiles * kGroups;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  // Of a thread, where one block has the multiprocessor to itself.
  enum { kConsumerRegisters = kGroups == 2 ? 232 : 112, kProducerRegisters = 40 };
  static constexpr int kRowsBytes = kRows * kRowBytes;
  static constexpr int kWeightBytes = kBlockTiles * kTileBytes;
  static constexpr int kAlignment = 1024;  // of the swizzle
  static constexpr int kSharedBytes = kStages * (kRowsBytes + kWeightBytes) + kAlignment;
  static_assert(kBlocksPerSm * (kSharedBytes + 1024 + 256) <= 228 * 1024, "shared memory of an SM");
};

struct Shared {
  uint32_t rows;     // [kStages][kRows][128 bytes]
  uint32_t weights;  // [kStages][kBlockTiles][codes, scales]
  uint32_t full;     // [kStages] mbarriers
  uint32_t empty;
};

// Position in the ring of stages.
template <typename C>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Next() {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The part of the line of steps that a block works on, cut where a sum over k begins.
struct Piece {
  RowTile tile;
  int32_t tile_index;
  int32_t m_block;
  int32_t begin;  // steps of k
  int32_t end;
};

// Walks over the pieces from `start` to `stop`.
struct Pieces {
  const ExpertGemm& p;
  Start at;
  const Start stop;
  Piece piece;

  __device__ __forceinline__ Pieces(const ExpertGemm& gemm, Start start, Start end)
      : p(gemm), at(start), stop(end) {
    piece.tile_index = -1;
  }

  // Moves on to the next piece; false after the last.
  __device__ __forceinline__ bool Next() {
    const int32_t k_tiles = p.walk.k_tiles;
    if (at.step == p.walk.m_blocks * k_tiles) at = {at.tile + 1, 0};
    if (at.tile > stop.tile || (at.tile == stop.tile && at.step >= stop.step)) return false;
    if (piece.tile_index != at.tile) piece.tile = p.rows.tiles[at.tile];
    piece.tile_index = at.tile;
    piece.m_block = at.step / k_tiles;
    piece.begin = at.step - piece.m_block * k_tiles;
    const int32_t left = at.tile == stop.tile ? stop.step - piece.m_block * k_tiles : k_tiles;
    piece.end = min(k_tiles, left);
    at.step += piece.end - piece.begin;
    return true;
  }
};

template <typename C>
__device__ __forceinline__ void ProduceWeights(const ExpertGemm& p, const Shared& shared,
                                               Start start, Start stop) {
  Ring<C> ring;
  const int32_t m_tiles = p.m_tiles(), k_tiles = p.walk.k_tiles;
  Pieces pieces(p, start, stop);
  while (pieces.Next()) {
    const Piece& piece = pieces.piece;
    const int32_t first = piece.m_block * C::kBlockTiles;
    const int32_t count = min(C::kBlockTiles, m_tiles - first);
    const int64_t tile =
        (static_cast<int64_t>(piece.tile.expert) * m_tiles + first) * k_tiles + piece.begin;
    const uint8_t* codes = p.weight.packed + tile * kTileCodeBytes;
    const uint8_t* scales = p.weight.block_scale + tile * kTileScaleBytes;
    for (int32_t step = piece.begin; step < piece.end; ++step) {
      const uint32_t full = shared.full + 8 * ring.stage;
      WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
      ArriveExpect(full, count * kTileBytes);
      uint32_t target = shared.weights + ring.stage * C::kWeightBytes;
      for (int t = 0; t < count; ++t) {
        const int64_t offset = static_cast<int64_t>(t) * k_tiles;
        BulkCopy(target, codes + offset * kTileCodeBytes, kTileCodeBytes, full);
        BulkCopy(target + kTileCodeBytes, scales + offset * kTileScaleBytes, kTileScaleBytes, full);
        target += kTileBytes;
      }
      codes += kTileCodeBytes;
      scales += kTileScaleBytes;
      ring.Next();
    }
  }
}

// Thread `thread` of 64 brings 16 bytes, chunk thread % 8, of rows thread / 8 + 8 i.
template <typename C>
__device__ __forceinline__ void ProduceRows(const ExpertGemm& p, const Shared& shared, Start start,
                                            Start stop, int thread) {
  constexpr int kCopies = C::kRows * 8 / kGatherThreads;
  Ring<C> ring;
  const int chunk = thread % 8;
  const uint32_t place = thread / 8 * kRowBytes + ((chunk ^ (thread / 8)) << 4);
  const uint4* values = static_cast<const uint4*>(p.left.values);
  Pieces pieces(p, start, stop);
  while (pieces.Next()) {
    const Piece& piece = pieces.piece;
    uint32_t source[kCopies];  // in units of 16 bytes; see kMaxSm90Extent
    uint32_t inside = 0;       // bit i: row i is one of the tile's
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = thread / 8 + 8 * i;
      source[i] = 0;
      if (row >= piece.tile.rows) continue;
      int32_t index = piece.tile.row + row;
      if (p.left.slots != nullptr) index = p.left.slots[index] / p.left.slots_per_row;
      source[i] = static_cast<uint32_t>(index) * static_cast<uint32_t>(p.k / 8) + chunk;
      inside |= 1u << i;
    }
    const int32_t rows = (piece.tile.rows + C::kRowStep - 1) / C::kRowStep * C::kRowStep;
    for (int32_t step = piece.begin; step < piece.end; ++step) {
      WaitBarrier(shared.empty + 8 * ring.stage, ring.phase ^ 1);
      const uint32_t target = shared.rows + ring.stage * C::kRowsBytes + place;
      const int32_t k = step * kTileK;
      const bool in_k = k + chunk * 8 < p.k;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (8 * i >= rows) break;
        const bool copied = in_k && (inside >> i & 1);
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target + 8 * i * kRowBytes),
            "l"(values + (copied ? source[i] + k / 8 : 0u)), "r"(copied ? 16 : 0)
            : "memory");
      }
      ArriveAfterCopies(shared.full + 8 * ring.stage);
      ring.Next();
    }
  }
}

template <typename T, typename C>
struct Consumer {
  const ExpertGemm& p;
  const Shared& shared;
  const TileConstants constants;
  const int group, thread;  // warpgroup, and thread of it
  Ring<C> ring;
  float sums[C::kTiles][C::kRows / 2];

  __device__ __forceinline__ void AwaitStage() {
    WaitBarrier(shared.full + 8 * ring.stage, ring.phase);
    FenceAsyncProxy();
  }

  __device__ __forceinline__ void Unpack(int tile, uint32_t (&fragments)[4][4]) {
    const uint32_t address =
        shared.weights + ring.stage * C::kWeightBytes + (group * C::kTiles + tile) * kTileBytes;
    uint4 codes;
    uint2 scales;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                 : "r"(address + thread * 16));
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(scales.x), "=r"(scales.y)
                 : "r"(address + kTileCodeBytes + thread / 4 * 8));
    UnpackTile<T>(codes, scales, constants, fragments);
  }

  template <int kColumns>
  __device__ __forceinline__ void Multiply(int stage, float (&tile_sums)[C::kRows / 2],
                                           const uint32_t (&fragments)[4][4]) {
    const uint64_t rows = TileDescriptor(shared.rows + stage * C::kRowsBytes);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < 4; ++j) Wgmma<T, kColumns>::Run(tile_sums, fragments[j], rows + 2 * j);
    WgmmaCommit();
  }

  __device__ __forceinline__ void Release(int stage) {
    if (thread % 32 == 0) Arrive(shared.empty + 8 * stage);
  }

  // sums += W @ x over `steps` stages. Two sets of fragments take turns, so that the products of
  // one run while the other is unpacked; each has a name, since an index would move it to memory.
  template <int kColumns>
  __device__ __forceinline__ void Accumulate(int steps) {
    uint32_t even[4][4], odd[4][4];
    int before = -1;  // stage that the products still in flight read
    AwaitStage();
    Unpack(0, even);
    if constexpr (C::kTiles == 2) {
      do {
        const int stage = ring.stage;
        Multiply<kColumns>(stage, sums[0], even);
        WgmmaWait<1>();
        if (before >= 0) Release(before);
        before = stage;
        Unpack(1, odd);
        Multiply<kColumns>(stage, sums[C::kTiles - 1], odd);
        ring.Next();
        if (--steps > 0) {
          AwaitStage();
          WgmmaWait<1>();
          Unpack(0, even);
        }
      } while (steps > 0);
    } else {
      do {
        Turn<kColumns>(steps, before, even, odd);
        if (steps == 0) break;
        Turn<kColumns>(steps, before, odd, even);
      } while (steps > 0);
    }
    WgmmaWait<0>();
    Release(before);
  }

  // One step with `now`, while `next` is unpacked.
  template <int kColumns>
  __device__ __forceinline__ void Turn(int& steps, int& before, const uint32_t (&now)[4][4],
                                       uint32_t (&next)[4][4]) {
    const int stage = ring.stage;
    Multiply<kColumns>(stage, sums[0], now);
    WgmmaWait<1>();
    if (before >= 0) Release(before);
    before = stage;
    ring.Next();
    if (--steps > 0) {
      AwaitStage();
      Unpack(0, next);
    }
  }

  __device__ __forceinline__ void AccumulateRows(int rows, int steps) {
    constexpr int kStep = C::kRowStep;
    if (rows <= kStep) {
      Accumulate<kStep>(steps);
    } else if (C::kRows == 2 * kStep || rows <= 2 * kStep) {
      Accumulate<2 * kStep>(steps);
    } else if constexpr (C::kRows > 2 * kStep) {
      if (rows <= 3 * kStep) {
        Accumulate<3 * kStep>(steps);
      } else {
        Accumulate<4 * kStep>(steps);
      }
    }
  }

  __device__ __forceinline__ float* Share(int block, int tile) {
    return p.partial_sums +
           ((static_cast<int64_t>(block) * C::kGroups + group) * C::kTiles + tile) *
               (kGroupThreads * C::kRows / 2);
  }
  __device__ __forceinline__ int32_t* Flag(int block) {
    return p.walk.ready + block * kReadyFlags + group;
  }

  // Adds the later shares of a sum whose first steps this block has done.
  __device__ __forceinline__ void Collect(const Piece& piece) {
    const int32_t end = (piece.m_block + 1) * p.walk.k_tiles;
    for (int other = static_cast<int>(blockIdx.x) + 1; other < p.walk.blocks; ++other) {
      const Start start = p.walk.starts[other], stop = p.walk.starts[other + 1];
      if (start.tile != piece.tile_index || start.step >= end) break;
      if (start.tile == stop.tile && start.step == stop.step) continue;
      AwaitFlag(Flag(other), group + 1, thread, kGroupThreads);
#pragma unroll
      for (int t = 0; t < C::kTiles; ++t) AddShare(Share(other, t), thread, kGroupThreads, sums[t]);
    }
  }

  __device__ __forceinline__ void Run(Start start, Start stop) {
    Pieces pieces(p, start, stop);
    while (pieces.Next()) {
      const Piece& piece = pieces.piece;
#pragma unroll
      for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < C::kRows / 2; ++i) sums[t][i] = 0.0f;
      }
      AccumulateRows(piece.tile.rows, piece.end - piece.begin);
      if (piece.begin > 0) {
#pragma unroll
        for (int t = 0; t < C::kTiles; ++t) {
          StoreShare(Share(static_cast<int>(blockIdx.x), t), thread, kGroupThreads, sums[t]);
        }
        RaiseFlag(Flag(static_cast<int>(blockIdx.x)), group + 1, thread, kGroupThreads);
        continue;
      }
      if (piece.end < p.walk.k_tiles) Collect(piece);
      const int m_tile = piece.m_block * C::kBlockTiles + group * C::kTiles;
#pragma unroll
      for (int t = 0; t < C::kTiles; ++t) {
        StoreTile<C::kRows>(p, piece.tile, m_tile + t, thread / 32, kProductUnit<T>, sums[t]);
      }
    }
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    ExpertGemmSm90(const __grid_constant__ ExpertGemm p) {
  extern __shared__ uint8_t dynamic[];
  __shared__ __align__(8) uint64_t barriers[2 * C::kStages];
  Shared shared;
  shared.rows = (SharedAddress(dynamic) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  shared.weights = shared.rows + C::kStages * C::kRowsBytes;
  shared.full = SharedAddress(barriers);
  shared.empty = shared.full + 8 * C::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::kStages; ++stage) {
      InitBarrier(shared.full + 8 * stage, kGatherThreads + 1);
      InitBarrier(shared.empty + 8 * stage, C::kGroups * (kGroupThreads / 32));
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (!p.plan_is_older) WaitForPrecedingKernel();
  const Start start = p.walk.starts[blockIdx.x], stop = p.walk.starts[blockIdx.x + 1];

  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  if (group == C::kGroups) {
    if constexpr (C::kBlocksPerSm == 1) ShrinkRegisters<C::kProducerRegisters>();
    if (thread == 0) {
      ProduceWeights<C>(p, shared, start, stop);
    } else if (thread >= kGroupThreads - kGatherThreads) {
      WaitForPrecedingKernel();
      if (thread == kGroupThreads - 1) StartNextKernel();
      ProduceRows<C>(p, shared, start, stop, thread - (kGroupThreads - kGatherThreads));
    }
  } else {
    if constexpr (C::kBlocksPerSm == 1) GrowRegisters<C::kConsumerRegisters>();
    Consumer<T, C> consumer{p, shared, MakeTileConstants<T>(), group, thread, {}, {}};
    consumer.Run(start, stop);
  }
}

// rows, tiles, groups, stages, blocks of an SM
using Rows16 = Config<16, 1, 2, 15, 2>;
using Rows32 = Config<32, 1, 2, 12, 2>;
using Rows64 = Config<64, 1, 4, 12, 1>;
using Rows128 = Config<128, 2, 2, 8, 1>;

struct Variant {
  int64_t max_mean_rows;  // of an expert, up to which this is the one
  int32_t rows, min_cost, block_tiles, blocks_per_sm;
  cudaError_t (*launch)(cudaStream_t stream, DataType type, const ExpertGemm& gemm);
};

template <typename T, typename C>
cudaError_t LaunchConfig(cudaStream_t stream, const ExpertGemm& gemm) {
  return LaunchWide(stream, dim3(static_cast<unsigned>(gemm.walk.blocks)), C::kThreads,
                    C::kSharedBytes, /*overlaps=*/true, ExpertGemmSm90<T, C>, gemm);
}

template <typename C>
cudaError_t LaunchVariant(cudaStream_t stream, DataType type, const ExpertGemm& gemm) {
  return type == DataType::kF16 ? LaunchConfig<__half, C>(stream, gemm)
                                : LaunchConfig<__nv_bfloat16, C>(stream, gemm);
}

template <typename C>
constexpr Variant MakeVariant(int64_t max_mean_rows) {
  static_assert(int64_t{C::kBlocksPerSm} * 132 * C::kGroups * kGroupThreads * C::kTiles *
                        (C::kRows / 2) * 4 <=
                    kPartialSumBytes,
                "the workspace holds a share of each block");
  return {max_mean_rows,  C::kRows,        C::kRows >= 64 ? 64 : 32,
          C::kBlockTiles, C::kBlocksPerSm, LaunchVariant<C>};
}

constexpr Variant kVariants[] = {
    MakeVariant<Rows16>(5),
    MakeVariant<Rows32>(18),
    MakeVariant<Rows64>(40),
    MakeVariant<Rows128>(INT64_MAX),
};

const Variant& ChooseVariant(int64_t rows, int64_t experts) {
  const int64_t mean = rows / std::max<int64_t>(experts, 1);
  for (const Variant& variant : kVariants) {
    if (mean <= variant.max_mean_rows) return variant;
  }
  return kVariants[std::size(kVariants) - 1];
}

GemmPlan PlanSm90(int64_t rows, int64_t experts) {
  const Variant& variant = ChooseVariant(rows, experts);
  return {{variant.rows, variant.min_cost},
          variant.block_tiles,
          std::min(MultiprocessorCount(), 132) * variant.blocks_per_sm};
}

cudaError_t LaunchSm90(cudaStream_t stream, const ExpertGemm& gemm) {
  for (const Variant& variant : kVariants) {
    if (variant.rows == gemm.rule.tile_rows) return variant.launch(stream, gemm.type, gemm);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

const Engine kEngineSm90 = {PlanSm90, LaunchSm90, true};

}  // namespace nvfp4
