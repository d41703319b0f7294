// What the two kernels for few slots share (expert_gemm_few.cu, combined_gemm_few.cu). Both keep
// the weights in flight and the rows of x in shared memory of each block. The second one also
// sorts the slots.
#pragma once

#include <cstring>
#include <type_traits>

#include "cuda/gemm/expert_gemm_few.cuh"
#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/quantizers/quantize_block.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {

constexpr int kRows = kFewColumns;

// Whether blocks of both kernels have so few registers that one of the second kernel runs beside
// six of the first. The other instances would spill registers.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
template <typename T, bool kRounds>
constexpr bool kLeavesRoom = std::is_same_v<T, __nv_bfloat16> && !kRounds;
#else
template <typename T, bool kRounds>
constexpr bool kLeavesRoom = false;
#endif

// Where a slot has its sum: a column of a tile. The tile of a slot that is not routed is -1.
struct SlotPlace {
  int16_t tile;
  int16_t column;
};

struct SortedSlots {
  int32_t num_tiles;
  uint32_t routed;           // a bit for each slot
  int32_t slots[kFewSlots];  // slot of each sorted row
  RowTile tiles[kFewSlots];
  SlotPlace places[kFewSlots];
};

// Sorts slots by expert, stably, and cuts them into tiles of kRows rows. One warp calls it, with
// one slot for each lane.
__device__ __forceinline__ void SortSlots(const int32_t* expert_ids, int num_slots, int num_experts,
                                          SortedSlots* sorted) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int32_t id = lane < num_slots ? expert_ids[lane] : -1;
  if (id >= num_experts || id < 0) id = INT32_MAX;  // sorted behind all others
  const uint32_t routed = __ballot_sync(kAllLanes, id != INT32_MAX);
  int place = 0;
  for (int other = 0; other < num_slots; ++other) {
    const int32_t its = __shfl_sync(kAllLanes, id, other);
    place += its < id || (its == id && other < lane);
  }
  if (lane >= num_slots) place = lane;
  sorted->slots[place] = lane;
  __syncwarp();
  const int slot = sorted->slots[lane];
  const int32_t expert = __shfl_sync(kAllLanes, id, slot);
  const uint32_t equal = __match_any_sync(kAllLanes, expert);
  const int before = lane - (__ffs(static_cast<int>(equal)) - 1);  // earlier rows of the expert
  const bool first = expert != INT32_MAX && before % kRows == 0;
  const uint32_t firsts = __ballot_sync(kAllLanes, first);
  const int tile = __popc(firsts & ((1u << lane) - 1)) - (first ? 0 : 1);
  if (first) sorted->tiles[tile] = {expert, lane, min(kRows, __popc(equal) - before)};
  sorted->places[slot] = {static_cast<int16_t>(expert != INT32_MAX ? tile : -1),
                          static_cast<int16_t>(before % kRows)};
  if (lane == 0) {
    sorted->num_tiles = __popc(firsts);
    sorted->routed = routed;
  }
}

// What a lane has of a weight tile.
struct Packed {
  uint4 codes;
  uint2 scales;
};

// sums += W @ x for one weight tile. `rows` is the address from which this lane loads its row of
// ldmatrix. The two halves of the tile have their own sums, so that their MMAs overlap.
template <typename T>
__device__ __forceinline__ void MultiplyTile(const Packed& packed, const uint8_t* rows,
                                             const TileConstants& constants, float (&sums)[2][4]) {
  const uint32_t words[4] = {packed.codes.x, packed.codes.y, packed.codes.z, packed.codes.w};
  const uint32_t scales[2] = {packed.scales.x, packed.scales.y};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t even[4], odd[4], b[4];
    LoadMatrices(rows + 64 * half, b);
    UnpackPair<T>(words[2 * half], words[2 * half + 1], scales[half], constants, even, odd);
    MultiplyAdd<T>(sums[half], even, b[0], b[1]);
    MultiplyAdd<T>(sums[half], odd, b[2], b[3]);
  }
}

constexpr int kCodeBytes = kTileCodeBytes / kParts;
constexpr int kScaleBytes = kTileScaleBytes / kParts;

// What a lane copies of one part of successive weight tiles, from tile `tile` on.
struct PartSource {
  const uint8_t* codes;
  const uint8_t* scales;

