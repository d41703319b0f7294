// Just enough of CUDA to run the engines' kernels on a CPU, one block of threads at a time.
//
// Each thread of a block is a fiber that runs until it has to wait for others. Blocks run from the
// last to the first, because a block only ever waits for later ones. The blocks of a cluster run at
// once. Shared memory is static and starts as garbage; in a cluster, only dynamic shared memory is
// that of a block. A kernel that violates a rule of the real instructions (alignment, bounds,
// arrivals at a barrier) ends the process with a message.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#undef __align__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __noinline__
#undef __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__  // GNU's headers use this name for an attribute
#define __shared__ static

namespace emulation {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 64;  // of all blocks of a cluster
constexpr int kWords = 8;

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

// The thread and the block that run now, and the number of the block in its cluster.
extern unsigned thread, block, rank;
extern unsigned block_threads;
extern dim3 grid;
inline unsigned Thread() { return thread; }
inline unsigned Block() { return block; }
inline unsigned Blocks() { return grid.x; }

void SyncCluster();
void SyncBlock();
void SyncWarp();
// Lets the other threads run. `progress` counts events that may end a thread's wait.
void Yield();
extern long progress;
// The kWords words that each lane of a warp shows to the others.
extern uint64_t words[kMaxWarps][kWarp][kWords];
inline uint64_t* WordsOf(unsigned warp, unsigned lane) { return words[warp][lane]; }
// The operands of a warp's MMA, as numbers: a by rows, b by columns.
struct Fragments {
  float a[16][16];
  float b[8][16];
};
extern Fragments fragments[kMaxWarps];

// Whether each block of the cluster has called WaitForPrecedingKernel, or need not. After a launch
// that overlaps, `missed_waits` is the number of blocks that have not.
constexpr int kMaxCluster = 8;
extern bool has_waited[kMaxCluster];
extern int missed_waits;

void Run(dim3 grid, int threads, bool overlaps, const std::function<void()>& kernel,
         int cluster = 1);

// The dynamic shared memory of the kernel that runs now, and that of each block of a cluster.
constexpr size_t kDynamicRoom = 1 << 18;
extern uint8_t dynamic_of_all[];
extern int dynamic_bytes;
inline uint8_t* DynamicOf(unsigned rank) { return dynamic_of_all + rank * kDynamicRoom; }
inline uint8_t* Dynamic() { return DynamicOf(rank); }

// The lane of the calling thread, and its warp in the cluster.
inline unsigned Lane() { return Thread() % kWarp; }
inline unsigned Warp() { return (rank * block_threads + Thread()) / kWarp; }

template <typename T>
T Exchange(T value, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof(T));
  WordsOf(Warp(), Lane())[0] = raw;
  SyncWarp();
  T other;
  std::memcpy(&other, &WordsOf(Warp(), lane % kWarp)[0], sizeof(T));
  SyncWarp();
  return other;
}

// Folds the values of all lanes of the warp, from lane 0 on: result = fold(result, value, lane).
template <typename T, typename Result, typename Function>
Result Fold(T value, Result result, Function fold) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(&WordsOf(Warp(), Lane())[0], &value, sizeof(T));
  SyncWarp();
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    T other;
    std::memcpy(&other, &WordsOf(Warp(), lane)[0], sizeof(T));
    result = fold(result, other, lane);
  }
  SyncWarp();
  return result;
}

struct ThreadIndex {
  struct X {
    operator unsigned() const { return Thread(); }
  } x;
};
struct BlockIndex {
  struct X {
    operator unsigned() const { return Block(); }
  } x;
};
struct GridSize {
  struct X {
    operator unsigned() const { return Blocks(); }
  } x;
};

}  // namespace emulation

static emulation::ThreadIndex threadIdx;
static emulation::BlockIndex blockIdx;
static emulation::GridSize gridDim;

using std::isnan;
using std::max;
template <typename A, typename B>
auto min(A a, B b) {
  return a < b ? a : b;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int bits) {
  return bits % 32 == 0 ? low : (low >> bits % 32) | (high << (32 - bits % 32));
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = selector >> (4 * i) & 7;
    chosen |= static_cast<uint32_t>(bytes >> (8 * byte) & 0xff) << (8 * i);
  }
  return chosen;
}
inline void __syncthreads() { emulation::SyncBlock(); }
inline void __syncwarp() { emulation::SyncWarp(); }
inline void __nanosleep(unsigned) { emulation::Yield(); }
template <typename T>
T __ldg(const T* place) {
  return *place;
}
template <typename T>
T __ldcg(const T* place) {
  return *place;
}
template <typename T>
T __ldcs(const T* place) {
  return *place;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline int atomicAdd(int* place, int value) {
  const int before = *place;
  *place += value;
  return before;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::Exchange(value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::Exchange(value, emulation::Lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned step) {
  const unsigned lane = emulation::Lane();
  return emulation::Exchange(value, lane >= step ? lane - step : lane);
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  return emulation::Fold(value, value,
                         [](T most, T other, unsigned) { return std::max(most, other); });
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  return emulation::Fold(value, value,
                         [](T least, T other, unsigned) { return std::min(least, other); });
}
inline unsigned __ballot_sync(unsigned, bool bit) {
  return emulation::Fold(bit, 0u, [](unsigned bits, bool other, unsigned lane) {
    return bits | static_cast<unsigned>(other) << lane;
  });
}
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  return emulation::Fold(value, 0u, [value](unsigned equal, T other, unsigned lane) {
    return equal | static_cast<unsigned>(other == value) << lane;
  });
}
