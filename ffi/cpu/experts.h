// Experts' weights, and which rows of x belong to which of them.
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

  // Groups a and b of an expert; b past the end repeats a. `advance` is how far on the groups are
  // that the caller takes next, 0 for none.
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

// Consecutive rows of one expert, at most kRowBlock.
struct RowBlock {
  int64_t expert;
  int64_t first;
  int64_t count;
};

// Most blocks of `rows` rows sorted into `experts`.
constexpr int64_t MostBlocks(int64_t rows, int64_t experts) {
  return rows / kRowBlock + std::min(rows, experts);
}

// Cuts [first, first + count) of an expert into blocks of about equal height; returns how many.
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

// Column pairs that one work item takes: enough weight bytes to be worth a claim, few enough
// items' worth of imbalance at the end of a phase.
inline int64_t PairsPerItem(int64_t k) {
  constexpr int64_t kItemBytes = 160 << 10;
  return std::max<int64_t>(1, kItemBytes / (kPair * k * 9 / 16));
}

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Hands out aligned pieces of a workspace, or only counts when it starts at null.
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

// Most units (tokens, rows) whose workspace fits: `bytes_for(units)` grows with units.
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
