// Computes out[r] = act(W[expert] @ x[r]) for the rows of at most kFewSlots slots, in bf16 and f16,
// without sorting them first: GEMM 1 of a layer. expert_gemm.cuh has the whole equation.
//
//   expert_ids [slots], one for each lane -> the slots of each block
//
// A block owns a slab of 16 weight rows of one expert, by at most 8 of its slots, over all of k.
// There are blocks for each slot. Those of the first slot of an expert multiply its first 8 slots,
// those of its ninth slot the next 8, and the blocks of the other slots end. Each warp finds its
// slots itself: with sorted slots in shared memory, the first weights would be requested 0.2 us
// later.
//
// The four warps of a block have a quarter of k each. A warp has kDepth parts of its slab in
// flight: with k = 2048, all that it needs. Slabs are small, so that every multiprocessor has about
// the same number: one token of Qwen3-30B-A3B has 768. The sums of the warps are added in the order
// of the warps.
//
// The rows of x of the block are in shared memory. In W4A4, the block rounds them to NVFP4 there,
// under the scale of its expert.
//
// When its own weights have arrived, a block prefetches its share of the weights of GEMM 2 into the
// L2 cache. GEMM 2 (combined_gemm_few.cu) may start before this kernel ends. The blocks here leave
// enough registers and shared memory for one of its blocks on each multiprocessor.
//
// Bottleneck: reading weights, and instructions. With one token of Qwen3-30B-A3B on an H200, the
// weights alone arrive 4.1 us after the ids. Each instruction of the loop over weight tiles costs
// 48 issue slots of a scheduler. A loop of 72 instead of 100 instructions, and requests without
// 64-bit arithmetic, made the kernel end after 7.5 us instead of 10.3.
//
// Needs: sm_80. Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py.
#include "cuda/epilogues/direct_store.cuh"
#include "cuda/gemm/few_slots.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = kFewWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kDepth = kFewDepth;  // parts of a warp in flight
constexpr int kRingBytes = kWarps * PartRing<kDepth, true>::kBytes;
static_assert(kRingBytes == FewDynamicBytes(0, 1, 0), "forms.h counts the memory of a block");
static_assert(CeilDiv(sizeof(float4) * (kThreads - 32), kDynamicAlignment) * kDynamicAlignment ==
                  kFewStaticBytes,
              "likewise");

// Prefetches the weights of an expert in the next GEMM. Blocks share the work: this is block
// `block` of `blocks`.
__device__ __forceinline__ void PrefetchNext(const FewSlots& few, int expert, int block,
                                             int blocks) {
#if __CUDA_ARCH__ >= 900
  const int tiles = few.next_m_tiles * few.next_k_tiles, each = (tiles + blocks - 1) / blocks;
  const int first = block * each, count = min(each, tiles - first);
  if (count <= 0) return;
  const int64_t tile = static_cast<int64_t>(expert) * tiles + first;
  PrefetchL2(few.next.packed + tile * kTileCodeBytes, count * kTileCodeBytes);
  PrefetchL2(few.next.block_scale + tile * kTileScaleBytes, count * kTileScaleBytes);
#endif
}

// The slots that a block multiplies: at most kRows slots of one expert, which are the columns of
// its MMAs in their order.
struct OwnSlots {
  int32_t expert;
  uint32_t slots;  // a bit for each slot; 0 if the block has nothing to do

  // Finds the slots of the blocks of slot `slot`. Whole warps call it.
  __device__ __forceinline__ OwnSlots(const FewSlots& few, int slot) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int32_t id = lane < few.num_slots ? few.expert_ids[lane] : -1;
    expert = __shfl_sync(kAllLanes, id, slot);
    const bool routed = expert >= 0 && expert < few.num_experts;
    const uint32_t equal = __ballot_sync(kAllLanes, routed && id == expert);
    const int first = __popc(equal & ((1u << slot) - 1)), own = __popc(equal & ((1u << lane) - 1));
    const bool chosen = id == expert && own >= first && own < first + kRows;
    slots = __ballot_sync(kAllLanes, routed && first % kRows == 0 && chosen);
  }

  __device__ __forceinline__ int Count() const { return __popc(slots); }
  __device__ __forceinline__ int Slot(int column) const {
    uint32_t after = slots;
#pragma unroll 1
    for (int i = 0; i < column; ++i) after &= after - 1;
    return __ffs(static_cast<int>(after)) - 1;
  }
};

// How a block keeps its rows of x: by token if there are few tokens, because the slots of a token
// share its row. Otherwise each column has a row.
struct OwnRows {
  const OwnSlots& own;
  int slots_per_row;
  bool by_token;

  __device__ __forceinline__ OwnRows(const ExpertGemm& p, const FewSlots& few,
                                     const OwnSlots& slots)
      : own(slots),
        slots_per_row(p.left.slots_per_row),
        by_token(few.num_slots <= kRows * slots_per_row) {}

