// Computes out[r] = act(W[expert] @ x[r]) for the rows of at most kFewSlots slots, in bf16 and f16,
// without sorting them first: GEMM 1 of a layer. expert_gemm.cuh has the whole equation.
//
//   expert_ids [slots] -> the plan, in shared memory of each block
//
// A block owns a slab of 16 weight rows of one expert, by at most 8 of its slots, over all of k.
// Its four warps have a quarter of k each. A warp has kDepth parts of its slab in flight: with k =
// 2048, all that it needs. Slabs are small, so that every multiprocessor has about the same number:
// one token of Qwen3-30B-A3B has 768. The sums of the warps are added in the order of the warps.
//
// The rows of x of the block are in shared memory. In W4A4, the block rounds them to NVFP4 there,
// under the scale of its expert.
//
// As soon as its own weights are in flight, the kernel prefetches those of GEMM 2 into the L2
// cache. GEMM 2 (combined_gemm_few.cu) may start before this kernel ends. The kernel itself may
// start before the preceding one ends, but cannot do much: that one may have chosen the experts.
//
// Bottleneck: latency of memory, then reading weights.
//
// Needs: sm_80. Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py.
#include "cuda/epilogues/direct_store.cuh"
#include "cuda/gemm/few_slots.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 6;
constexpr int kDepth = 8;  // parts of a warp in flight
constexpr int kRingBytes = kWarps * PartRing<kDepth>::kBytes;

// Prefetches the weights of the next GEMM. Blocks share the work: this is block `block` of
// `blocks`.
__device__ __forceinline__ void PrefetchNext(const FewSlots& few, const Plan& plan, int block,
                                             int blocks) {
#if __CUDA_ARCH__ >= 900
  const int m_tiles = few.next_m_tiles, k_tiles = few.next_k_tiles;
  for (int i = block; i < plan.num_tiles * m_tiles; i += blocks) {
    const int64_t before =
        (static_cast<int64_t>(plan.tiles[i / m_tiles].expert) * m_tiles + i % m_tiles) * k_tiles;
    PrefetchL2(few.next.packed + before * kTileCodeBytes, k_tiles * kTileCodeBytes);
    PrefetchL2(few.next.block_scale + before * kTileScaleBytes, k_tiles * kTileScaleBytes);
  }
#endif
}

// How a block keeps the rows of x of its tile: by token if there are few tokens, because the slots
// of a token share its row. Otherwise each column of the tile has a row.
struct TileRows {
  const Plan& plan;
  const RowTile tile;
  int slots_per_row;
  bool by_token;

  __device__ __forceinline__ TileRows(const ExpertGemm& p, const FewSlots& few, const Plan& made,
                                      const RowTile& of)
      : plan(made),
        tile(of),
        slots_per_row(p.left.slots_per_row),
        by_token(few.num_slots <= kRows * slots_per_row) {}

  __device__ __forceinline__ int Token(int column) const {
    return plan.slots[tile.row + column] / slots_per_row;
  }
  // The row of a column.
  __device__ __forceinline__ int Row(int column) const { return by_token ? Token(column) : column; }
  // The token of a row.
  __device__ __forceinline__ int Source(int row) const { return by_token ? row : Token(row); }
  // A bit for each row.
  __device__ __forceinline__ uint32_t Mask() const {
    uint32_t mask = 0;
    for (int column = 0; column < tile.rows; ++column) mask |= 1u << Row(column);
    return mask;
  }
};

template <typename T>
__device__ __forceinline__ OutputPairs FinishTile(const TileStore<T>& store,
                                                  const float (&sums)[4]) {
  switch (ChooseFinish(store.p)) {
    case Finish::kPlain:
      return store.template Finished<Finish::kPlain>(0, sums[0], sums[1], sums[2], sums[3]);
    case Finish::kSilu:
      return store.template Finished<Finish::kSilu>(0, sums[0], sums[1], sums[2], sums[3]);
    default:
      return store.template Finished<Finish::kAny>(0, sums[0], sums[1], sums[2], sums[3]);
  }
}

