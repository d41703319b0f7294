// Loads and stores by which GPUs of one host synchronize through memory, the clock that all
// multiprocessors share, and the end of a kernel with an error.
//
// A release at the scope of the system makes everything that its thread has written before, or has
// seen through a barrier of its block, visible to the thread of another GPU whose acquire reads the
// released value. Addresses are those of global memory.
//
// Source: PTX ISA 9.0, "Memory Consistency Model", "st", "ld" and "Special Registers: globaltimer".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

__device__ __forceinline__ void StoreRelease(uint64_t* target, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t LoadAcquire(const uint64_t* source) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
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
