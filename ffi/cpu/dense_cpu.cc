// Computes y[r, c] = sum_k W[c, k] x[r, k] for a few rows of x.
//
//   x  [m, k] f32      weight  [n, k] bf16      y  [m, n] f32
//
// Bottleneck: reading the weights. XLA's dot on a CPU first converts bfloat16 weights to float32,
// and so moves five times as many bytes, or twice as many where it keeps the converted weights.
//
// A work item is some rows of W, small enough to stay in the second-level cache while all rows of x
// use them. The arithmetic is in few_rows.h. Test: tests/ops/test_dense.py.
#include <algorithm>

#include "experts.h"
#include "ops.h"

namespace nvfp4::cpu {

void RunDenseCpu(const DenseArguments& p, const Kernels& kernels, ThreadPool& pool) {
  constexpr int64_t kItemBytes = 128 << 10;
  const int64_t step = std::max<int64_t>(1, kItemBytes / std::max<int64_t>(1, 2 * p.k));
  const int64_t ahead = pool.NumThreads() * step * p.k;  // items are taken in turns
  RunPhases(
      pool, 1, [&](int64_t) { return p.m ? CeilDivide(p.n, step) : 0; },
      [&](int64_t, int64_t item) {
        const int64_t first = item * step, columns = std::min(step, p.n - first);
        kernels.dense(p.weight + first * p.k, columns, p.k, p.x, p.m, ahead, p.y + first, p.n);
      });
}

}  // namespace nvfp4::cpu
