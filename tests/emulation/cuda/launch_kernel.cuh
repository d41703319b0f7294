// Replaces launch_kernel.cuh on a CPU.
#pragma once

#include <algorithm>

#include "cuda_on_cpu.h"
#include "shapes.h"

namespace nvfp4 {

extern int multiprocessors;
extern int capability_major;

constexpr int64_t kDynamicAlignment = 1024;

inline int MultiprocessorCount() { return multiprocessors; }
inline int ComputeCapabilityMajor() { return capability_major; }
extern int block_shared_bytes;    // the limit of the emulated device
extern int largest_shared_bytes;  // most dynamic bytes of a launch since `configure`
extern int largest_cluster;       // most blocks of a cluster since then
extern int launches;              // since then
inline int BlockSharedBytes() { return block_shared_bytes; }
inline int MultiprocessorSharedBytes() { return block_shared_bytes + 1024; }

template <typename... Parameters>
bool MayOverlap(void (*)(Parameters...)) {
  return true;
}

template <typename... Parameters>
bool HasCode(void (*)(Parameters...)) {
  return true;
}

// Blocks do not share a multiprocessor here.
template <typename... Parameters>
int SharedBytesAlone(int64_t, int, int, int shared_bytes, void (*)(Parameters...)) {
  return shared_bytes;
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchClusters(cudaStream_t, dim3 grid, int cluster, int threads, int shared_bytes,
                           bool overlaps, void (*kernel)(Parameters...),
                           const Arguments&... arguments) {
  if (shared_bytes > block_shared_bytes) return cudaErrorInvalidValue;
  largest_shared_bytes = std::max(largest_shared_bytes, shared_bytes);
  largest_cluster = std::max(largest_cluster, cluster);
  ++launches;
  emulation::dynamic_bytes = shared_bytes;
  for (int rank = 0; rank < cluster; ++rank) {
    std::memset(emulation::DynamicOf(rank), 0xff, shared_bytes);
  }
  emulation::Run(grid, threads, overlaps, [&] { kernel(arguments...); }, cluster);
  if (emulation::missed_waits > 0) emulation::Fail("a block does not wait");
  return cudaSuccess;
}

template <typename... Parameters>
cudaError_t PrepareOverlap(void (*kernel)(Parameters...), bool* overlaps) {
  *overlaps = MayOverlap(kernel);
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchPrepared(cudaStream_t stream, dim3 grid, int cluster, int threads,
                           int shared_bytes, bool overlaps, void (*kernel)(Parameters...),
                           const Arguments&... arguments) {
  return LaunchClusters(stream, grid, cluster, threads, shared_bytes, overlaps, kernel,
                        arguments...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchWide(cudaStream_t stream, dim3 grid, int threads, int shared_bytes, bool overlaps,
                       void (*kernel)(Parameters...), const Arguments&... arguments) {
  return LaunchClusters(stream, grid, 1, threads, shared_bytes, overlaps, kernel, arguments...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(cudaStream_t stream, dim3 grid, int threads, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  return LaunchWide(stream, grid, threads, 0, false, kernel, arguments...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchCached(cudaStream_t stream, dim3 grid, int threads, void (*kernel)(Parameters...),
                         Arguments... arguments) {
  return Launch(stream, grid, threads, kernel, arguments...);
}

template <typename... Parameters>
bool HasClusters(void (*)(Parameters...)) {
  return true;
}

inline cudaError_t LaunchZeros(cudaStream_t, void* values, int64_t bytes) {
  std::memset(values, 0, bytes);
  return cudaSuccess;
}

}  // namespace nvfp4

#define NVFP4_DYNAMIC_SHARED(name) uint8_t* const name = emulation::Dynamic()

#define NVFP4_RETURN_IF_CUDA_ERROR(expression)            \
  do {                                                    \
    const cudaError_t nvfp4_status = (expression);        \
    if (nvfp4_status != cudaSuccess) return nvfp4_status; \
  } while (false)
