// Computes y[r] = W[e(r)] @ x[r] + bias for rows that are sorted by expert.
//
//   x, y          [m, k], [m, n]  bf16, f16 or f32; float32 sums
//   packed        [e, n_pad, k]   NVFP4 in layout "cpu_16x16" (kernels.h)
//   group_sizes   [e]  number of rows of each expert; negative numbers count as 0. Null if one
//                 expert owns all rows
//
// Rows past the sum of group_sizes become zeros. W4A4 quantizes rows as it prepares them.
//
// Bottleneck: reading weights while experts have few rows, then the matrix products (gemm_*.cc).
//
// Test: tests/backends/test_cpu_kernel.py. Reference: ops/experts/meaning.py.
#include "grouped_rows.h"
#include "ops.h"

namespace nvfp4::cpu {
namespace {

class GroupedGemm : public GroupedRows {
 public:
  GroupedGemm(const GroupedGemmShape& shape, const GroupedGemmArguments& arguments,
              const Kernels& kernels)
      : GroupedRows({shape.m, shape.e, shape.k, shape.n, arguments.group_sizes, arguments.x,
                     arguments.y, arguments.type, arguments.workspace, arguments.workspace_bytes},
                    kernels.row_format(arguments.type, arguments.activation_scale,
                                       shape.e ? shape.m / shape.e : 0),
                    kernels),
        s_(shape),
        p_(arguments),
        weights_{p_.packed, p_.block_scale, s_.n_pad / kGroup, s_.k},
        pairs_(CeilDivide(s_.n, kPair)),
        step_(PairsPerItem(s_.k)) {}

 private:
  int64_t ItemsOfBlock() const override { return CeilDivide(pairs_, step_); }

  float Prepare(int64_t expert, const void* x, uint8_t* prepared) const override {
    const float g = p_.activation_scale == ActivationScale::kStatic ? p_.input_scale[expert] : 1.0f;
    const RowSource source = {x, p_.type, s_.k, false, 1.0f, p_.activation_scale, g};
    return kernels_.prepare_row(source, format_, prepared);
  }

  void Multiply(int64_t first_row, const RowBlock& block, int64_t item) const override {
    const int64_t first = item * step_, end = std::min(first + step_, pairs_);
    for (int64_t pair = first; pair < end; ++pair)
      MultiplyPair(first_row, block, pair, pair + 1 == end);
  }

  void MultiplyPair(int64_t first_row, const RowBlock& block, int64_t pair, bool last) const {
    alignas(kCacheLine) float acc[kRowBlock * kPair];
    const WeightPair weights = weights_.pair(block.expert, 2 * pair, 2 * pair + 1, last ? 0 : 2);
    kernels_.multiply(weights, RowsOf(block), acc);
    const int64_t column = pair * kPair, columns = std::min(kPair, s_.n - column);
    Affine affine;
    affine.row_scale = ScalesOf(block);
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
  const ExpertWeights weights_;
  const int64_t pairs_, step_;
};

}  // namespace

int64_t GroupedGemmW4A16CpuWorkspace(const GroupedGemmShape& shape,
                                     const GroupedGemmArguments& arguments, const Kernels& kernels,
                                     int64_t rows) {
  return GroupedGemm(shape, arguments, kernels).WorkspaceBytes(rows);
}

bool RunGroupedGemmW4A16Cpu(const GroupedGemmShape& shape, const GroupedGemmArguments& arguments,
                            const Kernels& kernels, ThreadPool& pool) {
  return GroupedGemm(shape, arguments, kernels).Run(pool);
}

}  // namespace nvfp4::cpu
