// A product of rows that are sorted by expert, each with a matrix of its expert, in rounds.
//
// A round takes as many rows as the workspace holds. Its phases (phases.h) are these.
//
// `route` finds blocks of rows from the prefix sums of group_sizes. `prepare` converts rows of x to
// the format of the kernels, and writes zeros to y for rows of no expert. `multiply` does what the
// derived class computes, for each block of rows and each part of the columns of y.
#pragma once

#include <algorithm>
#include <cstring>

#include "experts.h"
#include "phases.h"

namespace nvfp4::cpu {

struct GroupedRowsArguments {
  int64_t m, e;
  int64_t inputs, outputs;     // of a row
  const int32_t* group_sizes;  // negative numbers count as 0. Null if one expert owns all rows
  const void* x;               // [m, inputs]
  void* y;                     // [m, outputs]
  DataType type;               // of x and y
  uint8_t* workspace;
  int64_t workspace_bytes;
};

class GroupedRows {
 public:
  GroupedRows(const GroupedRowsArguments& arguments, RowFormat format, const Kernels& kernels)
      : kernels_(kernels),
        format_(format),
        stride_(format.stride(arguments.inputs)),
        p_(arguments) {}
  virtual ~GroupedRows() = default;

  int64_t WorkspaceBytes(int64_t rows) {
    Carver carver(nullptr);
    Carve(carver, rows);
    return carver.used();
  }

  // Returns false if the workspace is too small for a single row.
  bool Run(ThreadPool& pool) {
    round_rows_ =
        LargestFit(p_.m, p_.workspace_bytes, [this](int64_t rows) { return WorkspaceBytes(rows); });
    if (p_.m == 0) return true;
    if (round_rows_ == 0) return false;
    Carver carver(p_.workspace);
    Carve(carver, round_rows_);
    int64_t end = 0;
    for (int64_t e = 0; e < p_.e; ++e) {
      const int64_t own = p_.group_sizes == nullptr ? p_.m : std::max(0, p_.group_sizes[e]);
      end = std::min(p_.m, end + own);
      ends_[e] = end;
    }
    ends_[p_.e] = p_.m;  // the rest has no expert; Prepare writes zeros
    RunPhases(
        pool, CeilDivide(p_.m, round_rows_) * kStages,
        [this](int64_t phase) { return Items(phase / kStages, phase % kStages); },
        [this](int64_t phase, int64_t item) { Do(phase / kStages, phase % kStages, item); });
    return true;
  }

 protected:
  // Returns into how many items the columns of a row block are cut.
  virtual int64_t ItemsOfBlock() const = 0;

  // Multiplies the rows of a block, which counts rows from `first_row`. `item` says which columns.
  virtual void Multiply(int64_t first_row, const RowBlock& block, int64_t item) const = 0;

  // Writes a row of x to `prepared`, and returns the scale that its products must be multiplied by.
  virtual float Prepare(int64_t expert, const void* x, uint8_t* prepared) const = 0;

  Rows RowsOf(const RowBlock& block) const {
    return {x_ + block.first * stride_, stride_, block.count, format_};
  }
  const float* ScalesOf(const RowBlock& block) const { return scale_ + block.first; }
  void* Output(int64_t row, int64_t column) const {
    return static_cast<uint8_t*>(p_.y) + (row * p_.outputs + column) * Bytes(p_.type);
  }

  const Kernels& kernels_;
  const RowFormat format_;
  const int64_t stride_;

 private:
  enum Stage : int64_t { kRoute, kPrepare, kMultiply, kStages };

  static constexpr int64_t kItemValues = 1 << 16;  // values that one item of `prepare` converts

  void Carve(Carver& carver, int64_t rows) {
    ends_ = carver.Take<int64_t>(p_.e + 1);
    blocks_ = carver.Take<RowBlock>(MostBlocks(rows, p_.e));
    scale_ = carver.Take<float>(rows);
    x_ = carver.Take<uint8_t>((rows + kGroup) * stride_);
  }

  int64_t FirstRow(int64_t round) const { return round * round_rows_; }
  int64_t RoundRows(int64_t round) const { return std::min(round_rows_, p_.m - FirstRow(round)); }
  int64_t RowsPerItem() const {
    return std::max<int64_t>(1, kItemValues / std::max<int64_t>(1, p_.inputs));
  }

  int64_t Items(int64_t round, int64_t stage) const {
    switch (stage) {
      case kRoute:
        return 1;
      case kPrepare:
        return CeilDivide(RoundRows(round), RowsPerItem());
      default:
        return block_count_ * ItemsOfBlock();
    }
  }

  void Do(int64_t round, int64_t stage, int64_t item) {
    switch (stage) {
      case kRoute:
        return Route(round);
      case kPrepare:
        return PrepareRows(round, item);
      default:
        return Multiply(FirstRow(round), blocks_[item / ItemsOfBlock()], item % ItemsOfBlock());
    }
  }

  // Finds the row blocks of this round. They count rows from the first row of the round.
  void Route(int64_t round) {
    block_count_ = 0;
    const int64_t first = FirstRow(round), last = first + RoundRows(round);
    int64_t begin = 0;
    for (int64_t e = 0; e < p_.e; ++e) {
      const int64_t low = std::max(begin, first), high = std::min(ends_[e], last);
      if (low < high) block_count_ += CutRows(e, low - first, high - low, blocks_ + block_count_);
      begin = ends_[e];
    }
  }

  void PrepareRows(int64_t round, int64_t item) const {
    const int64_t first = item * RowsPerItem();
    const int64_t end = std::min(first + RowsPerItem(), RoundRows(round));
    int64_t expert = std::upper_bound(ends_, ends_ + p_.e, FirstRow(round) + first) - ends_;
    for (int64_t r = first; r < end; ++r) {
      const int64_t row = FirstRow(round) + r;
      while (expert < p_.e && row >= ends_[expert]) ++expert;
      if (expert == p_.e) {
        std::memset(Output(row, 0), 0, p_.outputs * Bytes(p_.type));
        continue;
      }
      const auto* x = static_cast<const uint8_t*>(p_.x) + row * p_.inputs * Bytes(p_.type);
      scale_[r] = Prepare(expert, x, x_ + r * stride_);
    }
  }

  const GroupedRowsArguments p_;
  int64_t round_rows_ = 0;
  int64_t* ends_ = nullptr;     // [e + 1] where the rows of an expert end
  RowBlock* blocks_ = nullptr;  // blocks of this round
  int64_t block_count_ = 0;     // written by Route, read by later phases
  float* scale_ = nullptr;      // [rows] scales of prepared rows
  uint8_t* x_ = nullptr;        // [rows, stride]
};

}  // namespace nvfp4::cpu
