// Replaces fp4_mma.cuh on a CPU: each lane shows all its operands to the others, and codes are
// summed as integers. The emulation for GPUs, which uses shuffles, would take ten times as long
// here. device_functions.cc can run that one too.
#pragma once

#include "cuda/instructions/fp4_emulation.cuh"
#include "cuda_on_cpu.h"

namespace nvfp4 {

// Returns four times the sum of eight products of codes.
inline int QuadrupleDot(uint32_t a, uint32_t b) {
  constexpr int kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  int dot = 0;
  for (int shift = 0; shift < 32; shift += 4) {
    dot += kDoubled[a >> shift & 15] * kDoubled[b >> shift & 15];
  }
  return dot;
}

inline void MultiplyAddFp4(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                           uint32_t scale_a, uint32_t scale_b) {
  using namespace emulation;
  uint64_t* mine = WordsOf(Warp(), Lane());
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  for (int i = 0; i < 2; ++i) mine[4 + i] = b[i];
  mine[6] = scale_a, mine[7] = scale_b;
  SyncWarp();
  const unsigned g = Lane() / 4, q = Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    // `row` is 0 for row g and 1 for row g + 8.
    const unsigned row = i / 2, column = 2 * q + i % 2;
    const auto scales_a = static_cast<uint32_t>(WordsOf(Warp(), 4 * g + row)[6]);
    const auto scales_b = static_cast<uint32_t>(WordsOf(Warp(), 4 * column)[7]);
    for (int block = 0; block < 4; ++block) {
      int dot = 0;
      for (unsigned from = block % 2 * 2, t = 0; t < 2; ++t) {
        dot += QuadrupleDot(WordsOf(Warp(), 4 * g + from + t)[row + block / 2 * 2],
                            WordsOf(Warp(), 4 * column + from + t)[4 + block / 2]);
      }
      const float scale = ScaleOf(scales_a, block) * ScaleOf(scales_b, block);
      sums[i] += 0.25f * static_cast<float>(dot) * scale;
    }
  }
  SyncWarp();
}

}  // namespace nvfp4
