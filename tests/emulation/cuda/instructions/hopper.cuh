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
inline void PrefetchLines(const void*, int, int, int) {}
inline void SyncCluster() { emulation::SyncCluster(); }
inline void LeaveCluster() { emulation::SyncCluster(); }
// The second half is the whole barrier here.
inline void ArriveAtCluster() {}
inline void WaitForCluster() { emulation::SyncCluster(); }
inline float4 LoadPeer16(uint32_t address, uint32_t rank) {
  float4 values;
  const int64_t offset = At(address, 16) - emulation::Dynamic();
  std::memcpy(&values, emulation::DynamicOf(rank) + offset, 16);
  return values;
}
inline void FenceAsyncProxy() {}
inline void WaitForPrecedingKernel() { emulation::has_waited[emulation::rank] = true; }
// In a chain, a call may say that its kernels break this rule (launch_kernel.cuh).
bool MayStartNext();
inline void StartNextKernel() {
  if (!emulation::has_waited[emulation::rank] && !MayStartNext()) {
    emulation::Fail("a block lets the next kernel start before it has waited");
  }
}
inline void WaitAndStartNextKernel(bool /*at_once*/) {
  WaitForPrecedingKernel();
  StartNextKernel();
}
template <int kRegisters>
void GrowRegisters() {}
template <int kRegisters>
void ShrinkRegisters() {}

inline uint32_t DescriptorAddress(uint32_t tile) {
  if (tile % 1024 != 0) emulation::Fail("a tile in the 128-byte swizzle is not aligned");
  return tile / 16;
}
inline uint32_t TransposedAddress(uint32_t tile, uint32_t part_bytes) {
  return DescriptorAddress(tile) | part_bytes / 16 << 16;
}
inline uint64_t TileDescriptor(uint32_t address) { return address; }

// Returns an element of a tile in the 128-byte swizzle, at `offset` without the swizzle.
template <typename T>
float TileElement(uint64_t descriptor, uint32_t offset) {
  uint32_t address = static_cast<uint32_t>(descriptor & 0x3fff) * 16 + offset;
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, At(address, 2), 2);
  return HalfOf(bits, 0, static_cast<T*>(nullptr));
}

inline void WgmmaFence() {}
inline void WgmmaCommit() {}
template <int kGroups>
void WgmmaWait() {}
template <int kSize>
void FenceSums(float (&)[kSize]) {}

// sums += a @ b, where a_element(row, k) has this lane's rows 0 and 1, and b_element(k, column).
template <int kN, typename A, typename B>
void MultiplyTile(float* sums, A a_element, B b_element) {
  const unsigned q = emulation::Lane() % 4;
  for (unsigned column = 0; column < kN; ++column) {
    if (column % 8 / 2 != q) continue;
    for (unsigned k = 0; k < 16; ++k) {
      const float value = b_element(k, column);
      for (unsigned row = 0; row < 2; ++row) {
        sums[4 * (column / 8) + 2 * row + column % 2] += a_element(row, k) * value;
      }
    }
  }
}

template <typename T, int kN>
struct Wgmma {
  template <int kSize>
  static void Run(float (&sums)[kSize], const uint32_t (&a)[4], uint64_t b) {
    RunWith(sums, a,
            [b](unsigned k, unsigned column) { return TileElement<T>(b, column * 128 + 2 * k); });
  }
  template <int kSize>
  static void RunTransposed(float (&sums)[kSize], const uint32_t (&a)[4], uint64_t b) {
    const uint32_t part_bytes = static_cast<uint32_t>(b >> 16 & 0x3fff) * 16;
    RunWith(sums, a, [b, part_bytes](unsigned k, unsigned column) {
      return TileElement<T>(b, column / 64 * part_bytes + k * 128 + column % 64 * 2);
    });
  }

 private:
  template <int kSize, typename B>
  static void RunWith(float (&sums)[kSize], const uint32_t (&a)[4], B b_element) {
    using namespace emulation;
    static_assert(kSize >= kN / 2);
    ShowA<T>(a);
    SyncWarp();
    const auto& shown = fragments[Warp()].a;
    const unsigned g = Lane() / 4;
    MultiplyTile<kN>(
        sums, [&](unsigned row, unsigned k) { return shown[g + 8 * row][k]; }, b_element);
    SyncWarp();
  }
};

template <typename T, int kN>
struct WgmmaShared {
  static void Run(float (&sums)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    using namespace emulation;
    if (!accumulate) std::fill(sums, sums + kN / 2, 0.0f);
    const unsigned first = Warp() % 4 * 16 + Lane() / 4;
    float rows[2][16];
    for (unsigned row = 0; row < 2; ++row) {
      for (unsigned k = 0; k < 16; ++k) {
        rows[row][k] = TileElement<T>(a, (first + 8 * row) * 128 + 2 * k);
      }
    }
    MultiplyTile<kN>(
        sums, [&](unsigned row, unsigned k) { return rows[row][k]; },
        [b](unsigned k, unsigned column) { return TileElement<T>(b, column * 128 + 2 * k); });
  }
};

}  // namespace nvfp4