  __device__ __forceinline__ int Token(int column) const {
    return own.Slot(column) / slots_per_row;
  }
  // The row of a column.
  __device__ __forceinline__ int Row(int column) const { return by_token ? Token(column) : column; }
  // The token of a row.
  __device__ __forceinline__ int Source(int row) const { return by_token ? row : Token(row); }
  // A bit for each row.
  __device__ __forceinline__ uint32_t Mask() const {
    if (!by_token) return (1u << own.Count()) - 1;
    uint32_t mask = 0;
#pragma unroll 1
    for (uint32_t left = own.slots; left != 0; left &= left - 1) {
      mask |= 1u << (__ffs(static_cast<int>(left)) - 1) / slots_per_row;
    }
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

// For how many blocks of a multiprocessor the registers must suffice. One token of Qwen3-30B-A3B
// has
// 6. With room for 10, a thread has 48 registers; see kLeavesRoom.
template <typename T, bool kRounds>
constexpr int kMinBlocks = kLeavesRoom<T, kRounds> ? 10
                           : kRounds               ? 6
                                                   : 8;

// kRefills: whether a warp has more than kDepth parts.
template <typename T, bool kRounds, bool kRefills>
__global__ void __launch_bounds__(kThreads, kMinBlocks<T, kRounds>)
    ExpertGemmFew(const __grid_constant__ ExpertGemm p, const __grid_constant__ FewSlots few,
                  const TileConstants constants) {
  NVFP4_DYNAMIC_SHARED(shared);
  __shared__ float4 partials[kThreads - 32];
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  const int slabs = p.m_tiles() * kParts, k_tiles = KTiles(p.k);
  const int slot = static_cast<int>(blockIdx.x) / slabs;
  const int slab = static_cast<int>(blockIdx.x) - slot * slabs;
  const int m_tile = slab / kParts, part = slab % kParts;
  const int begin = warp * k_tiles / kWarps, end = (warp + 1) * k_tiles / kWarps;
  uint8_t* rows = shared + kRingBytes;
  if (few.row_is_unchanged) {
    BringRows<false>(p, 1, 0, 1, thread, kThreads, rows, [](int) { return 0; });
  }
  WaitForPrecedingKernel();
  const OwnSlots own(few, slot);
  if (own.slots == 0) return;

  const int64_t first = (static_cast<int64_t>(own.expert) * p.m_tiles() + m_tile) * k_tiles;
  PartSource source(p.weight, first + begin, part);
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
  PartRing<kDepth, kRefills> ring(shared + warp * PartRing<kDepth, kRefills>::kBytes);
  const OwnRows own_rows(p, few, own);
  if (few.row_is_unchanged) {
    ring.Fill(request);
  } else {
    // The rows are in the group of part 0, so that part 0 does not wait for the code that finds
    // them.
    request(shared + warp * PartRing<kDepth, kRefills>::kBytes);
    BringRows<true>(p, own_rows.Mask(), 0, 1, thread, kThreads, rows,
                    [&](int row) { return own_rows.Source(row); });
    ring.Fill(request, 1);
  }
  // The next kernel requests weights as soon as it starts, and must not be ahead of this one.
  StartNextKernel();
  LaneRows lane_rows = {};
  if (warp == 0) lane_rows = LoadLaneRows(p, own.expert, m_tile, part);
  if (few.row_is_unchanged) {
    WaitCopies<kDepth>();  // for the row, which was requested before all parts
  } else {
    WaitCopies<kDepth - 1>();  // for the rows
  }
  __syncthreads();
  if constexpr (kRounds) {
    RoundRows<T>(p, own_rows.Mask(), kThreads, rows, [&](int) { return own.expert; });
    __syncthreads();
  }

  const int last = own.Count() - 1;
  const uint8_t* b = rows + own_rows.Row(min(lane % 8, last)) * RowStride(p.k) + lane / 8 * 16 +
                     begin * (kTileK * 2);
  float halves[2][4] = {};
#pragma unroll 1
  for (int k_tile = begin; k_tile < end; ++k_tile, b += kTileK * 2) {
    const Packed packed = ring.Take(request);
    MultiplyTile<T>(packed, b, constants, halves);
  }
  if (thread == 0) {
    PrefetchNext(few, own.expert, m_tile * kParts + part, p.m_tiles() * kParts);
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
  const RowTile tile = {own.expert, 0, last + 1};
  const TileStore<T> store = MakeTileStore<T>(p, tile, lane_rows, m_tile, part);
  if (store.first >= p.columns) return;
  StoreRows(store, 0, own.Slot(min(store.g, last)), FinishTile(store, sums));
}

template <typename T, bool kRounds>
cudaError_t LaunchTyped(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  const int64_t bytes = FewDynamicBytes(few.num_slots, gemm.left.slots_per_row, gemm.k);
  const auto blocks = static_cast<unsigned>(few.num_slots * gemm.m_tiles() * kParts);
  const auto kernel = KTiles(gemm.k) > kWarps * kDepth ? ExpertGemmFew<T, kRounds, true>
                                                       : ExpertGemmFew<T, kRounds, false>;
  return LaunchWide(stream, dim3(blocks), kThreads, static_cast<int>(bytes), /*overlaps=*/true,
                    kernel, gemm, few, MakeTileConstants<T>());
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  return gemm.left.input_scale == nullptr ? LaunchTyped<T, false>(stream, gemm, few)
                                          : LaunchTyped<T, true>(stream, gemm, few);
}

}  // namespace

cudaError_t LaunchExpertGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few) {
  return gemm.type == DataType::kF16 ? LaunchOf<__half>(stream, gemm, few)
                                     : LaunchOf<__nv_bfloat16>(stream, gemm, few);
}

}  // namespace nvfp4
