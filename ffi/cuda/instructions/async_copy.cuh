// cp.async of sm_80 and later: copies of 16 bytes from global to shared memory that need no
// registers. A thread's copies form groups, which it can wait for in their order.
//
// Shared memory is named by its 32-bit address. Source: PTX ISA 9.0, "cp.async".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory, without the L1 cache: `bytes` (0 to 16) of them read, the rest zeros.
__device__ __forceinline__ void CopyOrZero(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// The same of 8 bytes.
__device__ __forceinline__ void Copy8OrZero(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void Copy(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Ends a group: the copies since the last one, maybe none.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when at most the last kGroups groups of this thread's copies are still under way.
template <int kGroups>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace nvfp4
