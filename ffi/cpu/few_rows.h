// Computes y[r, c] = sum_k W[c, k] x[r, k] for a few rows of x, with weights in bfloat16.
//
// Each gemm_*.cc includes this file once, below its target pragma, elementwise.h, and its
// DenseVectors, which are like `Vectors` of elementwise.h.
//
// A sum has one partial sum for each lane, which are added as a tree at the end. The order of the
// summation does not depend on the other rows and columns, nor on the instruction set.
//
// A block of x stays in the first-level cache while all columns of a work item are multiplied by
// it. The partial sums of these columns are in memory from block to block.
namespace nvfp4::cpu {
namespace {

constexpr int kLanes = 16;  // partial sums of one result
// Rows of x that share one read of W, and rows of W that share one read of x. The sums of a tile
// fit into the registers beside the weights.
constexpr bool kManyRegisters = DenseVectors::kRegisters == 32;
constexpr int kMostDenseRows = kManyRegisters ? 8 : 2;
template <int kRows>
constexpr int kColumnsOf = kRows == 1        ? 4
                           : !kManyRegisters ? 2
                           : kRows > 5       ? 3
                                             : 4;

constexpr int64_t kMostColumns = 32;    // whose partial sums are in memory
constexpr int kRowsOfMemory = 4;        // up to which arithmetic is short beside memory
constexpr int64_t kBlockFloats = 4096;  // numbers of x that stay in the first-level cache
constexpr int64_t kPrefetched = 32;     // bfloat16 of a cache line

// The partial sums of a result, or as many values.
struct Lanes {
  static constexpr int kWidth = DenseVectors::kWidth, kParts = kLanes / kWidth;
  DenseVectors::Floats parts[kParts];
};

__attribute__((always_inline)) inline void LoadLanes(const float* x, Lanes* lanes) {
#pragma GCC unroll 4
  for (int p = 0; p < Lanes::kParts; ++p)
    std::memcpy(&lanes->parts[p], x + p * Lanes::kWidth, sizeof(lanes->parts[p]));
}

__attribute__((always_inline)) inline void LoadLanes(const uint16_t* weight, Lanes* lanes) {
#pragma GCC unroll 4
  for (int p = 0; p < Lanes::kParts; ++p)
    lanes->parts[p] = DenseVectors::Widen(weight + p * Lanes::kWidth);
}

// Without this, GCC reads x again for each multiplication, and loads become the bottleneck.
__attribute__((always_inline)) inline void KeepInRegisters(Lanes* lanes) {
#if defined(__x86_64__)
#pragma GCC unroll 4
  for (int p = 0; p < Lanes::kParts; ++p) __asm__("" : "+v"(lanes->parts[p]));
#else
  (void)lanes;
#endif
}

// Adds the products of k in [from, to) to the partial sums [kColumns, kRows], or starts with them.
// The loops over both are unrolled, because GCC otherwise keeps the sums in memory, which makes
// them three times as slow.
//
// A column is a page of memory, or a few, so that the hardware starts anew to prefetch each one.
// The columns of the next tile are therefore prefetched here. With more than kRowsOfMemory rows,
// the arithmetic takes about as long as reading, and hides it only if requests are far ahead.
// Weights that lie `ahead` numbers ahead then come to the second-level cache.
template <int kColumns, int kRows>
inline void DenseTile(const uint16_t* weight, int64_t k, const float* x, int64_t from, int64_t to,
                      int64_t ahead, float* partial) {
  Lanes sum[kColumns][kRows] = {};
  if (from) std::memcpy(&sum, partial, sizeof(sum));
  for (int64_t i = from; i < to; i += kLanes) {
    Lanes w[kColumns];
    if (i % kPrefetched == 0) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) __builtin_prefetch(weight + (kColumns + c) * k + i);
      if (kRows > kRowsOfMemory) {
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) __builtin_prefetch(weight + c * k + i + ahead, 0, 2);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) LoadLanes(weight + c * k + i, &w[c]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Lanes here;
      LoadLanes(x + r * k + i, &here);
      KeepInRegisters(&here);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
        for (int p = 0; p < Lanes::kParts; ++p) sum[c][r].parts[p] += w[c].parts[p] * here.parts[p];
      }
    }
  }
  std::memcpy(partial, &sum, sizeof(sum));
}

// Returns the sum of the partial sums of a result, to which the products of k from `whole` on are
// added first.
inline float SumLanes(const float* partial, const uint16_t* weight, const float* x, int64_t whole,
                      int64_t k) {
  float mine[kLanes];
  std::memcpy(mine, partial, sizeof(mine));
  for (int64_t i = whole; i < k; ++i) mine[i - whole] += BFloatToFloat(weight[i]) * x[i];
  for (int half = kLanes / 2; half; half /= 2) {
    for (int l = 0; l < half; ++l) mine[l] += mine[l + half];
  }
  return mine[0];
}

// Computes some columns, at most kMostColumns, of kRows rows.
template <int kRows>
void DenseColumns(const uint16_t* weight, int64_t columns, int64_t k, const float* x, int64_t ahead,
                  float* y, int64_t stride) {
  constexpr int kColumns = kColumnsOf<kRows>;
  constexpr int64_t kStep = kBlockFloats / kRows / kPrefetched * kPrefetched;
  alignas(64) float partial[kMostColumns * kRows * kLanes];
  const int64_t whole = k / kLanes * kLanes;
  for (int64_t from = 0; from == 0 || from < whole; from += kStep) {
    const int64_t to = std::min(from + kStep, whole);
    int64_t column = 0;
    for (; column + kColumns <= columns; column += kColumns)
      DenseTile<kColumns, kRows>(weight + column * k, k, x, from, to, ahead,
                                 partial + column * kRows * kLanes);
    for (; column < columns; ++column)
      DenseTile<1, kRows>(weight + column * k, k, x, from, to, ahead,
                          partial + column * kRows * kLanes);
  }
  for (int64_t column = 0; column < columns; ++column) {
    for (int r = 0; r < kRows; ++r)
      y[r * stride + column] = SumLanes(partial + (column * kRows + r) * kLanes,
                                        weight + column * k, x + r * k, whole, k);
  }
}

void Dense(const uint16_t* weight, int64_t columns, int64_t k, const float* x, int64_t rows,
           int64_t ahead, float* y, int64_t stride) {
  using Fn = void (*)(const uint16_t*, int64_t, int64_t, const float*, int64_t, float*, int64_t);
  constexpr int kMost = kMostDenseRows;
  constexpr Fn kTable[] = {nullptr,
                           DenseColumns<1>,
                           DenseColumns<2>,
                           DenseColumns<std::min(3, kMost)>,
                           DenseColumns<std::min(4, kMost)>,
                           DenseColumns<std::min(5, kMost)>,
                           DenseColumns<std::min(6, kMost)>,
                           DenseColumns<std::min(7, kMost)>,
                           DenseColumns<kMost>};
  for (int64_t r = 0; r < rows; r += kMost) {
    const auto multiply = kTable[std::min<int64_t>(rows - r, kMost)];
    for (int64_t c = 0; c < columns; c += kMostColumns) {
      multiply(weight + c * k, std::min(columns - c, kMostColumns), k, x + r * k, ahead,
               y + r * stride + c, stride);
    }
  }
}

}  // namespace
}  // namespace nvfp4::cpu
