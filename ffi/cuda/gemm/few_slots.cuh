// The plan and the rows of x of the kernels for few slots, in shared memory of each block:
// expert_gemm_few.cu and combined_gemm_few.cu.
#pragma once

#include <cstring>

#include "cuda/gemm/expert_gemm_few.cuh"
#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"
#include "cuda/quantizers/quantize_block.cuh"

namespace nvfp4 {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kRows = 8;      // most rows of a tile: the columns of one MMA
constexpr int kPadding = 16;  // bytes between rows in shared memory, against bank conflicts

// Where a slot has its sum: a column of a tile. The tile of a slot that is not routed is -1.
struct SlotPlace {
  int16_t tile;
  int16_t column;
};

struct Plan {
  int32_t num_tiles;
  uint32_t routed;           // a bit for each slot
  int32_t slots[kFewSlots];  // slot of each sorted row
  RowTile tiles[kFewSlots];
  SlotPlace places[kFewSlots];
};

// Makes the plan. One warp calls it, with one slot for each lane. It sorts slots by expert, stably,
// and cuts them into tiles of kRows rows.
__device__ __forceinline__ void MakePlan(const int32_t* expert_ids, int num_slots, int num_experts,
                                         Plan* plan) {
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
  plan->slots[place] = lane;
  __syncwarp();
  const int slot = plan->slots[lane];
  const int32_t expert = __shfl_sync(kAllLanes, id, slot);
  const uint32_t equal = __match_any_sync(kAllLanes, expert);
  const int before = lane - (__ffs(static_cast<int>(equal)) - 1);  // earlier rows of the expert
  const bool first = expert != INT32_MAX && before % kRows == 0;
  const uint32_t firsts = __ballot_sync(kAllLanes, first);
  const int tile = __popc(firsts & ((1u << lane) - 1)) - (first ? 0 : 1);
  if (first) plan->tiles[tile] = {expert, lane, min(kRows, __popc(equal) - before)};
  plan->places[slot] = {static_cast<int16_t>(expert != INT32_MAX ? tile : -1),
                        static_cast<int16_t>(before % kRows)};
  if (lane == 0) {
    plan->num_tiles = __popc(firsts);
    plan->routed = routed;
  }
}

// Returns the tiles of k that rows of `k` elements have.
__host__ __device__ constexpr int32_t KTiles(int32_t k) { return (k + kTileK - 1) / kTileK; }

// Returns the bytes from one row of `k` elements in shared memory to the next.
__host__ __device__ constexpr int32_t RowStride(int32_t k) {
  return KTiles(k) * kTileK * 2 + kPadding;
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

// Starts the copies of rows of x to shared memory, with zeros past k. `threads` threads call it.
// Only the rows in `routed` are copied. The second GEMM must not read other rows, because nobody
// wrote them.
__device__ __forceinline__ void BringRows(const ExpertGemm& p, uint32_t routed, int num_rows,
                                          int threads, uint8_t* rows) {
  const int chunks = KTiles(p.k) * (kTileK / 8), stride = RowStride(p.k);
  const uint32_t target = SharedAddress(rows);
  for (int i = static_cast<int>(threadIdx.x); i < num_rows * chunks; i += threads) {
    const int row = i / chunks, chunk = i - row * chunks;
    if ((routed >> row & 1) == 0) continue;
    const bool inside = chunk * 8 < p.k;
    const auto* source = static_cast<const uint16_t*>(p.left.values) +
                         static_cast<int64_t>(row) * p.k + (inside ? chunk * 8 : 0);
    CopyOrZero(target + row * stride + chunk * 16, source, inside ? 16 : 0);
  }
  CommitCopies();
}

// rounded[slot] = rows[slot / slots_per_row], rounded to NVFP4, for each slot in `slots`. `rounded`
// may be `rows`. `threads` threads call it.
template <typename T>
__device__ __forceinline__ void RoundRows(const ExpertGemm& p, const FewSlots& few, uint32_t slots,
                                          int threads, const uint8_t* rows, uint8_t* rounded) {
  const int blocks = KTiles(p.k) * (kTileK / kBlock), count = __popc(slots);
  const int stride = RowStride(p.k);
  for (int i = static_cast<int>(threadIdx.x); i < count * blocks; i += threads) {
    const int index = i / blocks, block = i - index * blocks;
    uint32_t after = slots;  // `slots` without its lowest `index` bits
    for (int before = 0; before < index; ++before) after &= after - 1;
    const int slot = __ffs(static_cast<int>(after)) - 1;
    const auto* source =
        reinterpret_cast<const uint4*>(rows + slot / p.left.slots_per_row * stride) + 2 * block;
    T values[kBlock];
    uint4 words[2] = {source[0], source[1]};
    std::memcpy(values, words, sizeof(values));
    RoundActivations(p.left.input_scale[few.expert_ids[slot]], values);
    std::memcpy(words, values, sizeof(values));
    auto* place = reinterpret_cast<uint4*>(rounded + slot * stride) + 2 * block;
    place[0] = words[0];
    place[1] = words[1];
  }
}

}  // namespace nvfp4
