// Replaces async_copy.cuh on a CPU: copies finish at once.
#pragma once

#include "cuda_on_cpu.h"

namespace nvfp4 {

// Dynamic shared memory is at address 0. Other shared variables are at their distance from it, plus
// this.
constexpr uint32_t kElsewhere = 1u << 30;

inline uint32_t SharedAddress(const void* pointer) {
  const int64_t offset = static_cast<const uint8_t*>(pointer) - emulation::Dynamic();
  const bool inside = offset >= 0 && offset <= emulation::dynamic_bytes;
  return static_cast<uint32_t>(inside ? offset : kElsewhere + offset);
}

// Returns the address of `bytes` bytes of dynamic shared memory.
inline uint8_t* At(uint32_t address, uint32_t bytes) {
  if (address + bytes > static_cast<uint32_t>(emulation::dynamic_bytes)) {
    emulation::Fail("an address outside of shared memory");
  }
  if (address % std::min(bytes, 16u) != 0) emulation::Fail("an address that is not aligned");
  return emulation::Dynamic() + address;
}

inline void CopySome(uint32_t target, const void* source, int bytes, uint32_t size) {
  if (reinterpret_cast<uintptr_t>(source) % size != 0) emulation::Fail("cp.async is not aligned");
  if (bytes < 0 || bytes > static_cast<int>(size)) emulation::Fail("cp.async of too many bytes");
  uint8_t* place = At(target, size);
  std::memset(place, 0, size);
  if (bytes > 0) std::memcpy(place, source, bytes);
}
inline void CopyOrZero(uint32_t target, const void* source, int bytes) {
  CopySome(target, source, bytes, 16);
}
inline void Copy8OrZero(uint32_t target, const void* source, int bytes) {
  CopySome(target, source, bytes, 8);
}
inline void Copy4OrZero(uint32_t target, const void* source, int bytes) {
  CopySome(target, source, bytes, 4);
}
inline void CopyCachedOrZero(uint32_t target, const void* source, int bytes) {
  CopyOrZero(target, source, bytes);
}

inline void Copy(uint32_t target, const void* source) { CopyOrZero(target, source, 16); }
inline void CommitCopies() {}
template <int kGroups>
void WaitCopies() {}

}  // namespace nvfp4
