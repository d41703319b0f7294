// cp.async of sm_80 and later: copies from global to shared memory that need no registers. The
// copies of a thread form groups, and the thread can wait for its groups in order.
//
// Shared memory is named by its 32-bit address. Source: PTX ISA 9.0, "cp.async".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes to shared memory that bypasses the L1 cache. It reads `bytes` bytes (0
// to 16), and writes zeros for the rest.
__device__ __forceinline__ void CopyOrZero(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// The same through the L1 cache, for what several blocks of a multiprocessor read.
__device__ __forceinline__ void CopyCachedOrZero(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Starts a copy of 8 bytes to shared memory. It reads `bytes` bytes (0 to 8), and writes zeros for
// the rest.
__device__ __forceinline__ void Copy8OrZero(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
}

// As Copy8OrZero, for 4 bytes.
__device__ __forceinline__ void Copy4OrZero(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void Copy(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Ends a group, which has the copies since the previous group. It may be empty.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when no more than the last kGroups groups of this thread's copies are in flight.
template <int kGroups>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace nvfp4
