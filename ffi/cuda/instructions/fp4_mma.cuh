// The block-scaled FP4 MMA. Only compute capability 12.x has the instruction. On any other device,
// the same function emulates it, so that a kernel that uses it runs there too, slowly.
//
// sums [16 x 8] += A [16 x 64] @ B [64 x 8], where A and B are E2M1 codes. Each 16 of k of a row of
// A, and of a column of B, has a UE4M3 scale. The following are the fragments of m16n8k64, with
// lane = 4 g + q. A register has 8 codes, the first one in the low bits (PTX ISA, "Matrix fragments
// for mma.m16n8k64" and "Block scaling"):
//   a[0] row g, k 8q to 8q + 7;  a[1] row g + 8;  a[2], a[3] the same rows at k + 32
//   b[0] column g, k 8q to 8q + 7;  b[1] the same column at k + 32
//   scale_a  row g + 8 (q % 2), scale_b  column g: byte b is the scale of k 16b to 16b + 15
//   sums[0], [1] row g, columns 2q and 2q + 1;  sums[2], [3] row g + 8
//
// The instruction reads scales of A from lanes with q = 0 and 1, and scales of B from lanes with q
// = 0. All lanes hold scales here, so that its lane selectors do not matter. A NaN scale makes the
// sums NaN.
//
// Tests: tests/emulation/test_fp4_fragments.py has these maps from CuTe, and tests/gpu/test_sass.py
// counts the instructions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/instructions/fp4_emulation.cuh"

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1200
#define NVFP4_HAS_FP4_MMA 1
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#error "plain sm_120 has no block-scaled mma: compile for 120f or 120a"
#else
#define NVFP4_HAS_FP4_MMA 0
#endif

namespace nvfp4 {

#if NVFP4_HAS_FP4_MMA

__device__ __forceinline__ void MultiplyAddFp4(float (&sums)[4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[2], uint32_t scale_a,
                                               uint32_t scale_b) {
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
      ".f32.e2m1.e2m1.f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3}, {%10}, {%12, %12}, {%11}, {%12, %12};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
        "r"(scale_b), "h"(static_cast<uint16_t>(0)));
}

#else

__device__ __forceinline__ void MultiplyAddFp4(float (&sums)[4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[2], uint32_t scale_a,
                                               uint32_t scale_b) {
  const float4 after =
      EmulateFp4(make_float4(sums[0], sums[1], sums[2], sums[3]),
                 make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b[0], b[1]), scale_a, scale_b);
  sums[0] = after.x, sums[1] = after.y, sums[2] = after.z, sums[3] = after.w;
}

#endif

}  // namespace nvfp4
