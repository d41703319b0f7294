// Replaces peer_memory.cuh on threads of a CPU.
#pragma once

#include <chrono>

#include "cuda_on_threads.h"

namespace nvfp4 {

inline void StoreForPeer(uint64_t* target, uint64_t value) {
  threads::MayWait();
  __atomic_store_n(target, value, __ATOMIC_RELAXED);
}
inline void StorePairForPeer(uint64_t* target, uint64_t first, uint64_t second) {
  StoreForPeer(target + 1, second);
  StoreForPeer(target, first);
}
inline uint64_t LoadOfPeer(const uint64_t* source) {
  threads::MayWait();
  return __atomic_load_n(source, __ATOMIC_RELAXED);
}
inline void LoadPairOfPeer(const uint64_t* source, uint64_t* first, uint64_t* second) {
  *first = LoadOfPeer(source);
  *second = LoadOfPeer(source + 1);
}
inline uint64_t Nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
[[noreturn]] inline void EndWithError() { threads::End(); }

}  // namespace nvfp4
