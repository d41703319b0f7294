// Replaces peer_memory.cuh on threads of a CPU.
#pragma once

#include <chrono>

#include "cuda_on_threads.h"

namespace nvfp4 {

inline void StoreRelease(uint64_t* target, uint64_t value) {
  threads::MayWait();
  __atomic_store_n(target, value, __ATOMIC_RELEASE);
}
inline uint64_t LoadAcquire(const uint64_t* source) {
  threads::MayWait();
  return __atomic_load_n(source, __ATOMIC_ACQUIRE);
}
inline uint64_t Nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
[[noreturn]] inline void EndWithError() { threads::End(); }

}  // namespace nvfp4
