// Multiplies rows by panels of 32 columns with AVX-512, 12 rows at a time.
//
// gemm_avx512.cc and attention_avx512.cc include this file below their target pragma; see
// elementwise.h.
namespace nvfp4::cpu {
namespace {

constexpr int kRows =
    12;  // rows of a register tile: their sums, 2 vectors each, fill the registers

// A panel of float32 [k, 32].
struct Float32Panel {
  static constexpr int64_t kValueBytes = sizeof(float);
  static constexpr int64_t kStep = 1;  // k of one multiplication

  // Stores 16 weights of k and k + 1, scaled. `to` is where k = 0 of these columns is.
  static void Store(__m512 even, __m512 odd, int64_t k, uint8_t* to) {
    _mm512_store_ps(to + k * kPair * kValueBytes, even);
    _mm512_store_ps(to + (k + 1) * kPair * kValueBytes, odd);
  }
  static __m512 Broadcast(const uint8_t* x) {
    return _mm512_set1_ps(*reinterpret_cast<const float*>(x));
  }
  static __m512 MultiplyAdd(__m512 weights, __m512 x, __m512 sum) {
    return _mm512_fmadd_ps(weights, x, sum);
  }
};

// A panel of pairs of bfloat16 [k / 2, 32, 2].
struct BFloat16Panel {
  static constexpr int64_t kValueBytes = sizeof(uint16_t);
  static constexpr int64_t kStep = 2;

  static void Store(__m512 even, __m512 odd, int64_t k, uint8_t* to) {
    const __m512i pairs =
        _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
    _mm512_store_si512(to + k * kPair * kValueBytes, pairs);
  }
  static __m512 Broadcast(const uint8_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  static __m512 MultiplyAdd(__m512 weights, __m512 x, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x);
  }
};

// out [kCount, 32] = panel times kCount rows of x, or += if kAdd. `count` is the number of k, and
// `out_stride` the floats from one row of `out` to the next.
template <typename Panel, int kCount, bool kAdd>
void MultiplyPanel(const uint8_t* panel, int64_t count, const uint8_t* x, int64_t stride,
                   float* out, int64_t out_stride) {
  __m512 acc[kCount][2];
  for (auto& sums : acc) sums[0] = sums[1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k += Panel::kStep) {
    const __m512 w0 = _mm512_load_ps(panel), w1 = _mm512_load_ps(panel + sizeof(__m512));
    for (int r = 0; r < kCount; ++r) {
      const __m512 value = Panel::Broadcast(x + r * stride);
      acc[r][0] = Panel::MultiplyAdd(w0, value, acc[r][0]);
      acc[r][1] = Panel::MultiplyAdd(w1, value, acc[r][1]);
    }
    panel += 2 * sizeof(__m512);
    x += Panel::kStep * Panel::kValueBytes;
  }
  for (int r = 0; r < kCount; ++r) {
    float* to = out + r * out_stride;
    if (kAdd) {
      acc[r][0] = _mm512_add_ps(_mm512_loadu_ps(to), acc[r][0]);
      acc[r][1] = _mm512_add_ps(_mm512_loadu_ps(to + kGroup), acc[r][1]);
    }
    _mm512_storeu_ps(to, acc[r][0]);
    _mm512_storeu_ps(to + kGroup, acc[r][1]);
  }
}

using PanelFn = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, float*, int64_t);
template <typename Panel, bool kAdd>
constexpr PanelFn kMultiplyPanel[kRows + 1] = {nullptr,
                                               MultiplyPanel<Panel, 1, kAdd>,
                                               MultiplyPanel<Panel, 2, kAdd>,
                                               MultiplyPanel<Panel, 3, kAdd>,
                                               MultiplyPanel<Panel, 4, kAdd>,
                                               MultiplyPanel<Panel, 5, kAdd>,
                                               MultiplyPanel<Panel, 6, kAdd>,
                                               MultiplyPanel<Panel, 7, kAdd>,
                                               MultiplyPanel<Panel, 8, kAdd>,
                                               MultiplyPanel<Panel, 9, kAdd>,
                                               MultiplyPanel<Panel, 10, kAdd>,
                                               MultiplyPanel<Panel, 11, kAdd>,
                                               MultiplyPanel<Panel, 12, kAdd>};

// Multiplies `count` rows, in tiles of about equal height: 16 rows become 8 + 8, not 12 + 4.
template <typename Panel, bool kAdd>
void MultiplyRows(const uint8_t* panel, int64_t k, const uint8_t* x, int64_t stride, int64_t count,
                  float* out, int64_t out_stride) {
  const int64_t tiles = (count + kRows - 1) / kRows, height = (count + tiles - 1) / tiles;
  for (int64_t r = 0; r < count; r += height) {
    kMultiplyPanel<Panel, kAdd>[std::min(height, count - r)](panel, k, x + r * stride, stride,
                                                             out + r * out_stride, out_stride);
  }
}

}  // namespace
}  // namespace nvfp4::cpu
