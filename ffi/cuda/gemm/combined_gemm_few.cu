// Computes y[t] = sum over j of weight[t, j] * (W[expert(t, j)] @ x[t * top_k + j] + bias) for at
// most kFewSlots slots, in bf16 and f16: GEMM 2 of a layer and the sum over the experts of a token
// in one kernel. Outputs of single experts are never rounded or stored.
//
// A block owns a slab of 16 columns of y, for all tokens. In each weight tile of 64 rows, one of
// four warps owns the 16 rows of a slab (weight_tile.cuh). They are a part of 512 contiguous bytes
// of codes and 64 of scales. The work of a block is a list of such parts: all tiles of k of the
// first tile of the sorted slots, then those of the next. The warps divide the list evenly, each
// takes contiguous parts, and a warp has kDepth of them in flight.
//
// Where the parts of an expert tile end, or those of a warp, the warp stores its sums to places of
// their own, one for each column. One thread for each slot and column then adds the sums of the
// slot in the order of k, and applies scales, bias and weight. One thread for each token and column
// adds the slots in the order of j. The result does not depend on the order in which warps run.
//
// The kernel may start before GEMM 1 ends. It waits for GEMM 1 before it reads `left`. GEMM 1 has
// waited before it let this kernel start, so that ids, weights of experts and weights of layers are
// unchanged (launch_kernel.cuh). Slots that are not routed are never read.
//
// Bottleneck: the latency of memory and unpacking. With one token of Qwen3-30B-A3B, 128 blocks have
// 96 parts each, which their 16 warps request at once. In bf16, six blocks of GEMM 1 leave
// registers and shared memory for such a block on a multiprocessor of an H100 or H200. Its requests
// therefore do not wait for the end of GEMM 1.
//
// Needs: sm_80. Tests: tests/gpu/test_cuda_kernel.py, tests/emulation/test_emulation.py.
#include "cuda/epilogues/finish.cuh"
#include "cuda/gemm/few_slots.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = kCombinedWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kDepth = kCombinedDepth;  // parts of a warp in flight
constexpr int kRingBytes = kWarps * PartRing<kDepth, true>::kBytes;
constexpr int kColumnFloats = kCombinedColumnFloats;
static_assert(kFewSlots * kSlab == kThreads, "a thread for each slot and weight row");

// The list of the parts of a block, and how its warps divide it.
struct Division {
  int parts;
  int warps;  // how many have parts; at least 1

  __device__ __forceinline__ explicit Division(int count)
      : parts(count), warps(max(1, min(count, kWarps))) {}
  // The first part of a warp. It is the end of the list for warps without parts.
  __device__ __forceinline__ int Begin(int warp) const { return min(warp, warps) * parts / warps; }
  // The warp that has a part.
  __device__ __forceinline__ int WarpOf(int part) const { return ((part + 1) * warps - 1) / parts; }
};

// Returns the place of the first column of sums that a warp has of an expert tile. The places of an
// expert tile are kRows apart, and those of a warp follow each other.
__device__ __forceinline__ int SumPlace(const RowTile& tile, int warp) {
  return tile.row + kRows * warp;
}

// A part: a tile of the sorted slots, and a tile of k.
struct Position {
  int tile;
  int k_tile;

  __device__ __forceinline__ void Step(int k_tiles) {
    if (++k_tile < k_tiles) return;
    k_tile = 0;
    ++tile;
  }
};

// Returns the number of the weight tile that has a part of this block.
__device__ __forceinline__ int64_t WeightTile(const ExpertGemm& p, const SortedSlots& sorted,
                                              const Position& position) {
  const int64_t m_tile = static_cast<int64_t>(sorted.tiles[position.tile].expert) * p.m_tiles() +
                         static_cast<int>(blockIdx.x) / kParts;
  return m_tile * KTiles(p.k) + position.k_tile;
}

// Returns the place of the slot of this thread.
__device__ __forceinline__ SlotPlace OwnPlace(const SortedSlots& sorted, int num_slots) {
  const int slot = static_cast<int>(threadIdx.x) / kSlab;
  return slot < num_slots ? sorted.places[slot] : SlotPlace{-1, 0};
}

// What a thread needs for the output of its slot and weight row.
struct SlotOutput {
  float scale, bias, weight;
};

