// Tiles of 16-bit rows in shared memory, as the attention kernels on mma.sync keep them.
//
// The 16-byte units of a row are swizzled, so that ldmatrix reads eight rows without bank
// conflicts. The columns of a tile are a multiple of 64.
#pragma once

#include "cuda/instructions/ampere.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {

constexpr int kUnit = 8;  // values of 16 bytes

// The address of 16-byte unit `unit` of row `row` in a matrix of kColumns columns.
template <int kColumns>
__device__ __forceinline__ uint32_t UnitOffset(int row, int unit) {
  return static_cast<uint32_t>(row * kColumns * 2 + (unit ^ (row & 7)) * 16);
}

// The offset of unit 2 * step + u, where `offset` is that of unit u (0 or 1) of the row. The bits
// of the step are those that no other term has, so that few registers hold all offsets of a thread.
__device__ __forceinline__ uint32_t StepOffset(uint32_t offset, int step) {
  return (offset ^ static_cast<uint32_t>(step % 4 * 32)) + static_cast<uint32_t>(step / 4 * 128);
}

// Starts copies of kRows rows of `width` values, padded with zeros to kColumns. Row r begins at
// find(r); rows from `count` on are zeros. Eight threads copy 128 bytes of a row at a time. The
// rows of a thread differ by a multiple of eight, so that it swizzles all of them alike.
template <int kRows, int kColumns, int kThreads, typename Find>
__device__ __forceinline__ void CopyRows(uint32_t target, int width, int count, Find find) {
  constexpr int kSteps = kThreads / 8;
  static_assert(kSteps % 8 == 0, "all rows of a thread are swizzled alike");
  const int thread = static_cast<int>(threadIdx.x), first = thread / 8, unit = thread % 8;
  const uint32_t place = target + UnitOffset<kColumns>(first, unit);
#pragma unroll 1  // the addresses of several rows would take registers from the products
  for (int step = 0; step < (kRows + kSteps - 1) / kSteps; ++step) {
    const int row = first + step * kSteps;
    if (kRows % kSteps != 0 && row >= kRows) break;
    const uint16_t* source = find(row) + unit * kUnit;
#pragma unroll
    for (int part = 0; part < kColumns / 64; ++part) {
      const bool exists = row < count && unit * kUnit + 64 * part < width;
      CopyOrZero(place + step * kSteps * kColumns * 2 + 128 * part, source + 64 * part,
                 exists ? 16 : 0);
    }
  }
}

// Finds rows that follow each other in memory, in the order of a thread of CopyRows.
template <int kThreads>
struct Consecutive {
  const uint16_t* next;
  int64_t step;

  __device__ __forceinline__ Consecutive(const uint16_t* rows, int width)
      : next(rows + static_cast<int>(threadIdx.x) / 8 * width), step(kThreads / 8 * width) {}
  __device__ __forceinline__ const uint16_t* operator()(int) {
    const uint16_t* row = next;
    next += step;
    return row;
  }
};

}  // namespace nvfp4
