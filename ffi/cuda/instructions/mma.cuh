// Tensor-core instructions of sm_80 and later, one function for each.
//
// Fragments of m16n8k16, lane = 4 g + q (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   a[0] row g, k 2q and 2q + 1;  a[1] row g + 8;  a[2], a[3] the same rows at k + 8
//   b[0] column g, k 2q and 2q + 1;  b[1] the same column at k + 8
//   sums[0], [1] row g, columns 2q and 2q + 1;  sums[2], [3] row g + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace nvfp4 {

// Loads four 8x8 matrices of 16-bit elements from shared memory. Lane l gives the address of row l
// % 8 of matrix l / 8, which has 16 bytes. It gets elements 2q and 2q + 1 of row g of each matrix.
__device__ __forceinline__ void LoadMatricesAt(uint32_t row, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

// The same with a generic address.
__device__ __forceinline__ void LoadMatrices(const void* row, uint32_t (&words)[4]) {
  LoadMatricesAt(static_cast<uint32_t>(__cvta_generic_to_shared(row)), words);
}

// Loads four 8x8 matrices and transposes each. The lane gets rows 2q and 2q + 1 of column g of each
// matrix.
__device__ __forceinline__ void LoadTransposed(const void* row, uint32_t (&words)[4]) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// sums += a @ b for 16 rows, 8 columns and 16 of k.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);

template <>
__device__ __forceinline__ void MultiplyAdd<__nv_bfloat16>(float (&sums)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void MultiplyAdd<__half>(float (&sums)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds to TensorFloat-32, which has the exponent of float32 and 11 significant bits. Halfway
// cases go away from zero before sm_90, and to even from there on, where that takes one
// instruction.
__device__ __forceinline__ uint32_t RoundToTf32(float value) {
  uint32_t rounded;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
#endif
  return rounded;
}

// sums += a @ b for 16 rows, 8 columns and 8 of k, in TensorFloat-32. Without RoundToTf32, the
// instruction ignores the lowest bits of an operand.
//   a[0] row g, k q;  a[1] row g + 8;  a[2], a[3] the same rows at k + 4
//   b0 column g, k q;  b1 the same column at k + 4;  sums as above
__device__ __forceinline__ void MultiplyAddTf32(float (&sums)[4], const uint32_t (&a)[4],
                                                uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace nvfp4
