// The functions that each instruction set provides, as one table, and the operands that they share.
//
// Weights are in the layout "cpu_16x16" (numerics/layouts.py). It has groups of 16 output rows. A
// group has, for every 16 k, one block of 128 bytes of codes and 16 bytes of E4M3 scales. In a
// block, 16-bit word w of 64-byte vector z holds codes of row w >> 1. Nibble j of that word has k =
// 8 z + 2 j + (w & 1).
//
// Activations are gathered by expert and converted once, before any product, so that every kernel
// reads contiguous memory. A converted row is float32 [k_pad], or `pieces` arrays bfloat16 [k_pad]
// whose sum is the row of x. One piece holds bfloat16 and quantized values exactly, two hold
// float16, and three hold float32. The values from k to k_pad are zeros.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "../nvfp4.h"
#include "../shapes.h"

namespace nvfp4::cpu {

constexpr int64_t kGroup = 16;         // output rows that the layout interleaves
constexpr int64_t kPair = 2 * kGroup;  // outputs of one call of Kernels::multiply: two groups
constexpr int64_t kRowBlock = 256;     // most rows of one call of Kernels::multiply
constexpr int64_t kRowPadding = 32;    // k_pad is a multiple of this
constexpr int64_t kCacheLine = 64;
constexpr int64_t kBlocksAhead = 32;  // how many blocks of 16 k ahead codes are prefetched: 4 KiB

constexpr int64_t kBlocksTogether = 4;  // of a group, whose scales fill a cache line

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How a row of activations is stored; see above.
struct RowFormat {
  bool bf16;   // otherwise float32
  int pieces;  // 1 for float32

  // Bytes between rows: an odd number of cache lines. With a plain stride, at k = 2048, all rows
  // would fall into the same sets of the first-level cache.
  int64_t stride(int64_t k) const {
    const int64_t bytes = RoundUp(k, kRowPadding) * (bf16 ? 2 * pieces : 4);
    return bytes / kCacheLine % 2 ? bytes : bytes + kCacheLine;
  }
};

// Rows 0 to count - 1 of x. A kernel may read rows up to the next multiple of 16, and ignores what
// it finds there.
struct Rows {
  const uint8_t* data;
  int64_t stride;  // bytes
  int64_t count;
  RowFormat format;
};

// Two groups of 16 weight rows. If there is no second group, the first one stands in both places.
struct WeightPair {
  const uint8_t* codes[2];
  const uint8_t* scales[2];
  const uint8_t* next_codes[2];  // groups that are multiplied next; only prefetched
  int64_t k;

  // Returns the codes to prefetch while block b of group g is read. A group is too short to hide
  // the latency of memory, so that its last blocks prefetch the beginning of the next group.
  const uint8_t* codes_ahead(int g, int64_t b) const {
    const int64_t target = b + kBlocksAhead, blocks = k / 16;
    return target < blocks ? codes[g] + target * 128 : next_codes[g] + (target - blocks) * 128;
  }
};

// The groups of 16 rows of one expert's weights, for a product with the transposed weights.
struct WeightColumns {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t groups;
  int64_t k;
  int64_t end;  // the caller multiplies blocks up to this one

  // Prefetches a block to the second-level cache.
  __attribute__((always_inline)) void Prefetch(int64_t group, int64_t block) const {
    __builtin_prefetch(Codes(group, block), 0, 2);
    __builtin_prefetch(Codes(group, block) + kCacheLine, 0, 2);
    if (block % kBlocksTogether == 0) __builtin_prefetch(Scales(group, block), 0, 2);
  }
  const uint8_t* Codes(int64_t group, int64_t block) const {
    return codes + group * 8 * k + block * 128;
  }
  const uint8_t* Scales(int64_t group, int64_t block) const {
    return scales + group * k + block * kGroup;
  }
};

// A row of activations to prepare: it is loaded, weighted, rounded, quantized, and stored.
struct RowSource {
  const void* x;  // [k]
  DataType type;
  int64_t k;
  bool weigh;  // multiply by `weight` and round to `type`
  float weight;
  ActivationScale quantize;
  float input_scale;  // for ActivationScale::kStatic
};

// v = acc * row_scale[row] * scale[column] + bias[column].
struct Affine {
  const float* row_scale;  // [rows]
  float scale[kPair];
  float bias[kPair];
};

// A head of queries or keys: it is normalized, unless `weight` is null, and rotated.
struct HeadSource {
  const void* x;         // [d], at most kMaxPreparedWidth
  DataType type;         // of x, and of the result without `rounding`
  const void* weight;    // [d]
  DataType weight_type;  // `type` or kF32
  int64_t d;
  int64_t half;         // half of the channels that rotate
  const float* cosine;  // [half], likewise `sine`
  const float* sine;
  float eps;
  bool rotates_first;
  const E4M3Rounding* rounding;  // if the result is E4M3, rounded from `type`; null otherwise
};

struct Kernels {
  std::string_view name;
  bool (*supported)();

