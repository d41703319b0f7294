// Multiplies by transposed weights with AVX-512: a few rows in registers, more rows by panels.
//
// gemm_avx512.cc and gemm_amx.cc include this file below their target pragma, after unpack_avx512.h
// and transposed_tiles.h.
//
// The words of the layout give the columns 2 j and 2 j + 1 of 16 rows n, one row in each lane. A
// shift or a mask makes float32 of one column.
//
// With few rows, block scales multiply the 16 rows n of x, once for 16 columns. Codes then stay
// unscaled. In bfloat16, two groups of 16 rows n make the pairs that vdpbf16ps adds, also in x.
// Otherwise panels are float32.
namespace nvfp4::cpu {
namespace {

constexpr int kFewTransposed = 3;  // rows whose sums for 8 columns fill the registers

// out[c] += the sum of the lanes of sums[c], for four columns.
inline void AddLanes(const __m512 sums[kTileColumns], float* out) {
  const __m512 ab =
      _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
  const __m512 cd =
      _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  const __m128 whole = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), whole));
}

// Calls use(nibble) for each nibble j of the words of a vector.
template <typename Use>
__attribute__((always_inline)) inline void EachNibble(const Use& use) {
  use(std::integral_constant<int, 0>());
  use(std::integral_constant<int, 1>());
  use(std::integral_constant<int, 2>());
  use(std::integral_constant<int, 3>());
}

struct Float32Columns {
  using Vector = __m512;
  static constexpr int64_t kValueBytes = sizeof(float);
  static constexpr int kRows = 6;

  static int64_t CountVectors(int64_t groups) { return groups; }

  // Returns the values of a row for the 16 rows n of a group.
  static __m512 Read(const uint8_t* x, int64_t group) {
    return _mm512_loadu_ps(x + group * kGroup * kValueBytes);
  }
  static __m512 MultiplyAdd(__m512 w, __m512 x, __m512 sum) { return _mm512_fmadd_ps(w, x, sum); }
  static void AddSums(const __m512 sums[kTileColumns], float* out) { AddLanes(sums, out); }

  static void Unpack(const WeightColumns& weights, int64_t block, int64_t first, int64_t groups,
                     uint8_t* panel) {
    const __m512i table = CodeTable();
    for (int64_t g = 0; g < groups; ++g) {
      PrefetchColumns(weights, block, first + g);
      const __m512 scale = ScaleVector(weights.Scales(first + g, block));
      for (int z = 0; z < 2; ++z) {
        const __m512i v = _mm512_loadu_si512(weights.Codes(first + g, block) + z * 64);
        EachNibble([&](auto nibble) {
          const __m512i q = Codes<nibble>(v, table);
          const int64_t column = z * 8 + 2 * nibble;
          _mm512_store_ps(PanelVector<Float32Columns>(panel, groups, g, column),
                          _mm512_mul_ps(EvenFloats(q), scale));
          _mm512_store_ps(PanelVector<Float32Columns>(panel, groups, g, column + 1),
                          _mm512_mul_ps(OddFloats(q), scale));
        });
      }
    }
  }
};

// Joins float32 that bfloat16 holds exactly: the 16 rows n of a group and of the next one.
inline __m512 JoinPairs(__m512 first, __m512 second) {
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16),
                                             _mm512_castps_si512(second)));
}

struct BFloat16Columns {
  using Vector = __m512;
  static constexpr int64_t kValueBytes = sizeof(uint16_t);
  static constexpr int kRows = 6;

  static int64_t CountVectors(int64_t groups) { return (groups + 1) / 2; }

  static __m512 Read(const uint8_t* x, int64_t group) {
    const __m512i pairs = _mm512_loadu_si512(x + group / 2 * sizeof(__m512i));
    return group % 2 ? OddFloats(pairs) : EvenFloats(pairs);
  }
  static __m512 MultiplyAdd(__m512 w, __m512 x, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
  }
  static void AddSums(const __m512 sums[kTileColumns], float* out) { AddLanes(sums, out); }

