// Replaces mma.cuh on a CPU.
#pragma once

#include "cuda/instructions/async_copy.cuh"
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

// Shows this lane's part of a fragment a to the other lanes, as numbers.
template <typename T>
void ShowA(const uint32_t (&a)[4]) {
  using namespace emulation;
  const unsigned g = Lane() / 4, q = Lane() % 4;
  for (unsigned i = 0; i < 8; ++i) {
    const unsigned word = i / 2, half = i % 2;
    fragments[Warp()].a[g + 8 * (word % 2)][2 * q + half + 8 * (word / 2)] =
        HalfOf(a[word], half, static_cast<T*>(nullptr));
  }
}

inline void LoadMatrices(const void* row, uint32_t (&words)[4]) {
  using namespace emulation;
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) Fail("ldmatrix is not aligned");
  const int64_t offset = static_cast<const uint8_t*>(row) - Dynamic();
  if (offset + 16 > dynamic_bytes && offset < static_cast<int64_t>(kDynamicRoom)) {
    Fail("ldmatrix past the end of shared memory");
  }
  WordsOf(Warp(), Lane())[0] = reinterpret_cast<uint64_t>(row);
  SyncWarp();
  for (unsigned i = 0; i < 4; ++i) {
    const auto* source = reinterpret_cast<const uint32_t*>(WordsOf(Warp(), 8 * i + Lane() / 4)[0]);
    words[i] = source[Lane() % 4];
  }
  SyncWarp();
}

inline void LoadMatricesAt(uint32_t row, uint32_t (&words)[4]) { LoadMatrices(At(row, 16), words); }

inline void LoadTransposed(const void* row, uint32_t (&words)[4]) {
  using namespace emulation;
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) Fail("ldmatrix is not aligned");
  WordsOf(Warp(), Lane())[0] = reinterpret_cast<uint64_t>(row);
  SyncWarp();
  for (unsigned i = 0; i < 4; ++i) {
    words[i] = 0;
    for (unsigned half = 0; half < 2; ++half) {
      const uint64_t address = WordsOf(Warp(), 8 * i + Lane() % 4 * 2 + half)[0];
      const auto* source = reinterpret_cast<const uint16_t*>(address);
      words[i] |= static_cast<uint32_t>(source[Lane() / 4]) << (16 * half);
    }
  }
  SyncWarp();
}

template <typename T>
void MultiplyAdd(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using namespace emulation;
  const unsigned g = Lane() / 4, q = Lane() % 4;
  Fragments& shown = fragments[Warp()];
  ShowA<T>(a);
  for (unsigned half = 0; half < 2; ++half) {
    shown.b[g][2 * q + half] = HalfOf(b0, half, static_cast<T*>(nullptr));
    shown.b[g][2 * q + half + 8] = HalfOf(b1, half, static_cast<T*>(nullptr));
  }
  SyncWarp();
  for (int i = 0; i < 4; ++i) {
    const float* row = shown.a[g + 8 * (i / 2)];
    const float* column = shown.b[2 * q + i % 2];
    for (int k = 0; k < 16; ++k) sums[i] += row[k] * column[k];
  }
  SyncWarp();
}

inline uint32_t RoundToTf32(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return finite ? (bits + 0x1000u) & ~0x1fffu : bits;
}

inline float Tf32Of(uint32_t bits) {
  bits &= ~0x1fffu;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void MultiplyAddTf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using namespace emulation;
  const unsigned g = Lane() / 4, q = Lane() % 4;
  Fragments& shown = fragments[Warp()];
  for (unsigned i = 0; i < 4; ++i) shown.a[g + 8 * (i % 2)][q + 4 * (i / 2)] = Tf32Of(a[i]);
  shown.b[g][q] = Tf32Of(b0);
  shown.b[g][q + 4] = Tf32Of(b1);
  SyncWarp();
  for (int i = 0; i < 4; ++i) {
    const float* row = shown.a[g + 8 * (i / 2)];
    const float* column = shown.b[2 * q + i % 2];
    for (int k = 0; k < 8; ++k) sums[i] += row[k] * column[k];
  }
  SyncWarp();
}

}  // namespace nvfp4
