// Replaces peer_memory.cuh on a CPU, where a single GPU runs. What other GPUs send is there before.
#pragma once

#include <chrono>

#include "cuda_on_cpu.h"

namespace nvfp4 {

inline void StoreForPeer(uint64_t* target, uint64_t value) { *target = value; }
inline void StorePairForPeer(uint64_t* target, uint64_t first, uint64_t second) {
  target[0] = first;
  target[1] = second;
}
inline uint64_t LoadOfPeer(const uint64_t* source) {
  emulation::Yield();
  return *source;
}
inline void LoadPairOfPeer(const uint64_t* source, uint64_t* first, uint64_t* second) {
  *first = LoadOfPeer(source);
  *second = source[1];
}
inline uint64_t Nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
[[noreturn]] inline void EndWithError() { emulation::Fail("a kernel ends with an error"); }

}  // namespace nvfp4