  // Chooses the format of rows. `mean_rows` is the mean number of rows of an expert.
  RowFormat (*row_format)(DataType type, ActivationScale scale, int64_t mean_rows);

  // out[r, c] = sum_k W[c, k] x[r, k], without global scales; float32 [count rounded up to a
  // multiple of 16, 32].
  void (*multiply)(const WeightPair& weights, const Rows& rows, float* out);

  // Returns the format of rows for `multiply_transposed`.
  RowFormat (*transposed_rows)(DataType type);

  // out[r, c] = sum_n W[n, 16 block + c] x[r, n], without global scales; float32 [count, 16].
  // Values of bfloat16 rows are in pairs that are 16 apart: x[0], x[16], x[1], x[17] and so on.
  void (*multiply_transposed)(const WeightColumns& weights, int64_t block, const Rows& rows,
                              float* out);

  // Stores one row, and returns the scale that its products must be multiplied by.
  float (*prepare_row)(const RowSource& source, RowFormat format, uint8_t* row);

  // Replaces acc [rows, 32] by the activations of its scaled sums, rounded to `type`. If gated,
  // these are 16 columns, at an unchanged stride of 32.
  void (*activate)(const ActivationParameters& parameters, const Affine& affine, DataType type,
                   int64_t rows, float* acc);

  // Applies `affine` to acc [rows, 32], in place.
  void (*scale_and_bias)(const Affine& affine, int64_t rows, float* acc);

  // Stores `columns` columns of values, at a stride of 32, into prepared rows, from column `column`
  // on. `columns` is a multiple of 16.
  void (*store_columns)(const float* values, int64_t rows, int64_t columns, RowFormat format,
                        int64_t k_pad, int64_t stride, int64_t column, uint8_t* prepared);

  // Rounds values [n] to `type`.
  void (*round)(const float* values, int64_t n, DataType type, void* out);

  // sum [n] += weight * d [n], float32.
  void (*accumulate)(const float* d, float weight, int64_t n, float* sum);

  // Quantizes x [k] to packed [k/2] and scales [k/16].
  void (*quantize)(const void* x, DataType type, int64_t k, float global_scale, uint8_t* packed,
                   uint8_t* scales);

  // Returns the largest |x[i]| of n values, or NaN if one of them is NaN.
  float (*largest_magnitude)(const void* x, DataType type, int64_t n);

  // y[r * stride + c] = sum_k W[c, k] x[r, k], for weights bfloat16 [columns, k] and x float32
  // [rows, k]. The weights that begin `ahead` numbers after these are probably those of the
  // thread's next call, and may be prefetched.
  void (*dense)(const uint16_t* weight, int64_t columns, int64_t k, const float* x, int64_t rows,
                int64_t ahead, float* y, int64_t stride);

  // Prepares a head for attention: out [d].
  void (*prepare_head)(const HeadSource& head, void* out);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;
#endif

// Returns the kernels of that name; "auto" means the best that this CPU runs. Returns null if this
// CPU cannot run them, or if there is no such name.
const Kernels* ChooseKernels(std::string_view isa);

// Returns the names of the kernels that this CPU runs, best first.
std::vector<std::string_view> SupportedIsas();

}  // namespace nvfp4::cpu
