// Computes y[r] = W[e(r)] @ x[r] + bias for rows that are sorted by expert.
//
//   x, y          [m, k], [m, n]  bf16, f16 or f32; float32 sums
//   packed        [e, n_pad, k]   NVFP4 in layout "cpu_16x16" (kernels.h)
//   group_sizes   [e]  number of rows of each expert; negative numbers count as 0. Null if one
//                 expert owns all rows
//
// Rows past the sum of group_sizes become zeros.
//
// Bottleneck: reading weights while experts have few rows, then the matrix products (gemm_*.cc).
//
// A round takes as many rows as the workspace holds. It has these phases (phases.h):
//   route     finds blocks of rows from the prefix sums of group_sizes
//   prepare   converts x to rows in the format of the kernels; quantizes them in W4A4
//   multiply  for each (row block, column pairs): product, scale, bias, rounding -> y
//
// Test: tests/backends/test_cpu_kernel.py. Reference: ops/experts/meaning.py.
#include <cstring>

#include "experts.h"
#include "ops.h"

namespace nvfp4::cpu {
namespace {

enum Stage : int64_t { kRoute, kPrepare, kMultiply, kStages };

constexpr int64_t kItemValues = 1 << 16;  // values that one item of phase `prepare` converts

class GroupedGemm {
 public:
  GroupedGemm(const GroupedGemmShape& shape, const GroupedGemmArguments& arguments,
              const Kernels& kernels)
      : s_(shape), p_(arguments), kernels_(kernels) {
    format_ = kernels.row_format(p_.type, p_.activation_scale, s_.e ? s_.m / s_.e : 0);
    stride_ = format_.stride(s_.k);
    weights_ = {p_.packed, p_.block_scale, s_.n_pad / kGroup, s_.k};
    pairs_ = CeilDivide(s_.n, kPair);
    step_ = PairsPerItem(s_.k);
  }

  int64_t WorkspaceBytes(int64_t rows) {
    Carver carver(nullptr);
    Carve(carver, rows);
    return carver.used();
  }

  bool Begin() {
    round_rows_ =
        LargestFit(s_.m, p_.workspace_bytes, [this](int64_t rows) { return WorkspaceBytes(rows); });
    return round_rows_ > 0 || s_.m == 0;
  }

  void Run(ThreadPool& pool) {
    if (s_.m == 0) return;
    Carver carver(p_.workspace);
    Carve(carver, round_rows_);
    int64_t end = 0;
    for (int64_t e = 0; e < s_.e; ++e) {
      const int64_t own = p_.group_sizes == nullptr ? s_.m : std::max(0, p_.group_sizes[e]);
      end = std::min(s_.m, end + own);
      ends_[e] = end;
    }
    ends_[s_.e] = s_.m;  // the rest has no expert; Prepare writes zeros
    RunPhases(
        pool, CeilDivide(s_.m, round_rows_) * kStages,
        [this](int64_t phase) { return Items(phase / kStages, phase % kStages); },
        [this](int64_t phase, int64_t item) { Do(phase / kStages, phase % kStages, item); });
  }

 private:
  void Carve(Carver& carver, int64_t rows) {
    ends_ = carver.Take<int64_t>(s_.e + 1);
    blocks_ = carver.Take<RowBlock>(MostBlocks(rows, s_.e));
    scale_ = carver.Take<float>(rows);
    x_ = carver.Take<uint8_t>((rows + kGroup) * stride_);
  }

  int64_t FirstRow(int64_t round) const { return round * round_rows_; }
  int64_t RoundRows(int64_t round) const { return std::min(round_rows_, s_.m - FirstRow(round)); }
  int64_t RowsPerItem() const { return std::max<int64_t>(1, kItemValues / s_.k); }

  int64_t Items(int64_t round, int64_t stage) const {
    switch (stage) {
      case kRoute:
        return 1;
      case kPrepare:
        return CeilDivide(RoundRows(round), RowsPerItem());
      default:
        return block_count_ * CeilDivide(pairs_, step_);
    }
  }

  void Do(int64_t round, int64_t stage, int64_t item) {
    switch (stage) {
      case kRoute:
        return Route(round);
      case kPrepare:
        return Prepare(round, item);
      default:
        return Multiply(round, item);
    }
  }

