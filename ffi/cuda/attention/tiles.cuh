// Tiles of rows in shared memory, as the attention kernels on mma.sync keep them.
//
// The 16-byte units of a row are swizzled, so that ldmatrix reads eight rows without bank
// conflicts. Values have 16 bits, or 8 bits as a cache in E4M3 has them. The columns of a tile are
// a multiple of 64.
#pragma once

#include <type_traits>

#include "cuda/instructions/ampere.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {

constexpr int kUnit = 8;  // 16-bit values of 16 bytes

// How many units of a row are swizzled among each other: those of 128 bytes, or of 64 bytes if rows
// of kRowBytes bytes are no multiple of 128.
template <int kRowBytes>
constexpr int kTogether = kRowBytes % 128 == 0 ? 8 : 4;

// The address of 16-byte unit `unit` of row `row` in a matrix with rows of kRowBytes bytes.
template <int kRowBytes>
__device__ __forceinline__ uint32_t ByteOffset(int row, int unit) {
  // Two rows of 64 or 192 bytes have the banks of all eight units.
  const int turn = kTogether<kRowBytes> == 8 ? row & 7 : row / 2 & 3;
  return static_cast<uint32_t>(row * kRowBytes + (unit ^ turn) * 16);
}

// The same in a matrix of kColumns columns of 16 bits.
template <int kColumns>
__device__ __forceinline__ uint32_t UnitOffset(int row, int unit) {
  return ByteOffset<2 * kColumns>(row, unit);
}

// The offset of unit 2 * step + u, where `offset` is that of unit u (0 or 1) of the row. The bits
// of the step are those that no other term has, so that few registers hold all offsets of a thread.
template <int kRowBytes = 128>
__device__ __forceinline__ uint32_t StepOffset(uint32_t offset, int step) {
  constexpr int kSteps = kTogether<kRowBytes> / 2;
  return (offset ^ static_cast<uint32_t>(step % kSteps * 32)) +
         static_cast<uint32_t>(step / kSteps * kSteps * 32);
}

// Starts copies of kRows rows of `width` values, padded with zeros to kColumns. Row r begins at
// find(r), which is a pointer to values of 16 or 8 bits; rows from `count` on are zeros. Eight
// threads copy 128 bytes of a row at a time, or four threads 64 bytes. The rows of a thread differ
// by a multiple of eight, so that it swizzles all of them alike.
template <int kRows, int kColumns, int kThreads, typename Find>
__device__ __forceinline__ void CopyRows(uint32_t target, int width, int count, Find find) {
  using Value = std::remove_pointer_t<decltype(find(0))>;
  constexpr int kRowBytes = kColumns * sizeof(Value), kUnits = kTogether<kRowBytes>;
  constexpr int kValues = 16 / sizeof(Value);  // of a unit
  constexpr int kSteps = kThreads / kUnits;
  static_assert(kSteps % 8 == 0, "all rows of a thread are swizzled alike");
  const int thread = static_cast<int>(threadIdx.x), first = thread / kUnits, unit = thread % kUnits;
  const uint32_t place = target + ByteOffset<kRowBytes>(first, unit);
#pragma unroll 1  // the addresses of several rows would take registers from the products
  for (int step = 0; step < (kRows + kSteps - 1) / kSteps; ++step) {
    const int row = first + step * kSteps;
    if (kRows % kSteps != 0 && row >= kRows) break;
    const Value* source = find(row) + unit * kValues;
#pragma unroll
    for (int part = 0; part < kRowBytes / (16 * kUnits); ++part) {
      const int column = kUnits * kValues * part;
      const bool exists = row < count && unit * kValues + column < width;
      CopyOrZero(place + step * kSteps * kRowBytes + 16 * kUnits * part, source + column,
                 exists ? 16 : 0);
    }
  }
}

// Finds rows that follow each other in memory, in the order of a thread of CopyRows, whose kUnits
// is kTogether of its rows.
template <int kThreads, int kUnits = 8, typename Value = uint16_t>
struct Consecutive {
  const Value* next;
  int64_t step;

  __device__ __forceinline__ Consecutive(const Value* rows, int width)
      : next(rows + static_cast<int>(threadIdx.x) / kUnits * width),
        step(kThreads / kUnits * width) {}
  __device__ __forceinline__ const Value* operator()(int) {
    const Value* row = next;
    next += step;
    return row;
  }
};

}  // namespace nvfp4
