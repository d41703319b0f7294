// The weights of experts, and which rows of x belong to which expert.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace nvfp4::cpu {

// [e, groups, k/16, 128] codes and [e, groups, k/16, 16] scales.
struct ExpertWeights {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t groups;  // of one expert
  int64_t k;

  // Returns groups a and b of an expert. If b is past the last group, a stands in its place.
  // `advance` is the distance to the groups that the caller takes next; it is 0 at the end.
  WeightPair pair(int64_t expert, int64_t a, int64_t b, int64_t advance) const {
    const int64_t first = expert * groups + a, second = expert * groups + (b < groups ? b : a);
    return {{Codes(first), Codes(second)},
            {Scales(first), Scales(second)},
            {Codes(first + advance), Codes(second + advance)},
            k};
  }
  const uint8_t* Codes(int64_t group) const { return codes + group * 8 * k; }
  const uint8_t* Scales(int64_t group) const { return scales + group * k; }
};

// At most kRowBlock consecutive rows of one expert.
struct RowBlock {
  int64_t expert;
  int64_t first;
  int64_t count;
};

// An upper bound of the number of row blocks into which `rows` rows of `experts` experts are cut.
constexpr int64_t MostBlocks(int64_t rows, int64_t experts) {
  return rows / kRowBlock + std::min(rows, experts);
}

// Cuts the rows [first, first + count) of an expert into blocks of about equal height, and returns
// the number of blocks.
inline int64_t CutRows(int64_t expert, int64_t first, int64_t count, RowBlock* blocks) {
  const int64_t parts = (count + kRowBlock - 1) / kRowBlock;
  int64_t made = 0;
  for (int64_t begin = 0; begin < count; ++made) {
    const int64_t even = RoundUp((count + parts - 1) / parts, kPair);
    const int64_t here = std::min(even, count - begin);
    blocks[made] = {expert, first + begin, here};
    begin += here;
  }
  return made;
}

// Returns how many column pairs one work item takes. An item must read enough weight bytes to be
// worth taking. If items were too large, threads would wait for each other at the end of a
// phase.
inline int64_t PairsPerItem(int64_t k) {
  constexpr int64_t kItemBytes = 160 << 10;
  return std::max<int64_t>(1, kItemBytes / (kPair * k * 9 / 16));
}

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Divides a workspace into aligned arrays. If it starts at null, it only counts their bytes.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {
    const auto address = reinterpret_cast<uintptr_t>(base);
    used_ = base ? (kCacheLine - address % kCacheLine) % kCacheLine : kCacheLine;
  }
  template <typename T>
  T* Take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += RoundUp(count * static_cast<int64_t>(sizeof(T)), kCacheLine);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_;
};

// Returns the largest number of units (tokens or rows), at most `units`, whose workspace fits into
// `bytes`, or 0 if not even one fits. `bytes_for(n)` must grow with n.
template <typename BytesFor>
int64_t LargestFit(int64_t units, int64_t bytes, BytesFor bytes_for) {
  if (bytes_for(units) <= bytes) return units;
  int64_t low = 0, high = units;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (bytes_for(middle) <= bytes ? low : high) = middle;
  }
  return low;
}

}  // namespace nvfp4::cpu
