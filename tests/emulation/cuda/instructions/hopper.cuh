// Replaces hopper.cuh on a CPU: copies and MMAs finish at once, and mbarriers count.
#pragma once

#include <map>
#include <type_traits>

#include "cuda/instructions/async_copy.cuh"
#include "cuda/instructions/mma.cuh"

namespace nvfp4 {

struct Mbarrier {
  int arrivals;  // that complete a phase
  int pending;
  int64_t bytes;  // that copies have yet to bring
  uint32_t phase;
};

inline std::map<uint32_t, Mbarrier>& Mbarriers() {
  static std::map<uint32_t, Mbarrier> barriers;
  return barriers;
}

inline Mbarrier& MbarrierAt(uint32_t address) {
  const auto found = Mbarriers().find(address);
  if (found == Mbarriers().end()) emulation::Fail("an mbarrier that was not initialised");
  return found->second;
}

inline void Count(Mbarrier& barrier) {
  ++emulation::progress;
  if (barrier.pending < 0) emulation::Fail("too many arrivals at an mbarrier");
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase ^= 1;
}

inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  Mbarriers()[barrier] = {count, count, 0, 0};
}
inline void FenceBarrierInit() {}
inline void ArriveExpect(uint32_t barrier, uint32_t bytes) {
  Mbarrier& counted = MbarrierAt(barrier);
  counted.bytes += bytes;
  --counted.pending;
  Count(counted);
}
inline void Arrive(uint32_t barrier) { ArriveExpect(barrier, 0); }
inline void ArriveWhenCopied(uint32_t barrier) { Arrive(barrier); }
inline void WaitBarrier(uint32_t barrier, uint32_t phase) {
  while (MbarrierAt(barrier).phase == phase) emulation::Yield();
}
inline void BulkCopy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0 || bytes % 16 != 0) {
    emulation::Fail("a bulk copy is not aligned");
  }
  std::memcpy(At(target, bytes), source, bytes);
  Mbarrier& counted = MbarrierAt(barrier);
  counted.bytes -= bytes;
  Count(counted);
}

inline void StoreMatrixOf(unsigned matrix, uint32_t row, uint32_t pair) {
  using namespace emulation;
  if (row % 16 != 0) Fail("stmatrix is not aligned");
  WordsOf(Warp(), Lane())[0] = row;
  SyncWarp();
  const unsigned g = Lane() / 4, q = Lane() % 4;
  for (unsigned i = 0; i < 2; ++i) {
    const auto of_result = static_cast<uint32_t>(WordsOf(Warp(), 8 * matrix + 2 * q + i)[0]);
    const uint16_t bits = static_cast<uint16_t>(pair >> (16 * i));
    std::memcpy(At(of_result + 2 * g, 2), &bits, 2);
  }
  SyncWarp();
}
inline void StoreMatrix(uint32_t row, uint32_t pair) { StoreMatrixOf(0, row, pair); }
inline void StoreMatrices(uint32_t row, uint32_t first, uint32_t second) {
  StoreMatrixOf(0, row, first);
  StoreMatrixOf(1, row, second);
}

inline void PrefetchL2(const void*, uint32_t) {}
inline void PrefetchLine(const void*) {}
inline void SyncCluster() { emulation::SyncCluster(); }
inline float4 LoadPeer16(uint32_t address, uint32_t rank) {
  float4 values;
  const int64_t offset = At(address, 16) - emulation::Dynamic();
  std::memcpy(&values, emulation::DynamicOf(rank) + offset, 16);
  return values;
}
inline void FenceAsyncProxy() {}
inline void WaitForPrecedingKernel() {}
inline void StartNextKernel() {}
template <int kRegisters>
void GrowRegisters() {}
template <int kRegisters>
void ShrinkRegisters() {}

inline uint32_t DescriptorAddress(uint32_t tile) {
  if (tile % 1024 != 0) emulation::Fail("a tile in the 128-byte swizzle is not aligned");
  return tile / 16;
}
inline uint64_t TileDescriptor(uint32_t address) { return address; }

inline void WgmmaFence() {}
inline void WgmmaCommit() {}
template <int kGroups>
void WgmmaWait() {}

template <typename T, int kN>
struct Wgmma {
  template <int kSize>
  static void Run(float (&sums)[kSize], const uint32_t (&a)[4], uint64_t b) {
    using namespace emulation;
    static_assert(kSize >= kN / 2);
    ShowA<T>(a);
    SyncWarp();
    const unsigned g = Lane() / 4, q = Lane() % 4;
    const Fragments& shown = fragments[Warp()];
    for (unsigned column = 0; column < kN; ++column) {
      if (column % 8 / 2 != q) continue;
      for (int k = 0; k < 16; ++k) {
        uint32_t address = static_cast<uint32_t>(b) * 16 + column * 128 + 2 * k;
        address ^= (address >> 7 & 7) << 4;  // the 128-byte swizzle
        uint16_t bits;
        std::memcpy(&bits, At(address, 2), 2);
        const float value = HalfOf(bits, 0, static_cast<T*>(nullptr));
        for (int row = 0; row < 2; ++row) {
          sums[4 * (column / 8) + 2 * row + column % 2] += shown.a[g + 8 * row][k] * value;
        }
      }
    }
    SyncWarp();
  }
};

}  // namespace nvfp4