template <typename T>
__device__ __forceinline__ SlotOutput LoadSlotOutput(const ExpertGemm& p, const SortedSlots& sorted,
                                                     const CombineTokens& tokens, int num_slots) {
  const int slot = static_cast<int>(threadIdx.x) / kSlab;
  const int row = static_cast<int>(blockIdx.x) * kSlab + static_cast<int>(threadIdx.x) % kSlab;
  const SlotPlace place = OwnPlace(sorted, num_slots);
  if (place.tile < 0) return {0.0f, 0.0f, 0.0f};
  const int64_t expert = sorted.tiles[place.tile].expert;
  float scale =
      kProductUnit<T> * p.weight.global_scale[expert * p.parts + PartOf(p, row, p.columns)];
  if (p.left.input_scale != nullptr) scale *= p.left.input_scale[expert];
  const float bias = p.weight.bias != nullptr ? p.weight.bias[expert * p.bias_rows + row] : 0.0f;
  const float weight = tokens.expert_weights != nullptr ? tokens.expert_weights[slot] : 1.0f;
  return {scale, bias, weight};
}

// The parts of a warp.
struct Parts {
  const ExpertGemm& p;
  const SortedSlots& sorted;
  int begin, end;
  int requested;
  Position next;  // of the part that is requested next

  __device__ __forceinline__ Parts(const ExpertGemm& gemm, const SortedSlots& made,
                                   const Division& division, int warp)
      : p(gemm),
        sorted(made),
        begin(division.Begin(warp)),
        end(division.Begin(warp + 1)),
        requested(begin),
        next(At(begin)) {}

  __device__ __forceinline__ Position At(int part) const {
    return {part / KTiles(p.k), part % KTiles(p.k)};
  }

  __device__ __forceinline__ void Request(uint8_t* place) {
    if (requested == end) return;
    const int part = static_cast<int>(blockIdx.x) % kParts;
    PartSource(p.weight, WeightTile(p, sorted, next), part).Request(0, place);
    next.Step(KTiles(p.k));
    ++requested;
  }
};

// Multiplies the parts of a warp, and stores a sum for each expert tile that it has parts of.
template <typename T, bool kRefills>
__device__ __forceinline__ void MultiplyParts(Parts* parts, const TileConstants& constants,
                                              PartRing<kDepth, kRefills> ring, const uint8_t* rows,
                                              float* sums) {
  const ExpertGemm& p = parts->p;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x) / 32;
  Position position = parts->At(parts->begin);
#pragma unroll 1
  for (int part = parts->begin; part < parts->end;) {
    const RowTile& tile = parts->sorted.tiles[position.tile];  // a copy would take registers
    const int last = min(parts->end, part + KTiles(p.k) - position.k_tile);
    const int slot = parts->sorted.slots[tile.row + min(lane % 8, tile.rows - 1)];
    const uint8_t* b =
        rows + slot * RowStride(p.k) + lane / 8 * 16 + position.k_tile * (kTileK * 2);
    float halves[2][4] = {};
#pragma unroll 1
    for (; part < last; ++part, b += kTileK * 2) {
      const Packed packed = ring.Take([&](uint8_t* place) { parts->Request(place); });
      MultiplyTile<T>(packed, b, constants, halves);
    }
    const int column = lane % 4 * 2;
    float* sum = sums + (SumPlace(tile, warp) + column) * kColumnFloats + lane / 4;
    if (column < tile.rows) {
      sum[0] = halves[0][0] + halves[1][0];
      sum[8] = halves[0][2] + halves[1][2];
    }
    if (column + 1 < tile.rows) {
      sum[kColumnFloats] = halves[0][1] + halves[1][1];
      sum[kColumnFloats + 8] = halves[0][3] + halves[1][3];
    }
    position = {position.tile + 1, 0};
  }
}