  // Finds the row blocks of this round. They count rows from the first row of the round.
  void Route(int64_t round) {
    block_count_ = 0;
    const int64_t first = FirstRow(round), last = first + RoundRows(round);
    int64_t begin = 0;
    for (int64_t e = 0; e < s_.e; ++e) {
      const int64_t low = std::max(begin, first), high = std::min(ends_[e], last);
      if (low < high) block_count_ += CutRows(e, low - first, high - low, blocks_ + block_count_);
      begin = ends_[e];
    }
  }

  void Prepare(int64_t round, int64_t item) const {
    const int64_t first = item * RowsPerItem();
    const int64_t end = std::min(first + RowsPerItem(), RoundRows(round));
    int64_t expert = std::upper_bound(ends_, ends_ + s_.e, FirstRow(round) + first) - ends_;
    for (int64_t r = first; r < end; ++r) {
      const int64_t row = FirstRow(round) + r;
      while (expert < s_.e && row >= ends_[expert]) ++expert;
      if (expert == s_.e) {
        std::memset(Output(row, 0), 0, s_.n * Bytes(p_.type));
        continue;
      }
      const float g =
          p_.activation_scale == ActivationScale::kStatic ? p_.input_scale[expert] : 1.0f;
      const RowSource source = {static_cast<const uint8_t*>(p_.x) + row * s_.k * Bytes(p_.type),
                                p_.type,
                                s_.k,
                                false,
                                1.0f,
                                p_.activation_scale,
                                g};
      scale_[r] = kernels_.prepare_row(source, format_, x_ + r * stride_);
    }
  }

  uint8_t* Output(int64_t row, int64_t column) const {
    return static_cast<uint8_t*>(p_.y) + (row * s_.n + column) * Bytes(p_.type);
  }

  void Multiply(int64_t round, int64_t item) const {
    const int64_t items = CeilDivide(pairs_, step_);
    const RowBlock& block = blocks_[item / items];
    const int64_t first = item % items * step_, end = std::min(first + step_, pairs_);
    for (int64_t pair = first; pair < end; ++pair)
      MultiplyPair(FirstRow(round), block, pair, pair + 1 == end);
  }

  void MultiplyPair(int64_t first_row, const RowBlock& block, int64_t pair, bool last) const {
    alignas(kCacheLine) float acc[kRowBlock * kPair];
    const Rows rows = {x_ + block.first * stride_, stride_, block.count, format_};
    const WeightPair weights = weights_.pair(block.expert, 2 * pair, 2 * pair + 1, last ? 0 : 2);
    kernels_.multiply(weights, rows, acc);
    const int64_t column = pair * kPair, columns = std::min(kPair, s_.n - column);
    Affine affine;
    affine.row_scale = scale_ + block.first;
    for (int64_t c = 0; c < kPair; ++c) {
      const int64_t n = std::min(column + c, s_.n - 1);
      affine.scale[c] = p_.global_scale[block.expert * s_.parts + n * s_.parts / s_.n];
      affine.bias[c] = p_.bias ? p_.bias[block.expert * s_.n + n] : 0.0f;
    }
    kernels_.scale_and_bias(affine, block.count, acc);
    for (int64_t r = 0; r < block.count; ++r) {
      kernels_.round(acc + r * kPair, columns, p_.type,
                     Output(first_row + block.first + r, column));
    }
  }

  const GroupedGemmShape s_;
  const GroupedGemmArguments& p_;
  const Kernels& kernels_;
  ExpertWeights weights_;
  RowFormat format_;
  int64_t stride_, pairs_, step_;
  int64_t round_rows_ = 0;
  int64_t* ends_ = nullptr;     // [e + 1] where the rows of an expert end
  RowBlock* blocks_ = nullptr;  // blocks of this round
  int64_t block_count_ = 0;     // written by Route, read by later phases
  float* scale_ = nullptr;      // [rows] scales of prepared rows
  uint8_t* x_ = nullptr;        // [rows, stride]
};

}  // namespace

int64_t GroupedGemmW4A16CpuWorkspace(const GroupedGemmShape& shape,
                                     const GroupedGemmArguments& arguments, const Kernels& kernels,
                                     int64_t rows) {
  return GroupedGemm(shape, arguments, kernels).WorkspaceBytes(rows);
}

bool RunGroupedGemmW4A16Cpu(const GroupedGemmShape& shape, const GroupedGemmArguments& arguments,
                            const Kernels& kernels, ThreadPool& pool) {
  GroupedGemm gemm(shape, arguments, kernels);
  if (!gemm.Begin()) return false;
  gemm.Run(pool);
  return true;
}

}  // namespace nvfp4::cpu
