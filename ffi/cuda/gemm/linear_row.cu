// Computes y = W @ x * global_scale + bias for one row x, in bf16 and f16. It is a linear layer in
// W4A16.
//
// A block has one, two or three slabs of 16 outputs: as many as it takes to give each
// multiprocessor one block. All blocks then find room beside the kernel before them, and request
// their weights while it still runs. The warps of a block form teams, which divide the k of its
// slabs. A warp has kDepth weight tiles in flight in shared memory, and has unpacked the first ones
// when x arrives. Partial sums are added in the order of the teams.
//
// x may be the result of a norm that the kernel computes, too: each block normalizes the row for
// itself, and the first one writes it.
//
// With blocks of eight warps for a slab each, as linear_few.cu has them, a layer with 5120 outputs
// had 320 blocks. On an H200, GEMM 2 of an expert layer left room for 140 of them. The others
// started 2 us after the first ones.
//
// Bottleneck: latency of memory, then unpacking.
//
// Needs: sm_80. Tests: tests/gpu/test_linear_few.py, tests/emulation/test_linear_few.py.
#include "cuda/gemm/linear_row.cuh"

#include <algorithm>
#include <type_traits>

#include "cuda/epilogues/direct_store.cuh"
#include "cuda/gemm/add_sums.cuh"
#include "cuda/gemm/few_slots.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/norm_pieces.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = kLinearRowWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kMaxSlabs = 3;
constexpr int kDepth = kLinearRowDepth;  // weight tiles of a warp in flight
constexpr int kNormPieces = 2;
constexpr int kRingBytes = PartRing<kDepth, true>::kBytes;  // of a warp

struct RowSizes {
  int32_t slabs, teams;
  bool starts_next;
};

// Writes zeros behind the k values of the row, up to the end of its last weight tile.
__device__ __forceinline__ void PadRow(int k, uint8_t* row) {
  const int chunk = k / 8 + static_cast<int>(threadIdx.x);
  if (chunk < KTiles(k) * (kTileK / 8)) {
    reinterpret_cast<uint4*>(row)[chunk] = make_uint4(0, 0, 0, 0);
  }
}

// Prefetches `tiles` parts from `source` on into the L2 cache, up to kDepth. Four lanes name the
// lines of a part.
__device__ __forceinline__ void PrefetchParts(const PartSource& source, int tiles) {
  const int lane = static_cast<int>(threadIdx.x % 32), count = min(tiles, kDepth);
  const uint8_t* codes = source.codes - lane * 16;
  const uint8_t* scales = source.scales - lane * 16;
  if (lane / 4 < count) {
    PrefetchLine(codes + lane / 4 * int64_t{kTileCodeBytes} + lane % 4 * 128);
  }
  if (lane < count) PrefetchLine(scales + lane * int64_t{kTileScaleBytes});
}

// N: the type of the weight of the norm of x. kRefills: whether a warp has more than kDepth weight
// tiles.
template <typename T, typename N, bool kRefills>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    LinearRow(const __grid_constant__ ExpertGemm p, const InputNormRow norm, const RowSizes sizes,
              const TileConstants constants) {
  // Weight tiles of a warp that are unpacked before x arrives.
  constexpr bool kMuch = std::is_same_v<N, float> || (kRefills && !std::is_same_v<N, NoNorm>);
  constexpr int kReady = kMuch ? 1 : 2;  // two would spill registers beside some norms
  NVFP4_DYNAMIC_SHARED(shared);          // the rings of all warps, then x
  __shared__ float4 partials[kThreads];
  __shared__ float groups[kNormPieces * kWarps];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int team = warp / sizes.slabs, own = warp - team * sizes.slabs;
  const int slab = static_cast<int>(blockIdx.x) * sizes.slabs + own;
  const int m_tile = slab / kParts, part = slab % kParts, k_tiles = KTiles(p.k);
  const bool exists = team < sizes.teams && slab * kSlab < p.columns;
  const int begin = exists ? team * k_tiles / sizes.teams : 0;
  const int end = exists ? (team + 1) * k_tiles / sizes.teams : 0;
  if (sizes.starts_next) StartNextKernel();

  PartSource source(p.weight, static_cast<int64_t>(exists ? m_tile : 0) * k_tiles + begin, part);
  if (!p.schedule_is_unchanged) {
    PrefetchParts(source, end - begin);
    WaitForPrecedingKernel();
  }
  int requested = begin;
  const auto request = [&](uint8_t* place) {
    if constexpr (kRefills) {
      if (requested < end) source.Request(0, place);
      source.Advance();
    } else if (requested < end) {
      source.Request(requested - begin, place);
    }
    ++requested;
  };
  PartRing<kDepth, kRefills> ring(shared + warp * kRingBytes);
  ring.Fill(request);
  if constexpr (!std::is_same_v<N, NoNorm>) {
    PrefetchLines(norm.buffers.weight, p.k * static_cast<int>(sizeof(N)), threadIdx.x, kThreads);
  }
  LaneRows lane_rows = {};
  if (team == 0 && exists) lane_rows = LoadLaneRows(p, 0, m_tile, part);
  uint32_t ready[kReady][2][2][4];
#pragma unroll
  for (int d = 0; d < kReady; ++d) {
    const Packed packed = ring.Take(request);
    UnpackPair<T>(packed.codes.x, packed.codes.y, packed.scales.x, constants, ready[d][0][0],
                  ready[d][0][1]);
    UnpackPair<T>(packed.codes.z, packed.codes.w, packed.scales.y, constants, ready[d][1][0],
                  ready[d][1][1]);
    // They are computed here, even though they are used much later.
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(ready[d][i / 8][i / 4 % 2][i % 4]));
  }
  if (p.schedule_is_unchanged) WaitForPrecedingKernel();
  StartNextKernel();
  uint8_t* const row = shared + kWarps * kRingBytes;
  if constexpr (std::is_same_v<N, NoNorm>) {
    BringRows<false>(p, 1, 0, 1, static_cast<int>(threadIdx.x), kThreads, row,
                     [](int) { return 0; });
    WaitCopies<0>();
  } else {
    NormPieces<T, N, kNormPieces> pieces(p.k, static_cast<int>(threadIdx.x), kThreads);
    LoadInput(norm, pieces);
    PadRow(p.k, row);
    FinishNorm(norm, blockIdx.x == 0, groups, row, pieces);
  }
  __syncthreads();

  const uint8_t* b = row + lane / 8 * 16 + begin * (kTileK * 2);
  float halves[2][4] = {};