// With 64 threads more, a thread may have 56 registers instead of 64.
template <typename T, bool kRounds, bool kRefills>
__global__ void __launch_bounds__(kThreads + (kLeavesRoom<T, kRounds> ? 64 : 0), kBlocksPerSm)
    CombinedGemmFew(const __grid_constant__ ExpertGemm p, const __grid_constant__ FewSlots few,
                    const CombineTokens tokens, const TileConstants constants) {
  NVFP4_DYNAMIC_SHARED(shared);
  __shared__ SortedSlots sorted;
  uint8_t* rows = shared + kRingBytes;
  auto* sums = reinterpret_cast<float*>(rows + few.num_slots * RowStride(p.k));
  const auto thread = static_cast<int>(threadIdx.x);
  const int k_tiles = KTiles(p.k);
  if (thread < 32) SortSlots(few.expert_ids, few.num_slots, few.num_experts, &sorted);
  __syncthreads();
  const Division division(sorted.num_tiles * k_tiles);
  const int warp = thread / 32;
  Parts parts(p, sorted, division, warp);
  const PartRing<kDepth, kRefills> ring(shared + warp * PartRing<kDepth, kRefills>::kBytes);
  ring.Fill([&](uint8_t* place) { parts.Request(place); });
  const SlotOutput output = LoadSlotOutput<T>(p, sorted, tokens, few.num_slots);
  WaitForPrecedingKernel();
  StartNextKernel();
  BringRows<false>(p, sorted.routed, warp, kWarps, thread % 32, 32, rows,
                   [](int slot) { return slot; });
  WaitCopies<0>();
  __syncthreads();
  if constexpr (kRounds) {
    RoundRows<T>(p, sorted.routed, kThreads, rows, [&](int slot) { return few.expert_ids[slot]; });
    __syncthreads();
  }
  MultiplyParts<T>(&parts, constants, ring, rows, sums);
  __syncthreads();

  float value = 0.0f;
  const SlotPlace place = OwnPlace(sorted, few.num_slots);
  if (place.tile >= 0) {
    const int first = place.tile * k_tiles;
    const int last = division.WarpOf(first + k_tiles - 1);
    float sum = 0.0f;
    for (int its = division.WarpOf(first); its <= last; ++its) {
      const int column = SumPlace(sorted.tiles[place.tile], its) + place.column;
      sum += sums[column * kColumnFloats + thread % kSlab];
    }
    value = output.weight * (sum * output.scale + output.bias);
  }
  auto* outputs = reinterpret_cast<float*>(rows);  // the rows have been read
  if (thread < few.num_slots * kSlab) outputs[thread] = value;
  __syncthreads();
  const int token = thread / kSlab;
  if (token >= tokens.t) return;
  float sum = 0.0f;
  for (int j = 0; j < tokens.top_k; ++j) {
    sum += outputs[(token * tokens.top_k + j) * kSlab + thread % kSlab];
  }
  static_cast<T*>(tokens.y)[static_cast<int64_t>(token) * tokens.h +
                            static_cast<int64_t>(blockIdx.x) * kSlab + thread % kSlab] =
      FromFloat<T>(sum);
}

static_assert(RowStride(1) >= kSlab * 4, "the outputs of a slot take the place of its row");

static_assert(CeilDiv(sizeof(SortedSlots), kDynamicAlignment) * kDynamicAlignment ==
                  kCombinedStaticBytes,
              "forms.h counts the memory of a block");

template <typename T, bool kRounds>
cudaError_t LaunchTyped(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few,
                        const CombineTokens& tokens) {
  // No slot shares its expert tile in the worst case.
  const auto kernel = few.num_slots * KTiles(gemm.k) > kWarps * kDepth
                          ? CombinedGemmFew<T, kRounds, true>
                          : CombinedGemmFew<T, kRounds, false>;
  return LaunchWide(stream, dim3(static_cast<unsigned>(tokens.h / kSlab)), kThreads,
                    static_cast<int>(CombinedDynamicBytes(few.num_slots, gemm.k)),
                    /*overlaps=*/true, kernel, gemm, few, tokens, MakeTileConstants<T>());
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few,
                     const CombineTokens& tokens) {
  return gemm.left.input_scale == nullptr ? LaunchTyped<T, false>(stream, gemm, few, tokens)
                                          : LaunchTyped<T, true>(stream, gemm, few, tokens);
}

}  // namespace

cudaError_t LaunchCombinedGemmFew(cudaStream_t stream, const ExpertGemm& gemm, const FewSlots& few,
                                  const CombineTokens& tokens) {
  return gemm.type == DataType::kF16 ? LaunchOf<__half>(stream, gemm, few, tokens)
                                     : LaunchOf<__nv_bfloat16>(stream, gemm, few, tokens);
}

}  // namespace nvfp4
