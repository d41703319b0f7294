// The Hopper instructions that the kernels of sm_90a are made of, one function each.
//
// Shared memory is named by its 32-bit address. A full or empty barrier of a pipeline stage is an
// mbarrier whose phase the caller tracks as one bit. Source: PTX ISA 9.0, "mbarrier", "cp.async",
// "wgmma", "griddepcontrol".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace nvfp4 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; before the block's barrier.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to what the phase waits for.
__device__ __forceinline__ void ArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives once this thread's earlier cp.async have landed; one of the barrier's own arrivals.
__device__ __forceinline__ void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// `bytes` contiguous bytes, a multiple of 16, to shared memory; they count on `barrier`.
__device__ __forceinline__ void BulkCopy(uint32_t target, const void* source, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Orders shared memory that other threads wrote before what the tensor cores read next.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits for the kernels before this one in the stream, where it was launched to overlap them.
__device__ __forceinline__ void WaitForPrecedingKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel's blocks start where there is room; they wait by the function above.
__device__ __forceinline__ void StartNextKernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of a K-major tile of 16-bit elements, rows of 128 bytes in the 128-byte swizzle (16
// bytes c of row r at c ^ r % 8), 1024-byte aligned; 16 elements of k further is + 2.
__device__ __forceinline__ uint64_t TileDescriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (uint64_t{1} << 16) | ((address >> 4) & 0x3fff);
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when at most the last kGroups committed groups of products are still running.
template <int kGroups>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// sums += a @ b for 64 rows, kN columns and 16 of k: a from registers (the fragments of mma.cuh,
// warp w of the warpgroup has rows 16 w to 16 w + 15), b from shared memory. sums[4 j + i] is
// element i of the fragment of columns 8 j to 8 j + 7.
template <typename T, int kN>
struct Wgmma;

#define NVFP4_SUMS_8(s) "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
#define NVFP4_SUMS_16(s) \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
#define NVFP4_SUMS_24(s)                                                                          \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), \
      "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11])
#define NVFP4_SUMS_32(s)                                                                          \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), \
      "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]),    \
      "+f"(s[15])
#define NVFP4_SUMS_48(s)                                                                          \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), \
      "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]),    \
      "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]),  \
      "+f"(s[22]), "+f"(s[23])
#define NVFP4_SUMS_64(s)                                                                          \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), \
      "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]),    \
      "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]),  \
      "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]),  \
      "+f"(s[29]), "+f"(s[30]), "+f"(s[31])
#define NVFP4_SUMS_96(s)                                                                          \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), \
      "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]),    \
      "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]),  \
      "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]),  \
      "+f"(s[29]), "+f"(s[30]), "+f"(s[31]), "+f"(s[32]), "+f"(s[33]), "+f"(s[34]), "+f"(s[35]),  \
      "+f"(s[36]), "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), "+f"(s[40]), "+f"(s[41]), "+f"(s[42]),  \
      "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47])
#define NVFP4_SUMS_128(s)                                                                         \
  "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), \
      "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]),    \
      "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]),  \
      "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]),  \
      "+f"(s[29]), "+f"(s[30]), "+f"(s[31]), "+f"(s[32]), "+f"(s[33]), "+f"(s[34]), "+f"(s[35]),  \
      "+f"(s[36]), "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), "+f"(s[40]), "+f"(s[41]), "+f"(s[42]),  \
      "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47]), "+f"(s[48]), "+f"(s[49]),  \
      "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), "+f"(s[54]), "+f"(s[55]), "+f"(s[56]),  \
      "+f"(s[57]), "+f"(s[58]), "+f"(s[59]), "+f"(s[60]), "+f"(s[61]), "+f"(s[62]), "+f"(s[63])

#define NVFP4_WGMMA(type, ptx_type, n, sums_text, rest_text)                                 \
  template <>                                                                                \
  struct Wgmma<type, n> {                                                                    \
    template <int kSize>                                                                     \
    static __device__ __forceinline__ void Run(float (&sums)[kSize], const uint32_t (&a)[4], \
                                               uint64_t b) {                                 \
      static_assert(kSize >= n / 2, "room for the sums");                                    \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx_type "." ptx_type   \
                   " {" sums_text "}, " rest_text ", 1, 1, 1, 0;"                            \
                   : NVFP4_SUMS_##n(sums)                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
    }                                                                                        \
  };
#define NVFP4_WGMMA_BOTH(n, sums_text, rest_text)             \
  NVFP4_WGMMA(__nv_bfloat16, "bf16", n, sums_text, rest_text) \
  NVFP4_WGMMA(__half, "f16", n, sums_text, rest_text)

NVFP4_WGMMA_BOTH(8, "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8")
NVFP4_WGMMA_BOTH(16, "%0, %1, %2, %3, %4, %5, %6, %7", "{%8, %9, %10, %11}, %12")
NVFP4_WGMMA_BOTH(24, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11",
                 "{%12, %13, %14, %15}, %16")
NVFP4_WGMMA_BOTH(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                 "{%16, %17, %18, %19}, %20")
NVFP4_WGMMA_BOTH(48,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23",
                 "{%24, %25, %26, %27}, %28")
NVFP4_WGMMA_BOTH(64,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                 "{%32, %33, %34, %35}, %36")
NVFP4_WGMMA_BOTH(96,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
                 "{%48, %49, %50, %51}, %52")
NVFP4_WGMMA_BOTH(128,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                 "{%64, %65, %66, %67}, %68")
#undef NVFP4_WGMMA_BOTH
#undef NVFP4_WGMMA

}  // namespace nvfp4
