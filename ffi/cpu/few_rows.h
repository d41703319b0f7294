// Computes y[r, c] = sum_k W[c, k] x[r, k] for a few rows of x, with weights in bfloat16.
//
// Each gemm_*.cc includes this file once, below its target pragma, elementwise.h, and its
// DenseVectors, which are like `Vectors` of elementwise.h.
//
// A sum has one partial sum for each lane, which are added as a tree at the end. The order of the
// summation does not depend on the other rows and columns, nor on the instruction set.
namespace nvfp4::cpu {
namespace {

constexpr int kLanes = 16;  // partial sums of one result
// Rows of x that share one read of W, and rows of W that share one read of x. The sums of a tile
// fit into the registers: 16 vectors of 32, or 8 of 16.
constexpr int kMostDenseRows = DenseVectors::kRegisters == 32 ? 4 : 2;
template <int kRows>
constexpr int kColumnsOf = kRows == 1 ? 4 : kMostDenseRows;

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

// Computes kColumns columns of kRows rows. The loops over both are unrolled, because GCC otherwise
// keeps the sums in memory, which makes them three times as slow.
template <int kColumns, int kRows>
inline void DenseTile(const uint16_t* weight, int64_t k, const float* x, float* y, int64_t stride) {
  Lanes sum[kColumns][kRows] = {};
  const int64_t whole = k / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes w[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) LoadLanes(weight + c * k + i, &w[c]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Lanes here;
      LoadLanes(x + r * k + i, &here);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
        for (int p = 0; p < Lanes::kParts; ++p) sum[c][r].parts[p] += w[c].parts[p] * here.parts[p];
      }
    }
  }
  for (int c = 0; c < kColumns; ++c) {
    for (int r = 0; r < kRows; ++r) {
      float mine[kLanes];
      std::memcpy(mine, &sum[c][r], sizeof(mine));
      for (int64_t i = whole; i < k; ++i)
        mine[i - whole] += BFloatToFloat(weight[c * k + i]) * x[r * k + i];
      for (int half = kLanes / 2; half; half /= 2) {
        for (int l = 0; l < half; ++l) mine[l] += mine[l + half];
      }
      y[r * stride + c] = mine[0];
    }
  }
}

template <int kRows>
void DenseColumns(const uint16_t* weight, int64_t columns, int64_t k, const float* x, float* y,
                  int64_t stride) {
  constexpr int kColumns = kColumnsOf<kRows>;
  int64_t column = 0;
  for (; column + kColumns <= columns; column += kColumns)
    DenseTile<kColumns, kRows>(weight + column * k, k, x, y + column, stride);
  for (; column < columns; ++column)
    DenseTile<1, kRows>(weight + column * k, k, x, y + column, stride);
}

void Dense(const uint16_t* weight, int64_t columns, int64_t k, const float* x, int64_t rows,
           float* y, int64_t stride) {
  using Fn = void (*)(const uint16_t*, int64_t, int64_t, const float*, float*, int64_t);
  constexpr Fn kTable[] = {nullptr, DenseColumns<1>, DenseColumns<2>,
                           DenseColumns<std::min(3, kMostDenseRows)>, DenseColumns<kMostDenseRows>};
  for (int64_t r = 0; r < rows; r += kMostDenseRows) {
    const int64_t here = rows - r < kMostDenseRows ? rows - r : kMostDenseRows;
    kTable[here](weight, columns, k, x + r * k, y + r * stride, stride);
  }
}

}  // namespace
}  // namespace nvfp4::cpu
