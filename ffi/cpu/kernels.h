// What an instruction set provides: one table of functions, and the operands they share.
//
// Weights are in layout "cpu_16x16" (layouts.py): groups of 16 output rows, and in a group one
// block of 128 bytes of codes and 16 bytes of E4M3 scales for every 16 k. In a block, 16-bit word
// w of 64-byte vector z holds row w >> 1, and its nibble j holds k = 8 z + 2 j + (w & 1).
//
// Activations are "rows": x gathered by expert and converted once, so that every kernel walks
// contiguous memory. A row is float32[k_pad], or `pieces` arrays bfloat16[k_pad] whose sum is x
// (1 for bfloat16 and quantized values, 2 for float16, 3 for float32), zero from k to k_pad.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "../shapes.h"

namespace nvfp4::cpu {

constexpr int64_t kGroup = 16;         // output rows that the layout interleaves
constexpr int64_t kPair = 2 * kGroup;  // outputs of one product: two groups
constexpr int64_t kRowBlock = 256;     // most rows of one product
constexpr int64_t kRowPadding = 32;    // k_pad is a multiple of this
constexpr int64_t kCacheLine = 64;
constexpr int64_t kBlocksAhead = 32;  // blocks of 16 k to prefetch: 4 KiB of codes

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How a row is stored; see above.
struct RowFormat {
  bool bf16;   // else float32
  int pieces;  // 1 for float32

  // Rows are an odd number of cache lines apart: at k = 2048 a plain stride would put every row
  // into the same sets of the first-level cache.
  int64_t stride(int64_t k) const {
    const int64_t bytes = RoundUp(k, kRowPadding) * (bf16 ? 2 * pieces : 4);
    return bytes / kCacheLine % 2 ? bytes : bytes + kCacheLine;
  }
};

// x[r] for r in [0, count). A kernel may read, and ignore, rows up to the next multiple of 16.
struct Rows {
  const uint8_t* data;
  int64_t stride;  // bytes
  int64_t count;
  RowFormat format;
};

// Two groups of 16 weight rows; a missing second group repeats the first.
struct WeightPair {
  const uint8_t* codes[2];
  const uint8_t* scales[2];
  const uint8_t* next_codes[2];  // what will be multiplied next, to prefetch; only ever a hint
  int64_t k;

  // Codes to prefetch when block b of group g is read. The streams of a pair are shorter
  // than memory is away, so the end of one has to fetch the beginning of the next.
  const uint8_t* codes_ahead(int g, int64_t b) const {
    const int64_t target = b + kBlocksAhead, blocks = k / 16;
    return target < blocks ? codes[g] + target * 128 : next_codes[g] + (target - blocks) * 128;
  }
};

// One row on its way into a product: load, weigh, round, quantize, store.
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

struct Kernels {
  std::string_view name;
  bool (*supported)();

  // `mean_rows`: rows of an expert on average.
  RowFormat (*row_format)(DataType type, ActivationScale scale, int64_t mean_rows);

  // out[r, c] = sum_k W[c, k] x[r, k] without global scales, float32 [count up to 16s, 32].
  void (*multiply)(const WeightPair& weights, const Rows& rows, float* out);

  // Stores one row and returns the scale by which its products are to be multiplied.
  float (*prepare_row)(const RowSource& source, RowFormat format, uint8_t* row);

  // acc [rows, 32] -> act [rows, 32 or, gated, 16] in place (stride 32), rounded to `type`.
  void (*activate)(const ActivationParameters& parameters, const Affine& affine, DataType type,
                   int64_t rows, float* acc);

  // acc [rows, 32] -> affine, in place.
  void (*scale_and_bias)(const Affine& affine, int64_t rows, float* acc);

  // values [rows, stride 32], `columns` of them a multiple of 16 -> columns of prepared rows.
  void (*store_columns)(const float* values, int64_t rows, int64_t columns, RowFormat format,
                        int64_t k_pad, int64_t stride, int64_t column, uint8_t* prepared);

  // values [n] float32 -> [n] of `type`.
  void (*round)(const float* values, int64_t n, DataType type, void* out);

  // sum [n] += weight * d [n], float32.
  void (*accumulate)(const float* d, float weight, int64_t n, float* sum);

  // x [k] -> packed [k/2], scales [k/16].
  void (*quantize)(const void* x, DataType type, int64_t k, float global_scale, uint8_t* packed,
                   uint8_t* scales);

  // max |x[i]| of [n], NaN where one is inside.
  float (*largest_magnitude)(const void* x, DataType type, int64_t n);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;
#endif

// The kernels of that name, "auto" for the best that this CPU runs; null where it cannot.
const Kernels* ChooseKernels(std::string_view isa);

// Names of the kernels that this CPU runs, best first.
std::vector<std::string_view> SupportedIsas();

}  // namespace nvfp4::cpu