#pragma unroll
  for (int d = 0; d < kReady; ++d) {
    if (begin + d < end) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4];
        LoadMatrices(b + 64 * half, x);
        MultiplyAdd<T>(halves[half], ready[d][half][0], x[0], x[1]);
        MultiplyAdd<T>(halves[half], ready[d][half][1], x[2], x[3]);
      }
    }
    b += kTileK * 2;
  }
#pragma unroll 1
  for (int k_tile = begin + kReady; k_tile < end; ++k_tile, b += kTileK * 2) {
    const Packed packed = ring.Take(request);
    MultiplyTile<T>(packed, b, constants, halves);
  }
  float4 total = make_float4(halves[0][0] + halves[1][0], halves[0][1] + halves[1][1],
                             halves[0][2] + halves[1][2], halves[0][3] + halves[1][3]);
  partials[threadIdx.x] = total;
  __syncthreads();
  if (team != 0 || !exists) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {  // all loads are in flight together
    if (other < sizes.teams) Add(total, partials[(other * sizes.slabs + own) * 32 + lane]);
  }
  const RowTile tile = {0, 0, 1};
  const TileStore<T> store = MakeTileStore<T>(p, tile, lane_rows, m_tile, part);
  StoreRows(store, 0, 0,
            store.template Finished<Finish::kPlain>(0, total.x, total.y, total.z, total.w));
}

template <typename T, typename N>
cudaError_t LaunchTyped(cudaStream_t stream, const ExpertGemm& gemm, const InputNorm* norm,
                        bool starts_next) {
  const LinearRowCut cut = CutLinearRow(gemm.columns, gemm.k);
  const dim3 grid(static_cast<unsigned>(CeilDiv(gemm.columns, kSlab * cut.slabs)));
  const auto kernel =
      KTiles(gemm.k) > kDepth * cut.teams ? LinearRow<T, N, true> : LinearRow<T, N, false>;
  return LaunchWide(stream, grid, kThreads, cut.shared_bytes, /*overlaps=*/true, kernel, gemm,
                    norm == nullptr ? InputNormRow{} : RowOf(*norm),
                    RowSizes{cut.slabs, cut.teams, starts_next}, MakeTileConstants<T>());
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const ExpertGemm& gemm, const InputNorm* norm,
                     bool starts_next) {
  if (norm == nullptr) return LaunchTyped<T, NoNorm>(stream, gemm, nullptr, starts_next);
  return norm->call.weight_type == DataType::kF32
             ? LaunchTyped<T, float>(stream, gemm, norm, starts_next)
             : LaunchTyped<T, T>(stream, gemm, norm, starts_next);
}

}  // namespace

LinearRowCut CutLinearRow(int64_t n, int64_t k) {
  const int64_t wanted = CeilDiv(CeilDiv(n, kSlab), MultiprocessorCount());
  const int64_t slabs = std::clamp<int64_t>(wanted, 1, kMaxSlabs);
  static_assert(kWarps * kRingBytes == LinearRowDynamicBytes(0), "forms.h counts the memory");
  return {static_cast<int32_t>(slabs), static_cast<int32_t>(kWarps / slabs),
          static_cast<int32_t>(std::min<int64_t>(LinearRowDynamicBytes(k), INT32_MAX))};
}

cudaError_t LaunchLinearRow(cudaStream_t stream, const ExpertGemm& gemm, const InputNorm* norm,
                            bool starts_next) {
  return gemm.type == DataType::kF16 ? LaunchOf<__half>(stream, gemm, norm, starts_next)
                                     : LaunchOf<__nv_bfloat16>(stream, gemm, norm, starts_next);
}

}  // namespace nvfp4