  __device__ __forceinline__ PartSource(const ExpertWeights& weight, int64_t tile, int part) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    codes = weight.packed + tile * kTileCodeBytes + part * kCodeBytes + lane * 16;
    scales = weight.block_scale + tile * kTileScaleBytes + part * kScaleBytes + lane * 16;
  }

  __device__ __forceinline__ void Advance() {
    codes += kTileCodeBytes;
    scales += kTileScaleBytes;
  }

  // Starts the copies of the part of the tile that is `after` tiles later. Whole warps call it.
  __device__ __forceinline__ void Request(int after, uint8_t* place) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t target = SharedAddress(place) + lane * 16;
    Copy(target, codes + after * int64_t{kTileCodeBytes});
    if (lane < kScaleBytes / 16) {
      Copy(target + kCodeBytes, scales + after * int64_t{kTileScaleBytes});
    }
  }
};

// The parts that a warp has in flight, in kDepth places in shared memory. Each part is one group of
// copies, even if it is empty. kRefills: whether the warp may have more than kDepth parts. A place
// then gets another part when its part is taken.
template <int kDepth, bool kRefills>
class PartRing {
 public:
  static constexpr int kBytes = kDepth * kPartBytes;

  __device__ __forceinline__ explicit PartRing(uint8_t* places) : places_(places), place_(places) {}

  // Requests the first kDepth parts, or those from part `first` on: request(place) for each.
  template <typename Function>
  __device__ __forceinline__ void Fill(const Function& request, int first = 0) const {
#pragma unroll
    for (int d = first; d < kDepth; ++d) {
      request(places_ + d * kPartBytes);
      CommitCopies();
    }
  }

  // Returns the next part, and requests another one to its place. Whole warps call it.
  template <typename Function>
  __device__ __forceinline__ Packed Take(const Function& request) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    WaitCopies<kDepth - 1>();
    __syncwarp();  // other lanes have copied the scales
    const Packed packed = {*reinterpret_cast<const uint4*>(place_ + lane * 16),
                           *reinterpret_cast<const uint2*>(place_ + kCodeBytes + lane / 4 * 8)};
    if constexpr (kRefills) {
      __syncwarp();
      request(place_);
    }
    CommitCopies();
    place_ += kPartBytes;
    if (kRefills && place_ == places_ + kBytes) place_ = places_;
    return packed;
  }

 private:
  uint8_t* places_;
  uint8_t* place_;  // of the next part
};

// Starts the copies of the rows first, first + step, ... that are in `mask` to shared memory, with
// zeros past k, as one group. Row r is source(r) of the left operand. This is thread `thread` of
// the `threads` that copy each of these rows. kCached: whether they pass through the L1 cache, for
// which this kernel must have waited for the one that writes them.
template <bool kCached, typename Function>
__device__ __forceinline__ void BringRows(const ExpertGemm& p, uint32_t mask, int first, int step,
                                          int thread, int threads, uint8_t* rows,
                                          const Function& source) {
  const int chunks = KTiles(p.k) * (kTileK / 8);
#pragma unroll 1
  for (int row = first; row < 32 && mask >> row != 0; row += step) {
    if ((mask >> row & 1) == 0) continue;
    const auto* values =
        static_cast<const uint16_t*>(p.left.values) + static_cast<int64_t>(source(row)) * p.k;
    const uint32_t target = SharedAddress(rows + row * RowStride(p.k));
    for (int chunk = thread; chunk < chunks; chunk += threads) {
      const bool inside = chunk * 8 < p.k;
      const uint16_t* source = values + (inside ? chunk * 8 : 0);
      if constexpr (kCached) {
        CopyCachedOrZero(target + chunk * 16, source, inside ? 16 : 0);
      } else {
        CopyOrZero(target + chunk * 16, source, inside ? 16 : 0);
      }
    }
  }
  CommitCopies();
}

// Rounds the rows in `mask` to NVFP4 in their places. The expert of row r is expert(r). `threads`
// threads call it.
template <typename T, typename Function>
__device__ __forceinline__ void RoundRows(const ExpertGemm& p, uint32_t mask, int threads,
                                          uint8_t* rows, const Function& expert) {
  const int blocks = KTiles(p.k) * (kTileK / kBlock), count = __popc(mask);
  for (int i = static_cast<int>(threadIdx.x); i < count * blocks; i += threads) {
    const int index = i / blocks, block = i - index * blocks;
    uint32_t after = mask;  // `mask` without its lowest `index` bits
    for (int before = 0; before < index; ++before) after &= after - 1;
    const int row = __ffs(static_cast<int>(after)) - 1;
    auto* place = reinterpret_cast<uint4*>(rows + row * RowStride(p.k)) + 2 * block;
    T values[kBlock];
    uint4 words[2] = {place[0], place[1]};
    std::memcpy(values, words, sizeof(values));
    RoundActivations(p.left.input_scale[expert(row)], values);
    std::memcpy(words, values, sizeof(values));
    place[0] = words[0];
    place[1] = words[1];
  }
}

}  // namespace nvfp4
