// A block of attention: the queries of some tokens and heads that share a key head, and a range of
// its keys. attention_cpu.cc cuts a call into blocks, and attention_avx512.cc computes them.
#pragma once

#include <cstdint>

namespace nvfp4::cpu {

constexpr int64_t kAttentionRows = 128;  // most queries of a block
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
// other numbers then have no meaning.
struct AttentionSums {
  float* largest;  // [rows] largest score m, times log2(e)
  float* sums;     // [rows] sum of e^(score - m)
  float* y;        // [rows, y_stride] sum of e^(score - m) v
};

// Columns of AttentionSums::y, of which the first dv are used.
constexpr int64_t AttentionColumns(int64_t dv) { return (dv + 31) / 32 * 32; }

// Returns the bytes of scratch memory of Attend.
int64_t AttentionScratchBytes(int64_t d);

// Computes one block. `scratch` starts at a multiple of 64 bytes.
void Attend(const AttentionBlock& block, const AttentionSums& sums, uint8_t* scratch);

// y [dv] = the softmax over all keys of `parts` blocks and one further score `sink` whose value is
// zero; -infinity for none. Array p of part p is `stride` floats behind that of part p - 1.
void MergeSums(const AttentionSums& first, int64_t parts, int64_t stride, int64_t row, float sink,
               int64_t dv, uint16_t* y);

}  // namespace nvfp4::cpu
