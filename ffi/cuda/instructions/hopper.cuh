// The instructions of Hopper that the kernels for sm_90a use, one function for each.
//
// Shared memory is named by its 32-bit address. The full and the empty barrier of a pipeline stage
// are mbarriers. The caller tracks the phase of a barrier as one bit. Source: PTX ISA 9.0,
// "mbarrier", "cp.async.bulk", "wgmma", "stmatrix", "griddepcontrol", "barrier.cluster", "mapa".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/instructions/async_copy.cuh"

namespace nvfp4 {

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine. Call it before the block's barrier.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to the bytes that the phase waits for.
__device__ __forceinline__ void ArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives when all copies by cp.async that this thread has started are done.
__device__ __forceinline__ void ArriveWhenCopied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Returns whether the phase is over. It may wait for a while before.
__device__ __forceinline__ bool TryWait(uint32_t barrier, uint32_t phase) {
  uint32_t over;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n"
      "}"
      : "=r"(over)
      : "r"(barrier), "r"(phase)
      : "memory");
  return over != 0;
}

// Waits for a phase. Whole warps must call it. Their vote tells the compiler that the lanes stay
// together, so that it can keep the operands of the following MMAs in uniform registers.
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t phase) {
  while (!__all_sync(0xffffffffu, TryWait(barrier, phase))) {
  }
}

// Copies `bytes` contiguous bytes, a multiple of 16, to shared memory. They count on `barrier`.
__device__ __forceinline__ void BulkCopy(uint32_t target, const void* source, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements into shared memory. Lane 4 g + q has columns 2 q and
// 2 q + 1 of row g. Lanes 0 to 7 give the addresses of the 8 rows of the result, 16 bytes each.
__device__ __forceinline__ void StoreMatrix(uint32_t row, uint32_t pair) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(pair)
               : "memory");
}

// Transposes two matrices. Lanes 8 to 15 give the addresses of the rows of the second one.
__device__ __forceinline__ void StoreMatrices(uint32_t row, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row),
               "r"(first), "r"(second)
               : "memory");
}

// Prefetches `bytes` contiguous bytes, a multiple of 16, into the L2 cache.
__device__ __forceinline__ void PrefetchL2(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Prefetches the line of 128 bytes that has this address into the L2 cache. Kernels call it before
// WaitForPrecedingKernel. It therefore does nothing on a device where kernels do not overlap.
__device__ __forceinline__ void PrefetchLine(const void* source) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
#endif
}

// Prefetches `bytes` contiguous bytes. This is thread `thread` of the `threads` that share them. If
// the bytes do not begin at a line, the last line may be missing.
__device__ __forceinline__ void PrefetchLines(const void* source, int bytes, int thread,
                                              int threads) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLine = 128;
#pragma unroll 1
  for (int at = thread * kLine; at < bytes; at += threads * kLine) {
    PrefetchLine(static_cast<const uint8_t*>(source) + at);
  }
#endif
}

// Makes the shared memory that this thread can see visible to the tensor cores.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until the kernels ahead in the stream have ended, if this kernel was launched to overlap
// with them. launch_kernel.cuh has the rules for both functions.
__device__ __forceinline__ void WaitForPrecedingKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next kernel start where there is room.
__device__ __forceinline__ void StartNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Does both. If `at_once` is set, the next kernel may start before the preceding one has ended.
__device__ __forceinline__ void WaitAndStartNextKernel(bool at_once) {
  if (at_once) StartNextKernel();
  WaitForPrecedingKernel();
  StartNextKernel();
}

