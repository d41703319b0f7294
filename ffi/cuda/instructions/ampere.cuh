// Instructions of sm_80 and later for which C++ has no expression, one function for each.
//
// This file, async_copy.cuh, mma.cuh, hopper.cuh and tensor_map.cuh have all assembly of the
// engines and of attention. tests/emulation has another version of each file, which runs on a CPU.
// Source: PTX ISA 9.0, the section that is named after each instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/instructions/async_copy.cuh"

namespace nvfp4 {

// Returns threadIdx.x, and reads it again at each call. The compiler therefore does not keep the
// thread, or what is computed from it, in registers between calls.
__device__ __forceinline__ int ReadThread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Returns the bits of `a` where `mask` is set, and those of `b` elsewhere, in one LOP3.
__device__ __forceinline__ uint32_t Select(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
}

// Returns two bytes of `word` as signed 16-bit numbers: those of its low half (kHalf = 0) or of its
// high half.
template <int kHalf>
__device__ __forceinline__ uint32_t WidenBytes(uint32_t word) {
  uint32_t numbers;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(numbers) : "r"(word), "n"(kHalf == 0 ? 0x9180 : 0xb3a2));
  return numbers;
}

// The same for bytes kFirst (0 or 1) and kFirst + 2.
template <int kFirst>
__device__ __forceinline__ uint32_t WidenAlternate(uint32_t word) {
  uint32_t numbers;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(numbers) : "r"(word), "n"(kFirst == 0 ? 0xa280 : 0xb391));
  return numbers;
}

// Keeps the compiler from computing `word` later than here. It costs no instruction.
__device__ __forceinline__ void Settle(uint32_t& word) { asm volatile("" : "+r"(word)); }

// Returns base + 16 * units, in one instruction. From the C++ expression, the compiler would
// combine other terms with this one.
__device__ __forceinline__ const void* Advance(const void* base, uint32_t units) {
  const void* sum;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(sum) : "r"(units), "l"(base));
  return sum;
}

// Return 2^x and 1 / x with an error of up to 2 ulp. A subnormal result becomes 0, and the
// reciprocal of a subnormal infinity.
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

// Transposes an 8x8 matrix of 16-bit elements. Lane 4 g + q gives columns 2 q and 2 q + 1 of row g,
// and gets the same places of the transposed matrix.
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

// Waits at barrier `id` (1 to 15) for `threads` threads of the block. ArriveGroup counts whole
// warps among them that do not wait.
__device__ __forceinline__ void SyncGroup(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void ArriveGroup(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace nvfp4
