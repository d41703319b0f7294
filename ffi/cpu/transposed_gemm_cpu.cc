// Computes y[r] = x[r] @ W[e(r)] for rows that are sorted by expert: the product of a backward
// pass.
//
//   x, y          [m, n], [m, k]  bf16, f16 or f32; float32 sums
//   packed        [e, n_pad, k]   NVFP4 in layout "cpu_16x16" (kernels.h)
//   global_scale  [e]
//   group_sizes   [e], as in grouped_gemm_w4a16_cpu.cc
//
// Rows past the sum of group_sizes become zeros.
//
// A block of the layout has 16 rows of W side by side, and 16 columns. A work item takes all blocks
// of some columns, so that sums over the rows of W stay in registers (transposed_tiles.h).
//
// Bottleneck: reading weights and unpacking them while experts have few rows, then multiply-add.
//
// Test: tests/backends/test_cpu_transposed.py. Reference: `transposed_gemm` of
// ops/experts/meaning.py.
#include "grouped_rows.h"
#include "ops.h"

namespace nvfp4::cpu {
namespace {

constexpr int64_t kItemBytes = 160 << 10;  // of weights, as in PairsPerItem

// Reorders bfloat16 values [n_pad] as kernels read them: pairs of values that are 16 apart.
void PairGroups(int64_t n_pad, uint8_t* row) {
  uint16_t groups[2][kGroup], pairs[kGroup][2];
  for (uint8_t* end = row + n_pad * sizeof(uint16_t); row < end; row += sizeof(pairs)) {
    std::memcpy(groups, row, sizeof(groups));
    for (int64_t i = 0; i < kGroup; ++i) {
      pairs[i][0] = groups[0][i];
      pairs[i][1] = groups[1][i];
    }
    std::memcpy(row, pairs, sizeof(pairs));
  }
}

class TransposedGemm : public GroupedRows {
 public:
  TransposedGemm(const TransposedGemmArguments& arguments, const Kernels& kernels)
      : GroupedRows(
            {arguments.m, arguments.e, arguments.n, arguments.k, arguments.group_sizes, arguments.x,
             arguments.y, arguments.type, arguments.workspace, arguments.workspace_bytes},
            kernels.transposed_rows(arguments.type), kernels),
        p_(arguments),
        groups_(CeilDivide(p_.n, kGroup)),
        step_(RoundUp(std::max<int64_t>(1, kItemBytes / ((groups_ + 1) * (kBlockCodes + kGroup)) -
                                               kBlocksTogether / 2),
                      kBlocksTogether)) {}

 private:
  static constexpr int64_t kBlockCodes = kGroup * kBlock / 2;  // bytes

  int64_t Blocks() const { return p_.k / kBlock; }
  int64_t ItemsOfBlock() const override { return CeilDivide(Blocks(), step_); }

  float Prepare(int64_t, const void* x, uint8_t* prepared) const override {
    const RowSource source = {x, p_.type, p_.n, false, 1.0f, ActivationScale::kNone, 1.0f};
    kernels_.prepare_row(source, format_, prepared);
    if (format_.bf16) PairGroups(RoundUp(p_.n, kRowPadding), prepared);
    return 1.0f;
  }

  void Multiply(int64_t first_row, const RowBlock& block, int64_t item) const override {
    const int64_t before = block.expert * groups_ * p_.k;
    const int64_t first = item * step_, end = std::min(first + step_, Blocks());
    const WeightColumns weights = {p_.packed + before * kGroup / 2, p_.block_scale + before,
                                   groups_, p_.k, end};
    for (int64_t g = 0; g < groups_; ++g) {
      for (int64_t b = first; b < std::min(first + kBlocksTogether, end); ++b)
        weights.Prefetch(g, b);
    }
    alignas(kCacheLine) float sums[kRowBlock * kBlock];
    for (int64_t b = first; b < end; ++b) {
      kernels_.multiply_transposed(weights, b, RowsOf(block), sums);
      for (int64_t i = 0; i < block.count * kBlock; ++i) sums[i] *= p_.global_scale[block.expert];
      for (int64_t r = 0; r < block.count; ++r) {
        kernels_.round(sums + r * kBlock, kBlock, p_.type,
                       Output(first_row + block.first + r, b * kBlock));
      }
    }
  }

  const TransposedGemmArguments& p_;
  const int64_t groups_, step_;
};

}  // namespace

int64_t TransposedGemmCpuWorkspace(const TransposedGemmArguments& arguments, const Kernels& kernels,
                                   int64_t rows) {
  return TransposedGemm(arguments, kernels).WorkspaceBytes(rows);
}

bool RunTransposedGemmCpu(const TransposedGemmArguments& arguments, const Kernels& kernels,
                          ThreadPool& pool) {
  return TransposedGemm(arguments, kernels).Run(pool);
}

}  // namespace nvfp4::cpu
