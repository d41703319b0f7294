// Loads and stores by which GPUs of one host exchange numbers through memory, the clock that all
// multiprocessors share, and the end of a kernel with an error.
//
// Each number of 64 bits is written and read at once: a reader finds all of its bits, or none.
// There is no order between two numbers, not even between those of a pair. Addresses are those of
// global memory, and those of a pair are multiples of 16.
//
// Source: PTX ISA 9.0, "Memory Consistency Model" ("Vector Data-types"), "st", "ld" and "Special
// Registers: globaltimer".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

__device__ __forceinline__ void StoreForPeer(uint64_t* target, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}
__device__ __forceinline__ void StorePairForPeer(uint64_t* target, uint64_t first,
                                                 uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(target), "l"(first), "l"(second)
               : "memory");
}

__device__ __forceinline__ uint64_t LoadOfPeer(const uint64_t* source) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}
__device__ __forceinline__ void LoadPairOfPeer(const uint64_t* source, uint64_t* first,
                                               uint64_t* second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(*first), "=l"(*second)
               : "l"(source)
               : "memory");
}

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Ends the kernel. All later work of this process on this GPU then fails with an error.
[[noreturn]] __device__ __forceinline__ void EndWithError() {
  __threadfence_system();  // what this thread has written reaches the host before
  asm volatile("trap;");
  __builtin_unreachable();
}

}  // namespace nvfp4