// Waits for all threads of all blocks of the cluster. What they wrote to shared memory is then
// visible in the whole cluster.
__device__ __forceinline__ void SyncCluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Waits for all threads of all blocks of the cluster, after the last access to the shared memory of
// another block. Nothing becomes visible by it, so that it does not wait for stores.
__device__ __forceinline__ void LeaveCluster() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// The two halves of a barrier of the cluster, for kernels that also exist for devices without
// clusters, where they do nothing. The first half orders no memory: what a thread has loaded and
// used before it is complete, and a fence would wait for its other loads and its stores.
__device__ __forceinline__ void ArriveAtCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Loads from the shared memory of block `rank` of the cluster, at the place of `address` in this
// block's own.
__device__ __forceinline__ float4 LoadPeer16(uint32_t address, uint32_t rank) {
  float4 values;
  asm volatile(
      "{\n"
      ".reg .u32 peer;\n"
      "mapa.shared::cluster.u32 peer, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [peer];\n"
      "}"
      : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
      : "r"(address), "r"(rank)
      : "memory");
  return values;
}

template <int kRegisters>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of a K-major tile of 16-bit elements. Rows have 128 bytes in the 128-byte swizzle:
// chunk c (16 bytes) of row r is stored at c ^ (r % 8). Tiles are aligned to 1024 bytes.
//
// DescriptorAddress returns the low word of the descriptor for a tile in shared memory. Adding 2 to
// that word moves on by 16 elements of k. TileDescriptor makes the whole descriptor of the word.
__device__ __forceinline__ uint32_t DescriptorAddress(uint32_t tile) {
  return tile / 16 | 1u << 16;
}

// The same for a tile whose rows run along k, and which wgmma transposes. Its columns are divided
// into parts of 64, which have 128 bytes of each row. The parts are `part_bytes` apart. Adding 128
// to the word moves on by 16 rows.
__device__ __forceinline__ uint32_t TransposedAddress(uint32_t tile, uint32_t part_bytes) {
  return tile / 16 | part_bytes / 16 << 16;
}

