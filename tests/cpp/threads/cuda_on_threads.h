// Just enough of CUDA to run blocks of a kernel at the same time, on threads of a CPU. Several
// GPUs are several sets of blocks. Shared memory and exchanges within a warp are missing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <pthread.h>

#include <cstdint>

#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace threads {

struct Index {
  unsigned x = 0;
};
extern thread_local Index thread, block;
extern thread_local pthread_barrier_t* block_barrier;

// Lets the calling thread lose its turn now and then, at random.
void MayWait();
[[noreturn]] void End();

}  // namespace threads

#define threadIdx threads::thread
#define blockIdx threads::block

inline void __syncthreads() {
  threads::MayWait();
  pthread_barrier_wait(threads::block_barrier);
}
template <typename T>
T __ldg(const T* source) {
  return *source;
}
template <typename T>
T __ldcg(const T* source) {
  return *source;
}
