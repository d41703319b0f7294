// Replaces ampere.cuh on a CPU.
#pragma once

#include <cmath>

#include "cuda/instructions/async_copy.cuh"

namespace nvfp4 {

inline int ReadThread() { return static_cast<int>(threadIdx.x); }

inline uint32_t Select(uint32_t a, uint32_t b, uint32_t mask) { return (a & mask) | (b & ~mask); }

// Returns two bytes of `word` as signed 16-bit numbers.
inline uint32_t WidenTwo(uint32_t word, int first, int second) {
  const auto byte = [&](int i) {
    return static_cast<uint16_t>(static_cast<int8_t>(word >> 8 * i));
  };
  return byte(first) | static_cast<uint32_t>(byte(second)) << 16;
}
template <int kHalf>
uint32_t WidenBytes(uint32_t word) {
  return WidenTwo(word, 2 * kHalf, 2 * kHalf + 1);
}
template <int kFirst>
uint32_t WidenAlternate(uint32_t word) {
  return WidenTwo(word, kFirst, kFirst + 2);
}

inline void Settle(uint32_t&) {}

inline const void* Advance(const void* base, uint32_t units) {
  return static_cast<const uint8_t*>(base) + uint64_t{16} * units;
}

inline float FastExp2(float x) { return std::exp2(x); }
inline float FastReciprocal(float x) { return 1.0f / x; }

inline uint32_t Transpose(uint32_t pair) {
  using namespace emulation;
  WordsOf(Warp(), Lane())[0] = pair;
  SyncWarp();
  // This lane gets `column` and the next column of `row` of the result.
  const unsigned row = Lane() / 4, column = Lane() % 4 * 2;
  uint32_t turned = 0;
  for (unsigned i = 0; i < 2; ++i) {
    const uint64_t word = WordsOf(Warp(), 4 * (column + i) + row / 2)[0];
    turned |= (static_cast<uint32_t>(word) >> (16 * (row % 2)) & 0xffff) << (16 * i);
  }
  SyncWarp();
  return turned;
}

inline uint4 LoadShared16(uint32_t address) {
  uint4 words;
  std::memcpy(&words, At(address, 16), 16);
  return words;
}
inline uint2 LoadShared8(uint32_t address) {
  uint2 words;
  std::memcpy(&words, At(address, 8), 8);
  return words;
}

inline int32_t LoadShared4(uint32_t address) {
  int32_t word;
  std::memcpy(&word, At(address, 4), 4);
  return word;
}
inline void StoreShared4(uint32_t address, int32_t word) { std::memcpy(At(address, 4), &word, 4); }

// Later blocks have run already, so a flag that they have not raised will never be raised.
inline int32_t LoadAcquire(const int32_t* flag) {
  if (*flag == 0) emulation::Fail("a flag that nobody raised");
  return *flag;
}
inline void StoreRelease(int32_t* flag, int32_t value) { *flag = value; }

struct GroupBarrier {
  int arrived;
  long generation;
};
inline GroupBarrier& GroupBarrierOf(int id) {
  static GroupBarrier barriers[emulation::kMaxCluster][16];
  return barriers[emulation::rank][id];
}
inline void ArriveGroup(int id, int threads) {
  GroupBarrier& barrier = GroupBarrierOf(id);
  ++emulation::progress;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}
inline void SyncGroup(int id, int threads) {
  const GroupBarrier& barrier = GroupBarrierOf(id);
  const long mine = barrier.generation;
  ArriveGroup(id, threads);
  while (barrier.generation == mine) emulation::Yield();
}

}  // namespace nvfp4