__device__ __forceinline__ uint64_t TileDescriptor(uint32_t address) {
  constexpr uint32_t kSwizzle128 = 1u << 30, kEightRows = 1024 >> 4;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(address), "n"(kSwizzle128 | kEightRows));
  return descriptor;
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when no more than the last kGroups committed groups of MMAs are running.
template <int kGroups>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving code across this point that reads or writes `sums`. It costs no
// instruction.
template <int kSize>
__device__ __forceinline__ void FenceSums(float (&sums)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// sums += a @ b for 64 rows, kN columns and 16 of k. a comes from registers: it has the fragments
// of mma.cuh, and warp w of the warpgroup has rows 16 w to 16 w + 15. b comes from shared memory.
// sums[4 j + i] is element i of the fragment of columns 8 j to 8 j + 7. RunTransposed takes b by a
// TransposedAddress.
template <typename T, int kN>
struct Wgmma;

#define NVFP4_SUMS_4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define NVFP4_SUMS_16(s, i) \
  NVFP4_SUMS_4(s, i), NVFP4_SUMS_4(s, i + 4), NVFP4_SUMS_4(s, i + 8), NVFP4_SUMS_4(s, i + 12)
#define NVFP4_SUMS_OF_8(s) NVFP4_SUMS_4(s, 0)
#define NVFP4_SUMS_OF_16(s) NVFP4_SUMS_4(s, 0), NVFP4_SUMS_4(s, 4)
#define NVFP4_SUMS_OF_24(s) NVFP4_SUMS_4(s, 0), NVFP4_SUMS_4(s, 4), NVFP4_SUMS_4(s, 8)
#define NVFP4_SUMS_OF_32(s) NVFP4_SUMS_16(s, 0)
#define NVFP4_SUMS_OF_48(s) NVFP4_SUMS_16(s, 0), NVFP4_SUMS_4(s, 16), NVFP4_SUMS_4(s, 20)
#define NVFP4_SUMS_OF_64(s) NVFP4_SUMS_16(s, 0), NVFP4_SUMS_16(s, 16)
#define NVFP4_SUMS_OF_80(s) \
  NVFP4_SUMS_16(s, 0), NVFP4_SUMS_16(s, 16), NVFP4_SUMS_4(s, 32), NVFP4_SUMS_4(s, 36)
#define NVFP4_SUMS_OF_96(s) NVFP4_SUMS_16(s, 0), NVFP4_SUMS_16(s, 16), NVFP4_SUMS_16(s, 32)
#define NVFP4_SUMS_OF_112(s)                                                            \
  NVFP4_SUMS_16(s, 0), NVFP4_SUMS_16(s, 16), NVFP4_SUMS_16(s, 32), NVFP4_SUMS_4(s, 48), \
      NVFP4_SUMS_4(s, 52)
#define NVFP4_SUMS_OF_128(s) \
  NVFP4_SUMS_16(s, 0), NVFP4_SUMS_16(s, 16), NVFP4_SUMS_16(s, 32), NVFP4_SUMS_16(s, 48)

#define NVFP4_WGMMA_RUN(name, ptx_type, n, sums_text, rest_text, transposed)                \
  template <int kSize>                                                                      \
  static __device__ __forceinline__ void name(float (&sums)[kSize], const uint32_t (&a)[4], \
                                              uint64_t b) {                                 \
    static_assert(kSize >= n / 2, "room for the sums");                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx_type "." ptx_type    \
                 " {" sums_text "}, " rest_text ", 1, 1, 1, " transposed ";"                \
                 : NVFP4_SUMS_OF_##n(sums)                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                     \
  }
#define NVFP4_WGMMA(type, ptx_type, n, sums_text, rest_text)               \
  template <>                                                              \
  struct Wgmma<type, n> {                                                  \
    NVFP4_WGMMA_RUN(Run, ptx_type, n, sums_text, rest_text, "0")           \
    NVFP4_WGMMA_RUN(RunTransposed, ptx_type, n, sums_text, rest_text, "1") \
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
NVFP4_WGMMA_BOTH(80,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                 "%34, %35, %36, %37, %38, %39",
                 "{%40, %41, %42, %43}, %44")
NVFP4_WGMMA_BOTH(96,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
                 "{%48, %49, %50, %51}, %52")
NVFP4_WGMMA_BOTH(112,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
                 "%50, %51, %52, %53, %54, %55",
                 "{%56, %57, %58, %59}, %60")
NVFP4_WGMMA_BOTH(128,
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                 "{%64, %65, %66, %67}, %68")
#undef NVFP4_WGMMA_BOTH
#undef NVFP4_WGMMA
#undef NVFP4_WGMMA_RUN

// The same with a from shared memory too, as a K-major tile. Without `accumulate`, the sums start
// at 0.
template <typename T, int kN>
struct WgmmaShared;

#define NVFP4_WGMMA_SHARED(type, ptx_type, n, sums_text, flag_text, operands_text)           \
  template <>                                                                                \
  struct WgmmaShared<type, n> {                                                              \
    static __device__ __forceinline__ void Run(float (&sums)[n / 2], uint64_t a, uint64_t b, \
                                               bool accumulate) {                            \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " flag_text           \
                   ", 0;\n"                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx_type "." ptx_type   \
                   " {" sums_text "}, " operands_text ", accumulate, 1, 1, 0, 0;\n}"         \
                   : NVFP4_SUMS_OF_##n(sums)                                                 \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                     \
    }                                                                                        \
  };
#define NVFP4_WGMMA_SHARED_BOTH(n, sums_text, flag_text, operands_text)             \
  NVFP4_WGMMA_SHARED(__nv_bfloat16, "bf16", n, sums_text, flag_text, operands_text) \
  NVFP4_WGMMA_SHARED(__half, "f16", n, sums_text, flag_text, operands_text)

NVFP4_WGMMA_SHARED_BOTH(
    64,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
    "%34", "%32, %33")
NVFP4_WGMMA_SHARED_BOTH(
    128,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
    "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
    "%56, %57, %58, %59, %60, %61, %62, %63",
    "%66", "%64, %65")
#undef NVFP4_WGMMA_SHARED_BOTH
#undef NVFP4_WGMMA_SHARED

}  // namespace nvfp4