  // An odd last group has a partner of zeros, whose scales are zeros.
  static void Unpack(const WeightColumns& weights, int64_t block, int64_t first, int64_t groups,
                     uint8_t* panel) {
    const __m512i table = CodeTable();
    const int64_t vectors = CountVectors(groups);
    for (int64_t p = 0; p < vectors; ++p) {
      const int64_t g = first + 2 * p;
      const bool whole = 2 * p + 1 < groups;
      PrefetchColumns(weights, block, g);
      PrefetchColumns(weights, block, g + 1);
      const __m512 scales[2] = {
          ScaleVector(weights.Scales(g, block)),
          whole ? ScaleVector(weights.Scales(g + 1, block)) : _mm512_setzero_ps()};
      for (int z = 0; z < 2; ++z) {
        const __m512i v[2] = {_mm512_loadu_si512(weights.Codes(g, block) + z * 64),
                              _mm512_loadu_si512(weights.Codes(whole ? g + 1 : g, block) + z * 64)};
        EachNibble([&](auto nibble) {
          const __m512i q[2] = {Codes<nibble>(v[0], table), Codes<nibble>(v[1], table)};
          const int64_t column = z * 8 + 2 * nibble;
          _mm512_store_ps(PanelVector<BFloat16Columns>(panel, vectors, p, column),
                          JoinPairs(_mm512_mul_ps(EvenFloats(q[0]), scales[0]),
                                    _mm512_mul_ps(EvenFloats(q[1]), scales[1])));
          _mm512_store_ps(PanelVector<BFloat16Columns>(panel, vectors, p, column + 1),
                          JoinPairs(_mm512_mul_ps(OddFloats(q[0]), scales[0]),
                                    _mm512_mul_ps(OddFloats(q[1]), scales[1])));
        });
      }
    }
  }
};

// Multiplies kCount rows in registers, for the 8 columns of each of kVectors vectors of a block.
template <typename Unit, int kCount, int kVectors>
void MultiplyFewColumns(const WeightColumns& weights, int64_t block, int first, const Rows& rows,
                        float* out) {
  const __m512i table = CodeTable();
  __m512 sums[kVectors][kCount][8];
  for (auto& of_vector : sums)
    for (auto& of_row : of_vector)
      for (auto& sum : of_row) sum = _mm512_setzero_ps();
  for (int64_t g = 0; g < weights.groups; ++g) {
    PrefetchColumns(weights, block, g);
    const __m512 scale = ScaleVector(weights.Scales(g, block));
    __m512 x[kCount];
#pragma GCC unroll 3
    for (int r = 0; r < kCount; ++r)
      x[r] = _mm512_mul_ps(Unit::Read(rows.data + r * rows.stride, g), scale);
#pragma GCC unroll 2
    for (int z = 0; z < kVectors; ++z) {
      const __m512i v = _mm512_loadu_si512(weights.Codes(g, block) + (first + z) * 64);
      EachNibble([&](auto nibble) {
        const __m512i q = Codes<nibble>(v, table);
        const __m512 even = EvenFloats(q), odd = OddFloats(q);
#pragma GCC unroll 3
        for (int r = 0; r < kCount; ++r) {
          auto& sum = sums[z][r];
          sum[2 * nibble] = _mm512_fmadd_ps(even, x[r], sum[2 * nibble]);
          sum[2 * nibble + 1] = _mm512_fmadd_ps(odd, x[r], sum[2 * nibble + 1]);
        }
      });
    }
  }
  for (int z = 0; z < kVectors; ++z) {
    for (int r = 0; r < kCount; ++r) {
      float* to = out + r * kBlock + (first + z) * 8;
      AddLanes(sums[z][r], to);
      AddLanes(sums[z][r] + kTileColumns, to + kTileColumns);
    }
  }
}

template <typename Unit>
void MultiplyTransposedRows(const WeightColumns& weights, int64_t block, const Rows& rows,
                            float* out) {
  if (rows.count > kFewTransposed) return MultiplyColumns<Unit>(weights, block, rows, out);
  std::fill(out, out + rows.count * kBlock, 0.0f);
  if (rows.count == 1) return MultiplyFewColumns<Unit, 1, 2>(weights, block, 0, rows, out);
  const auto multiply =
      rows.count == 2 ? MultiplyFewColumns<Unit, 2, 1> : MultiplyFewColumns<Unit, 3, 1>;
  for (int z = 0; z < 2; ++z) multiply(weights, block, z, rows, out);
}

void MultiplyTransposed(const WeightColumns& weights, int64_t block, const Rows& rows, float* out) {
  rows.format.bf16 ? MultiplyTransposedRows<BFloat16Columns>(weights, block, rows, out)
                   : MultiplyTransposedRows<Float32Columns>(weights, block, rows, out);
}

// vdpbf16ps is slow on Intel's Xeon (gemm_avx512.cc).
RowFormat TransposedRows(DataType type) {
  static const bool slow = __builtin_cpu_is("intel");
  return {type == DataType::kBF16 && !slow, 1};
}

}  // namespace
}  // namespace nvfp4::cpu
