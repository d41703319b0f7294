// Computes y[r, c] = sum_k W[c, k] x[r, k] for a few rows of x, with weights in bfloat16.
//
// Each gemm_*.cc includes this file once, below its target pragma and elementwise.h, so that the
// compiler vectorizes the same text for each instruction set.
//
// A sum has one partial sum for each lane, which are added as a tree at the end. The order of the
// summation does not depend on the other rows and columns, nor on the instruction set.
namespace nvfp4::cpu {
namespace {

constexpr int kLanes = 16;         // partial sums of one result
constexpr int kMostDenseRows = 4;  // rows of x that share one read of W
constexpr int kMostColumns = 4;    // rows of W that share one read of x

// Computes kColumns columns of kRows rows.
template <int kColumns, int kRows>
inline void DenseTile(const uint16_t* weight, int64_t k, const float* x, float* y, int64_t stride) {
  float sum[kColumns][kRows][kLanes] = {};
  const int64_t whole = k / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    float w[kColumns][kLanes];
    for (int c = 0; c < kColumns; ++c) {
      for (int l = 0; l < kLanes; ++l) w[c][l] = BFloatToFloat(weight[c * k + i + l]);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        for (int l = 0; l < kLanes; ++l) sum[c][r][l] += w[c][l] * x[r * k + i + l];
      }
    }
  }
  for (int c = 0; c < kColumns; ++c) {
    for (int r = 0; r < kRows; ++r) {
      float* mine = sum[c][r];
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
  int64_t column = 0;
  for (; column + kMostColumns <= columns; column += kMostColumns)
    DenseTile<kMostColumns, kRows>(weight + column * k, k, x, y + column, stride);
  for (; column < columns; ++column)
    DenseTile<1, kRows>(weight + column * k, k, x, y + column, stride);
}

void Dense(const uint16_t* weight, int64_t columns, int64_t k, const float* x, int64_t rows,
           float* y, int64_t stride) {
  using Fn = void (*)(const uint16_t*, int64_t, int64_t, const float*, float*, int64_t);
  constexpr Fn kTable[kMostDenseRows + 1] = {nullptr, DenseColumns<1>, DenseColumns<2>,
                                             DenseColumns<3>, DenseColumns<4>};
  for (int64_t r = 0; r < rows; r += kMostDenseRows) {
    const int64_t here = rows - r < kMostDenseRows ? rows - r : kMostDenseRows;
    kTable[here](weight, columns, k, x + r * k, y + r * stride, stride);
  }
}

}  // namespace
}  // namespace nvfp4::cpu
