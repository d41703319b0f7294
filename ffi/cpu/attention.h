// A block of attention: the queries of some tokens and heads that share a key head, and a range of
// its keys. attention_cpu.cc cuts a call into blocks, and attention_block.h computes them.
#pragma once

#include <cstdint>

namespace nvfp4::cpu {

constexpr int64_t kAttentionRows = 512;  // most queries of a block
constexpr int64_t kAttentionKeys = 256;  // keys whose scores are in memory at a time

struct AttentionBlock {
  const uint16_t* q[kAttentionRows];  // bfloat16 [d] each
  // Query r sees keys low[r] to high[r] - 1. If high[r] <= low[r], it sees none of this block.
  int64_t low[kAttentionRows], high[kAttentionRows];
  int64_t rows, d, dv;
  const uint16_t* k;  // bfloat16, key i at k + i * k_stride
  const uint16_t* v;  // bfloat16, value i at v + i * v_stride
  int64_t k_stride, v_stride;
  float scale;
};

// What a block adds to the softmax of its queries. `sums` of 0 means that a query saw no key. Its
// other numbers then have no meaning. A kernel may write rows of y up to a multiple of 16.
struct AttentionSums {
  float* largest;  // [rows] largest score m, times log2(e)
  float* sums;     // [rows] sum of e^(score - m)
  float* y;        // [rows, AttentionColumns(dv)] sum of e^(score - m) v
};

// Columns of AttentionSums::y, of which the first dv are used.
constexpr int64_t AttentionColumns(int64_t dv) { return (dv + 31) / 32 * 32; }

// The functions that an instruction set provides, as one table.
struct AttentionKernels {
  // Whether this CPU can run them.
  bool (*supported)();

  // Returns the bytes of scratch memory of `attend`.
  int64_t (*scratch_bytes)(int64_t d, int64_t dv);

  // Computes one block. `scratch` starts at a multiple of 64 bytes.
  void (*attend)(const AttentionBlock& block, const AttentionSums& sums, uint8_t* scratch);

  // y [dv] = the softmax over all keys of `parts` blocks and one further score `sink` whose value
  // is zero; -infinity for none. Array p of part p is `stride` floats behind that of part p - 1.
  void (*merge_sums)(const AttentionSums& first, int64_t parts, int64_t stride, int64_t row,
                     float sink, int64_t dv, uint16_t* y);
};

#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx512;
extern const AttentionKernels kAttentionAmx;
#endif

}  // namespace nvfp4::cpu
