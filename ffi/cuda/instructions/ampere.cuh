// Instructions of sm_80 and later that C++ has no words for, one function each.
//
// Together with async_copy.cuh, mma.cuh and hopper.cuh these are all of the assembly in the kernels
// of the engines: tests/emulation has another form of each file that runs on a CPU. Source: PTX
// ISA 9.0, the sections of their names.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/instructions/async_copy.cuh"

namespace nvfp4 {

// threadIdx.x, read where it stands: what is made of it is not kept in registers from before.
__device__ __forceinline__ int ReadThread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Bits of `a` where `mask` is set, of `b` elsewhere; one LOP3.
__device__ __forceinline__ uint32_t Select(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
}

// base + 16 * units, in one instruction; written as such the compiler would add up other things.
__device__ __forceinline__ const void* Advance(const void* base, uint32_t units) {
  const void* sum;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(sum) : "r"(units), "l"(base));
  return sum;
}

// 2^x and 1 / x within 2 ulp; results and reciprocals of subnormals are zeros and infinities.
__device__ __forceinline__ float FastExp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
__device__ __forceinline__ float FastReciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Element pairs of an 8x8 matrix of 16-bit elements, row g columns 2q and 2q + 1 -> transposed.
__device__ __forceinline__ uint32_t Transpose(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address));
  return words;
}

__device__ __forceinline__ uint2 LoadShared8(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
  return words;
}

__device__ __forceinline__ int32_t LoadShared4(uint32_t address) {
  int32_t word;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ void StoreShared4(uint32_t address, int32_t word) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ int32_t LoadAcquire(const int32_t* flag) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void StoreRelease(int32_t* flag, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Barrier `id` (1 to 15) of `threads` threads of the block.
__device__ __forceinline__ void SyncGroup(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace nvfp4