template <typename T, bool kRounds>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    ExpertGemmFew(const __grid_constant__ ExpertGemm p, const __grid_constant__ FewSlots few,
                  const TileConstants constants) {
  NVFP4_DYNAMIC_SHARED(shared);
  __shared__ Plan plan;
  __shared__ float4 partials[kThreads - 32];
  WaitForPrecedingKernel();
  StartNextKernel();
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  if (warp == 0) MakePlan(few.expert_ids, few.num_slots, few.num_experts, &plan);
  __syncthreads();
  const int slabs = p.m_tiles() * kParts, k_tiles = KTiles(p.k);
  const int index = static_cast<int>(blockIdx.x) / slabs;
  if (index >= plan.num_tiles) return;
  const RowTile tile = plan.tiles[index];
  const int m_tile = static_cast<int>(blockIdx.x) % slabs / kParts;
  const int part = static_cast<int>(blockIdx.x) % kParts;

  const int begin = warp * k_tiles / kWarps, end = (warp + 1) * k_tiles / kWarps;
  const int64_t first = (static_cast<int64_t>(tile.expert) * p.m_tiles() + m_tile) * k_tiles;
  int requested = begin;
  const auto request = [&](uint32_t target) {
    if (requested < end) RequestPart(p.weight, first + requested++, part, target);
  };
  PartRing<kDepth> ring = {shared + warp * PartRing<kDepth>::kBytes};
  const TileRows tile_rows(p, few, plan, tile);
  uint8_t* rows = shared + kRingBytes;
  // The rows are in the group of part 0, so that part 0 does not wait for the code that finds them.
  request(SharedAddress(ring.places));
  BringRows(p, tile_rows.Mask(), 0, 1, thread, kThreads, rows,
            [&](int row) { return tile_rows.Source(row); });
  ring.Fill(request, 1);
  if (thread == 0) {
    PrefetchNext(few, plan, static_cast<int>(blockIdx.x), plan.num_tiles * slabs);
  }
  LaneRows lane_rows = {};
  if (warp == 0) lane_rows = LoadLaneRows(p, tile.expert, m_tile, part);
  WaitCopies<kDepth - 1>();  // for the rows
  __syncthreads();
  if constexpr (kRounds) {
    RoundRows<T>(p, tile_rows.Mask(), kThreads, rows, [&](int) { return tile.expert; });
    __syncthreads();
  }

  const uint8_t* b = rows + tile_rows.Row(min(lane % 8, tile.rows - 1)) * RowStride(p.k) +
                     lane / 8 * 16 + begin * (kTileK * 2);
  float halves[2][4] = {};
  for (int k_tile = begin; k_tile < end; ++k_tile, b += kTileK * 2) {
    const Packed packed = ring.Take(request);
    MultiplyTile<T>(packed, b, constants, halves);
  }
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = halves[0][i] + halves[1][i];
  if (warp > 0) partials[thread - 32] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int other = 0; other < kWarps - 1; ++other) {
    const float4 partial = partials[other * 32 + lane];
    sums[0] += partial.x, sums[1] += partial.y, sums[2] += partial.z, sums[3] += partial.w;
  }
  const TileStore<T> store = MakeTileStore<T>(p, tile, lane_rows, m_tile, part);
  if (store.first >= p.columns) return;
  StoreRows(store, 0, plan.slots[tile.row + min(store.g, tile.rows - 1)], FinishTile(store, sums));
}

// With more weights, a sort and an engine are faster. On an H200, a layer with 38 million weights
// (one token of Qwen3-30B-A3B) took 17 us without a sort and 26 us with an engine. With 75 million
// weights it was 32 us and 30 us. Both were measured when GEMM 2 and combine were two kernels.
constexpr int64_t kMaxWeights = int64_t{64} << 20;

// Returns the bytes of dynamic shared memory: weights in flight, and rows of x; see TileRows.
int64_t DynamicBytes(int64_t slots, int64_t slots_per_row, int64_t k) {
  const int64_t rows = CeilDiv(slots, slots_per_row);
  return kRingBytes + (rows < kRows ? rows : kRows) * RowStride(static_cast<int32_t>(k));
}

constexpr int64_t kStaticBytes =
    CeilDiv(sizeof(Plan) + sizeof(float4) * (kThreads - 32), kDynamicAlignment) * kDynamicAlignment;

template <typename T, bool kRounds>
cudaError_t LaunchTyped(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  const int64_t bytes = DynamicBytes(few.num_slots, gemm.left.slots_per_row, gemm.k);
  // No expert has more tiles than slots.
  const auto blocks = static_cast<unsigned>(few.num_slots * gemm.m_tiles() * kParts);
  return LaunchWide(stream, dim3(blocks), kThreads, static_cast<int>(bytes), /*overlaps=*/true,
                    ExpertGemmFew<T, kRounds>, gemm, few, MakeTileConstants<T>());
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  return gemm.left.input_scale == nullptr ? LaunchTyped<T, false>(stream, gemm, few)
                                          : LaunchTyped<T, true>(stream, gemm, few);
}

}  // namespace

bool FewSlotsFit(const MoEShape& shape, int64_t slots) {
  return slots <= kFewSlots && slots * shape.h * (shape.n1 + shape.i) <= kMaxWeights &&
         FewSlotsSharedBytes(slots, shape.top_k, shape.h) <= BlockSharedBytes() &&
         CombinedFewSharedBytes(slots, shape.i) <= BlockSharedBytes();
}

int64_t FewSlotsSharedBytes(int64_t slots, int64_t slots_per_row, int64_t k) {
  return DynamicBytes(slots, slots_per_row, k) + kStaticBytes;
}

cudaError_t LaunchExpertGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  return gemm.type == DataType::kF16 ? LaunchOf<__half>(stream, gemm, few)
                                     : LaunchOf<__nv_bfloat16>(stream, gemm, few);
}

}  // namespace nvfp4
