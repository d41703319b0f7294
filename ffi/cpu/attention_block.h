// Computes one block of attention with AVX-512 vectors, and with the products that a file provides.
//
//   scores   [rows, 256]  float32, of 256 keys at a time
//   weights  [rows, 256]  e^(score - largest score so far), rounded to bfloat16
//   y        [rows, dv]   float32 sums of weights times values
//
// The sum of the softmax takes weights before they are rounded.
//
// Both products multiply rows of bfloat16 by panels [k / 2, 32, 2]: the 32 columns are keys in the
// first and channels in the second one. A panel of keys is transposed, and a panel of values pairs
// the rows of two keys.
//
// attention_avx512.cc and attention_amx.cc include this file below their target pragma, like
// elementwise.h. They give it `Products`:
//
//   kDepth          Panels and rows have zeros behind k, up to a multiple of it.
//   Products(rows)  It prepares the thread for products of so many rows.
//   Multiply<kAdd>(panel, k, x, stride, count, out, out_stride)
//                   out [count, 32] = rows of x times the panel, or += if kAdd. Rows of `out` up
//                   to a multiple of 16 may be written.
//
// Source: arXiv:1805.02867 for the running maximum and sum.
namespace nvfp4::cpu {
namespace {

// Scores are kept times log2(e), so that weights are powers of two.
constexpr float kLog2E = 1.44269504f;
constexpr int64_t kVector = 16;                                   // floats of a vector
constexpr int64_t kScoreStride = kAttentionKeys + kVector;        // floats from row to row
constexpr int64_t kWeightStride = kAttentionKeys + kPair;         // bfloat16 from row to row
constexpr int64_t kPairBytes = kPair * 2 * sizeof(uint16_t);      // of two k of a panel
constexpr int64_t kValueBytes = kAttentionKeys / 2 * kPairBytes;  // of a panel of values
constexpr int64_t kPartRows = 128;  // queries whose scores are in memory at a time

// Scratch memory of a block.
struct Scratch {
  Scratch(uint8_t* memory, int64_t d, int64_t dv) {
    Carver carver(memory);
    q_stride = (RoundUp(d, kPair) + kPair) * static_cast<int64_t>(sizeof(uint16_t));
    key_bytes = RoundUp(d, kPair) / 2 * kPairBytes;
    keys = carver.Take<uint8_t>(kAttentionKeys / kPair * key_bytes);
    values = carver.Take<uint8_t>(RoundUp(dv, kPair) / kPair * kValueBytes);
    q = carver.Take<uint8_t>(kAttentionRows * q_stride);
    scores = carver.Take<float>(kPartRows * kScoreStride);
    weights = carver.Take<uint16_t>(kPartRows * kWeightStride);
    bytes = carver.used();
  }
  uint8_t *keys, *values;  // panels
  uint8_t* q;
  float* scores;
  uint16_t* weights;
  int64_t key_bytes;  // of a panel of keys
  int64_t q_stride, bytes;
};

// Returns 2^x for x <= 0 in all lanes, with a relative error of 3e-6, or 2^-125 if x is smaller.
// NaN gives NaN. Weights are rounded to bfloat16 later, which is a thousand times as coarse.
inline __m512 Exp2(__m512 x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: a sum with it has no bits behind the point
  x = _mm512_max_ps(_mm512_set1_ps(-125.0f), x);  // the second operand if one is NaN
  const __m512 shifted = _mm512_add_ps(x, _mm512_set1_ps(kRounder));
  const __m512 r = _mm512_sub_ps(x, _mm512_sub_ps(shifted, _mm512_set1_ps(kRounder)));
  // A polynomial for 2^r on [-1/2, 1/2].
  __m512 p = _mm512_set1_ps(9.58281e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590634e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931242e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  // The last bits of `shifted` are the integer part, which is added to the exponent.
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

// Writes 16 vectors as columns: number c of vector i becomes number i of the row at to + c *
// kPairBytes.
inline void StoreTransposed(const __m512i rows[16], uint8_t* to) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 8; ++i) {
    pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  // Number c of each 128 bits of rows 4 j to 4 j + 3 is in fours[4 j + c].
  for (int j = 0; j < 16; j += 4) {
    fours[j] = _mm512_unpacklo_epi64(pairs[j], pairs[j + 2]);
    fours[j + 1] = _mm512_unpackhi_epi64(pairs[j], pairs[j + 2]);
    fours[j + 2] = _mm512_unpacklo_epi64(pairs[j + 1], pairs[j + 3]);
    fours[j + 3] = _mm512_unpackhi_epi64(pairs[j + 1], pairs[j + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xdd);
    _mm512_store_si512(to + c * kPairBytes, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_store_si512(to + (4 + c) * kPairBytes, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_store_si512(to + (8 + c) * kPairBytes, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_store_si512(to + (12 + c) * kPairBytes, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}

// Fills panel [d / 2, 32, 2] with `count` keys, at most 32, and zeros.
void PackKeys(const uint16_t* keys, int64_t stride, int64_t count, int64_t d, uint8_t* panel) {
  for (int64_t channel = 0; channel < d; channel += kPair) {
    const int64_t left = std::min(kPair, d - channel);
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << left) - 1);
    for (int64_t half = 0; half < 2; ++half) {
      __m512i rows[kVector];
      for (int64_t i = 0; i < kVector; ++i) {
        const int64_t key = half * kVector + i;
        rows[i] = key < count ? _mm512_maskz_loadu_epi16(mask, keys + key * stride + channel)
                              : _mm512_setzero_si512();
      }
      StoreTransposed(rows, panel + channel / 2 * kPairBytes + half * sizeof(__m512i));
    }
  }
}

// Fills panel [keys / 2, 32, 2] with 32 channels of `count` values, `left` of which exist, and with
// zeros up to a multiple of kDepth keys.
void PackValues(const uint16_t* values, int64_t stride, int64_t count, int64_t left,
                uint8_t* panel) {
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t here = std::min(std::max<int64_t>(left - half * kVector, 0), kVector);
    const __mmask16 mask = static_cast<__mmask16>((1u << here) - 1);
    for (int64_t key = 0; key < count; key += 2) {
      const uint16_t* from = values + key * stride + half * kVector;
      const __m256i even = _mm256_maskz_loadu_epi16(mask, from);
      const __m256i odd =
          key + 1 < count ? _mm256_maskz_loadu_epi16(mask, from + stride) : _mm256_setzero_si256();
      const __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
      _mm512_store_si512(panel + key / 2 * kPairBytes + half * sizeof(__m512i), pairs);
    }
    for (int64_t key = RoundUp(count, 2); key < RoundUp(count, Products::kDepth); key += 2)
      _mm512_store_si512(panel + key / 2 * kPairBytes + half * sizeof(__m512i),
                         _mm512_setzero_si512());
  }
}

// Returns which lanes of the vector at `key` lie in [low, high).
inline __mmask16 LanesWithin(int64_t key, int64_t low, int64_t high) {
  const int64_t from = std::min(std::max<int64_t>(low - key, 0), kVector);
  const int64_t to = std::min(std::max<int64_t>(high - key, from), kVector);
  return static_cast<__mmask16>((1u << to) - (1u << from));
}

// Turns the scores of one query into weights, of which those outside of [low, high) are zero.
// Updates its largest score and its sum, and scales y [columns] to the new largest score.
void Soften(const float* scores, float scale, int64_t low, int64_t high, int64_t count,
            uint16_t* weights, float* largest, float* sum, float* y, int64_t columns) {
  const __m512 factor = _mm512_set1_ps(scale * kLog2E);
  // Vectors [first, last) have keys of the range. Those of [whole, whole_end) have no others.
  const int64_t first = low < high ? low / kVector * kVector : 0;
  const int64_t last = low < high ? RoundUp(high, kVector) : 0;
  const int64_t whole = RoundUp(low, kVector), whole_end = high / kVector * kVector;
  const auto cut = [=](int64_t key) { return key < whole || key >= whole_end; };
  const auto scaled = [=](int64_t key) {
    return _mm512_mul_ps(_mm512_load_ps(scores + key), factor);
  };
  const float before = *largest;
  __m512 most = _mm512_set1_ps(before);
  for (int64_t key = first; key < last; key += kVector) {
    __m512 here = scaled(key);
    if (cut(key)) here = _mm512_mask_mov_ps(most, LanesWithin(key, low, high), here);
    most = _mm512_max_ps(most, here);
  }
  const float after = _mm512_reduce_max_ps(most);
  const __m512 shift = _mm512_set1_ps(after);
  __m512 total = _mm512_setzero_ps();
  const auto store = [=](int64_t key, __m256i numbers) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights + key), numbers);
  };
  for (int64_t key = 0; key < first; key += kVector) store(key, _mm256_setzero_si256());
  for (int64_t key = first; key < last; key += kVector) {
    __m512 weight = Exp2(_mm512_sub_ps(scaled(key), shift));
    if (cut(key)) weight = _mm512_maskz_mov_ps(LanesWithin(key, low, high), weight);
    total = _mm512_add_ps(total, weight);
    store(key, (__m256i)_mm512_cvtneps_pbh(weight));
  }
  for (int64_t key = last; key < count; key += kVector) store(key, _mm256_setzero_si256());
  if (after != before) {
    const __m512 shrink = Exp2(_mm512_set1_ps(before - after));
    *sum *= _mm512_cvtss_f32(shrink);
    for (int64_t column = 0; column < columns; column += kVector)
      _mm512_storeu_ps(y + column, _mm512_mul_ps(_mm512_loadu_ps(y + column), shrink));
    *largest = after;
  }
  *sum += _mm512_reduce_add_ps(total);
}

int64_t ScratchBytes(int64_t d, int64_t dv) { return Scratch(nullptr, d, dv).bytes; }

void Attend(const AttentionBlock& block, const AttentionSums& sums, uint8_t* scratch) {
  const Scratch here(scratch, block.d, block.dv);
  const int64_t columns = AttentionColumns(block.dv), rows = block.rows;
  const int64_t depth = RoundUp(block.d, Products::kDepth);
  const Products products(rows);
  int64_t first = INT64_MAX, end = 0;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = here.q + r * here.q_stride;
    std::memcpy(to, block.q[r], block.d * sizeof(uint16_t));
    std::memset(to + block.d * sizeof(uint16_t), 0, (depth - block.d) * sizeof(uint16_t));
    sums.largest[r] = -FLT_MAX;
    sums.sums[r] = 0.0f;
    if (block.low[r] >= block.high[r]) continue;
    first = std::min(first, block.low[r]);
    end = std::max(end, block.high[r]);
  }
  if (first >= end) return;
  std::fill(sums.y, sums.y + rows * columns, 0.0f);
  // The cuts between keys are the same for all blocks, so that the result of a query does not
  // depend on the queries beside it.
  const int64_t begin = first / kAttentionKeys * kAttentionKeys;
  for (int64_t start = begin; start < end; start += kAttentionKeys) {
    const int64_t count = std::min(kAttentionKeys, end - start);
    for (int64_t key = 0; key < count; key += kPair) {
      PackKeys(block.k + (start + key) * block.k_stride, block.k_stride,
               std::min(kPair, count - key), block.d, here.keys + key / kPair * here.key_bytes);
    }
    for (int64_t column = 0; column < block.dv; column += kPair) {
      PackValues(block.v + start * block.v_stride + column, block.v_stride, count,
                 block.dv - column, here.values + column / kPair * kValueBytes);
    }
    for (int64_t row = 0; row < rows; row += kPartRows) {
      const int64_t here_rows = std::min(kPartRows, rows - row);
      for (int64_t key = 0; key < count; key += kPair) {
        products.Multiply<false>(here.keys + key / kPair * here.key_bytes, depth,
                                 here.q + row * here.q_stride, here.q_stride, here_rows,
                                 here.scores + key, kScoreStride);
      }
      for (int64_t r = 0; r < here_rows; ++r) {
        Soften(here.scores + r * kScoreStride, block.scale,
               std::max<int64_t>(block.low[row + r] - start, 0),
               std::min(block.high[row + r] - start, count), RoundUp(count, kPair),
               here.weights + r * kWeightStride, sums.largest + row + r, sums.sums + row + r,
               sums.y + (row + r) * columns, columns);
      }
      for (int64_t column = 0; column < block.dv; column += kPair) {
        products.Multiply<true>(
            here.values + column / kPair * kValueBytes, RoundUp(count, Products::kDepth),
            reinterpret_cast<const uint8_t*>(here.weights), kWeightStride * sizeof(uint16_t),
            here_rows, sums.y + row * columns + column, columns);
      }
    }
  }
}

void MergeSums(const AttentionSums& first, int64_t parts, int64_t stride, int64_t row, float sink,
               int64_t dv, uint16_t* y) {
  const float* largest = first.largest + row;
  const float* sums = first.sums + row;
  const float last = sink * kLog2E;
  float most = last;
  for (int64_t p = 0; p < parts; ++p) {
    if (sums[p * stride] != 0.0f) most = std::max(most, largest[p * stride]);
  }
  float total = sink == -INFINITY ? 0.0f : std::exp2(last - most);
  for (int64_t p = 0; p < parts; ++p) {
    if (sums[p * stride] != 0.0f) total += sums[p * stride] * std::exp2(largest[p * stride] - most);
  }
  const float inverse = 1.0f / std::max(total, FLT_MIN);
  // The sums of the first part become those of all parts.
  float* values = first.y + row * AttentionColumns(dv);
  for (int64_t p = 0; p < parts; ++p) {
    const bool sees = sums[p * stride] != 0.0f;
    const __m512 weight =
        _mm512_set1_ps(sees ? std::exp2(largest[p * stride] - most) * inverse : 0.0f);
    for (int64_t column = 0; column < dv; column += kVector) {
      const __m512 sum = p ? _mm512_loadu_ps(values + column) : _mm512_setzero_ps();
      const __m512 here =
          sees ? _mm512_loadu_ps(values + p * stride + column) : _mm512_setzero_ps();
      _mm512_storeu_ps(values + column, _mm512_fmadd_ps(here, weight, sum));
    }
  }
  for (int64_t column = 0; column < dv; column += kVector) {
    const auto mask = static_cast<__mmask16>((1u << std::min(kVector, dv - column)) - 1);
    _mm256_mask_storeu_epi16(y + column, mask,
                             (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(values + column)));
  }
}

}  // namespace
}  // namespace nvfp4::cpu
