// Computes out[r, c] = sum_n W[n, c] x[r, n] for 16 columns c: a product with transposed weights.
//
// Each gemm_*.cc includes this file once, below its target pragma and after elementwise.h.
//
// The lanes of a vector are rows n of W. A vector of x multiplies the vectors of several columns,
// and the lanes of a sum are added after the last n. Weights are unpacked and scaled to a panel,
// which is used for every row of x. A panel has four parts of four columns. A part has the four
// vectors of its columns for the first rows n, then those for the next rows n, and so on.
//
// An instruction set describes its vectors by a Unit. Vector is a vector of a panel or of x, and
// kValueBytes are the bytes of a value of x. The sums of kRows rows of x, four vectors each, fill
// the registers. CountVectors tells how many vectors a column has for so many groups of 16 rows n.
// Unpack fills a panel, and MultiplyAdd adds a product to a sum. AddSums adds the lanes of sums[c]
// to out[c], for four columns.
namespace nvfp4::cpu {
namespace {

constexpr int64_t kTileColumns = 4;
constexpr int64_t kPanelGroups = 64;  // of 16 rows n: a panel has 64 KiB of float32
constexpr int64_t kGroupsAhead = 8;   // how many groups ahead codes are prefetched

// Prefetches what is read after block `block` of a group. The same block of a later group goes to
// the first-level cache, and blocks of the next kBlocksTogether go to the second-level cache.
// Blocks are read along the groups, but are contiguous along the blocks. Memory is far faster if it
// is read as it lies. GCC removes calls of a function that only prefetches, unless it must be
// inlined.
__attribute__((always_inline)) inline void PrefetchColumns(const WeightColumns& weights,
                                                           int64_t block, int64_t group) {
  const int64_t near = group + kGroupsAhead;
  if (near < weights.groups) {
    __builtin_prefetch(weights.Codes(near, block));
    __builtin_prefetch(weights.Codes(near, block) + kCacheLine);
  }
  const int64_t together = block / kBlocksTogether;
  const int64_t step = block % kBlocksTogether * weights.groups + group;
  const int64_t later = (together + 1) * kBlocksTogether + step % kBlocksTogether;
  if (later < weights.end) weights.Prefetch(step / kBlocksTogether, later);
}

// Returns where vector v of a column is in a panel with `vectors` vectors of each column.
template <typename Unit>
inline uint8_t* PanelVector(uint8_t* panel, int64_t vectors, int64_t v, int64_t column) {
  const int64_t part = column / kTileColumns, within = column % kTileColumns;
  return panel + ((part * vectors + v) * kTileColumns + within) * sizeof(typename Unit::Vector);
}

template <typename Unit, int kCount>
void MultiplyTile(const uint8_t* panel, int64_t vectors, const uint8_t* x, int64_t stride,
                  float* out) {
  using Vector = typename Unit::Vector;
  Vector sums[kCount][kTileColumns] = {};
  for (int64_t v = 0; v < vectors; ++v, x += sizeof(Vector)) {
    Vector w[kTileColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kTileColumns; ++c, panel += sizeof(Vector))
      std::memcpy(&w[c], panel, sizeof(Vector));
#pragma GCC unroll 6
    for (int r = 0; r < kCount; ++r) {
      Vector values;
      std::memcpy(&values, x + r * stride, sizeof(Vector));
#pragma GCC unroll 4
      for (int c = 0; c < kTileColumns; ++c)
        sums[r][c] = Unit::MultiplyAdd(w[c], values, sums[r][c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kCount; ++r) Unit::AddSums(sums[r], out + r * kBlock);
}

// Multiplies any number of rows, panel by panel, in tiles of about equal height.
template <typename Unit>
void MultiplyColumns(const WeightColumns& weights, int64_t block, const Rows& rows, float* out) {
  using Fn = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, float*);
  constexpr int kMost = Unit::kRows;
  constexpr Fn kTable[] = {nullptr,
                           MultiplyTile<Unit, 1>,
                           MultiplyTile<Unit, 2>,
                           MultiplyTile<Unit, std::min(3, kMost)>,
                           MultiplyTile<Unit, std::min(4, kMost)>,
                           MultiplyTile<Unit, std::min(5, kMost)>,
                           MultiplyTile<Unit, std::min(6, kMost)>};
  std::fill(out, out + rows.count * kBlock, 0.0f);
  alignas(kCacheLine) uint8_t panel[kPanelGroups * kGroup * kBlock * Unit::kValueBytes];
  const int64_t tiles = (rows.count + kMost - 1) / kMost;
  const int64_t height = (rows.count + tiles - 1) / tiles;
  for (int64_t first = 0; first < weights.groups; first += kPanelGroups) {
    const int64_t groups = std::min(kPanelGroups, weights.groups - first);
    const int64_t vectors = Unit::CountVectors(groups);
    Unit::Unpack(weights, block, first, groups, panel);
    const uint8_t* x = rows.data + first * kGroup * Unit::kValueBytes;
    for (int64_t column = 0; column < kBlock; column += kTileColumns) {
      const uint8_t* part = PanelVector<Unit>(panel, vectors, 0, column);
      for (int64_t r = 0; r < rows.count; r += height) {
        kTable[std::min(height, rows.count - r)](part, vectors, x + r * rows.stride, rows.stride,
                                                 out + r * kBlock + column);
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4::cpu
