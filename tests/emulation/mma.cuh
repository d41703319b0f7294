// mma.cuh on a CPU.
#pragma once

#include "cuda_on_cpu.h"

namespace nvfp4 {

inline float HalfOf(uint32_t word, int half, __nv_bfloat16*) {
  const uint32_t bits = word >> (16 * half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float HalfOf(uint32_t word, int half, __half*) {
  const uint16_t bits = static_cast<uint16_t>(word >> (16 * half));
  __half value;
  std::memcpy(&value, &bits, 2);
  return __half2float(value);
}

// Element k of row `row` (0 or 8 below lane / 4) of a fragment a, of which `words` are the lane's.
template <typename T>
float ElementOfA(unsigned warp, unsigned g, int row, int k) {
  const uint64_t word = emulation::WordsOf(warp, 4 * g + k % 8 / 2)[row + 2 * (k / 8)];
  return HalfOf(static_cast<uint32_t>(word), k % 2, static_cast<T*>(nullptr));
}

inline void LoadMatrices(const void* row, uint32_t (&words)[4]) {
  using namespace emulation;
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) Fail("ldmatrix is not aligned");
  WordsOf(Warp(), Lane())[0] = reinterpret_cast<uint64_t>(row);
  SyncWarp();
  for (unsigned i = 0; i < 4; ++i) {
    const auto* source = reinterpret_cast<const uint32_t*>(WordsOf(Warp(), 8 * i + Lane() / 4)[0]);
    words[i] = source[Lane() % 4];
  }
  SyncWarp();
}

template <typename T>
void MultiplyAdd(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using namespace emulation;
  uint64_t* mine = WordsOf(Warp(), Lane());
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  mine[4] = b0;
  mine[5] = b1;
  SyncWarp();
  const unsigned g = Lane() / 4, q = Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const unsigned column = 2 * q + i % 2;
    for (int k = 0; k < 16; ++k) {
      const uint64_t b = WordsOf(Warp(), 4 * column + k % 8 / 2)[4 + k / 8];
      sums[i] += ElementOfA<T>(Warp(), g, i / 2, k) *
                 HalfOf(static_cast<uint32_t>(b), k % 2, static_cast<T*>(nullptr));
    }
  }
  SyncWarp();
}

}  // namespace nvfp4
