// Launches kernels, so that every launch checks its error and no grid is empty.
//
// Kernels may overlap, from 9.0 on: a kernel that is launched with `overlaps` starts when each
// block of the kernel before it has called StartNextKernel or has ended. It must follow these
// rules, whatever the kernel before it is:
//
//   1. Each block calls WaitForPrecedingKernel, and does so before it writes anything, and before
//      it reads what another kernel may write. A wait ends when the preceding kernel has ended, and
//      that kernel has waited likewise, so that all earlier kernels have ended too.
//   2. A block calls StartNextKernel only after it has waited.
//   3. Before a block waits, it may compute, initialize barriers, and prefetch into the L2 cache
//      whatever it reads later. Such a line stays up to date if another kernel writes it.
//
// Rule 2 is what CUDA does not ask for. Without it, a chain of kernels that start the next one at
// once would run ahead, and a kernel could start while the last kernel but one still runs. With
// it, all kernels but the preceding one have ended when a kernel starts. Some launch functions know
// the preceding kernel. Before it waits, their kernel may then read what the preceding one does not
// write. For example, GEMM 2 of an expert layer reads the ids of experts and the schedule while
// GEMM 1 runs.
//
// A chain of calls (call_chain.h) knows which of its operands no call has written so far. They are
// "unchanged since the previous kernel" for every call of the chain but the first. A kernel may
// read them before it waits: weights, the positions of tokens, and the cache or the state of a
// layer that only this call writes. The first kernel of a call reads nothing else. Short kernels
// between others, such as norms, may therefore break rule 2 in a chain (WaitAndStartNextKernel):
// the kernel after them loads its weights meanwhile. So may a linear layer of one row
// (linear_row.cu).
//
// A chain also knows what the preceding call has written. If that call keeps rule 2, everything
// that it has not written is unchanged (RunningChain::IsUnchangedByWriterOf). GEMM 1 of an expert
// layer therefore reads its row of x while the router, the preceding call, still runs.
//
// All other kernels read nothing before they wait, not even weights: in a program of XLA, the
// preceding kernel may be a conversion that writes them.
//
// A kernel that is launched without `overlaps` starts when all earlier kernels have ended. It may
// call StartNextKernel at once.
//
// A chain may fork, to a stream of its own (call_chain.h). Here, "earlier" means "that this kernel
// depends on": the kernels of a fork and of its scope are not earlier than each other. The rules
// hold for each of the two streams, for these reasons:
//
//   * Two kernels have no single preceding kernel: the first one of a fork, and the one that
//     waits for both streams. They are launched as if without `overlaps`
//     (next_kernel_starts_last), so that what they depend on has ended when they start. Each
//     operand that the chain does not write is therefore unchanged, and they may start the next
//     kernel at once.
//   * The kernel before a fork has two successors. The one on the same stream overlaps with it as
//     ever. The first one of the fork starts when the kernel before it has ended. That kernel
//     has waited, so that all earlier kernels have ended too, even if it broke rule 2.
//   * A scope and its fork share no memory that one of them writes: call_chain.py gives values
//     that one of them needs a place of their own. What is unchanged for a kernel of one stream is
//     not written by a kernel of the other.
//   * After the join, a wait for the joining kernel is a wait for both streams.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/kernel_overlap.h"
#include "shapes.h"

namespace nvfp4 {

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(cudaStream_t stream, dim3 grid, int threads, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  next_kernel_starts_last = false;  // as every kernel that is launched here
  kernel<<<grid, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

// Launches a kernel that has many loads in flight and no shared memory to speak of. The data of a
// load passes through the L1 cache. A kernel that overlaps leaves it small (see LaunchClusters),
// and the next kernel may find it as small.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchCached(cudaStream_t stream, dim3 grid, int threads, void (*kernel)(Parameters...),
                         Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1);
  if (status != cudaSuccess) return status;
  return Launch(stream, grid, threads, kernel, arguments...);
}

// Returns an attribute of the current device, or `otherwise` if there is no device.
inline int DeviceAttribute(cudaDeviceAttr attribute, int otherwise) {
  int device = 0, value = otherwise;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}
inline int MultiprocessorCount() { return DeviceAttribute(cudaDevAttrMultiProcessorCount, 1); }
inline int ComputeCapabilityMajor() {
  return DeviceAttribute(cudaDevAttrComputeCapabilityMajor, 0);
}
// Return bytes of shared memory: how much one block may have, and how much all blocks of a
// multiprocessor share.
inline int BlockSharedBytes() {
  return DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 48 << 10);
}
inline int MultiprocessorSharedBytes() {
  return DeviceAttribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0);
}

// Whether the code of the kernel for this device waits for the kernel before it
// (WaitForPrecedingKernel), so that the two may overlap.
inline bool MayOverlap(const cudaFuncAttributes& attributes) { return attributes.ptxVersion >= 90; }
template <typename... Parameters>
bool MayOverlap(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && MayOverlap(attributes);
}

// Whether this build has code of the kernel for the current device.
template <typename... Parameters>
bool HasCode(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return true;
  cudaGetLastError();  // otherwise the next launch would report this error as its own
  return false;
}

// Lets launches of the kernel have all dynamic shared memory that a block of the current device may
// have. All host threads set the same number. Another thread may launch the kernel with more memory
// at the same time, and the attribute must not become smaller in between.
template <typename... Parameters>
cudaError_t AllowSharedMemory(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes = {};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return status;
  const int most = BlockSharedBytes() - static_cast<int>(attributes.sharedSizeBytes);
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

// Each `cluster` blocks of a launch form a cluster.
inline cudaLaunchAttribute ClusterAttribute(int cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// Loads a kernel on the current device, says whether it may overlap with the kernel before it, and
// sets its attributes for that.
template <typename... Parameters>
cudaError_t PrepareOverlap(void (*kernel)(Parameters...), bool* overlaps) {
  cudaFuncAttributes attributes = {};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return status;
  *overlaps = MayOverlap(attributes);
  if (!*overlaps) return cudaSuccess;
  // A multiprocessor must be idle before it divides its memory into shared memory and L1 cache
  // anew. Two kernels therefore overlap on it only if they want the same division.
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// As LaunchClusters, for a kernel whose attributes are set. `overlaps` is what PrepareOverlap says.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchPrepared(cudaStream_t stream, dim3 grid, int cluster, int threads,
                           int shared_bytes, bool overlaps, void (*kernel)(Parameters...),
                           const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  const bool starts_last = std::exchange(next_kernel_starts_last, false);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (overlaps && !starts_last) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) attributes[config.numAttrs++] = ClusterAttribute(cluster);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Launches a kernel with `shared_bytes` bytes of dynamic shared memory. If `overlaps` is set and
// the device can, blocks may start before the kernel ahead in the stream has ended, unless
// next_kernel_starts_last is set; the rules above apply. Each `cluster` blocks form a cluster; more
// than one need sm_90.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchClusters(cudaStream_t stream, dim3 grid, int cluster, int threads,
                           int shared_bytes, bool overlaps, void (*kernel)(Parameters...),
                           const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  // More than 48 KiB of shared memory needs this attribute. The static shared memory of a kernel
  // counts towards the 48 KiB, hence the lower bound here.
  if (shared_bytes > 16 * 1024) {
    const cudaError_t status = AllowSharedMemory(kernel);
    if (status != cudaSuccess) return status;
  }
  if (overlaps) {
    const cudaError_t status = PrepareOverlap(kernel, &overlaps);
    if (status != cudaSuccess) return status;
  }
  return LaunchPrepared(stream, grid, cluster, threads, shared_bytes, overlaps, kernel,
                        arguments...);
}

// Returns the shared memory of a block that needs `shared_bytes`, for a kernel of `blocks` blocks.
// It is so much that each block has a multiprocessor of its own, if the device has room for that.
// Otherwise, a kernel that starts while the one before it still runs would put several blocks on
// each idle multiprocessor, and these end last.
template <typename... Parameters>
int SharedBytesAlone(int64_t blocks, int cluster, int threads, int shared_bytes,
                     void (*kernel)(Parameters...)) {
  const int alone = MultiprocessorSharedBytes() / 2;
  if (alone <= shared_bytes || blocks > MultiprocessorCount()) return shared_bytes;
  if (cluster == 1) return alone;
  cudaLaunchAttribute attribute = ClusterAttribute(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(alone);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const bool fits = AllowSharedMemory(kernel) == cudaSuccess &&
                    cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess &&
                    clusters >= blocks / cluster;
  if (!fits) cudaGetLastError();  // otherwise the next launch would report it as its own
  return fits ? alone : shared_bytes;
}

// As LaunchClusters, without clusters.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchWide(cudaStream_t stream, dim3 grid, int threads, int shared_bytes, bool overlaps,
                       void (*kernel)(Parameters...), const Arguments&... arguments) {
  return LaunchClusters(stream, grid, 1, threads, shared_bytes, overlaps, kernel, arguments...);
}

// Whether the code of the kernel for this device has the barrier of a cluster, which its blocks
// need before LaunchClusters may launch it.
template <typename... Parameters>
bool HasClusters(void (*kernel)(Parameters...)) {
  return MayOverlap(kernel);  // both take code for 9.0 or later
}

// Fills `bytes` bytes with zeros, which are 0.0 in each floating-point type here.
inline cudaError_t LaunchZeros(cudaStream_t stream, void* values, int64_t bytes) {
  return bytes == 0 ? cudaSuccess : cudaMemsetAsync(values, 0, static_cast<size_t>(bytes), stream);
}

// Declares the dynamic shared memory of a kernel. It begins behind the static shared memory, at a
// multiple of kDynamicAlignment.
constexpr int64_t kDynamicAlignment = 1024;
#define NVFP4_DYNAMIC_SHARED(name) \
  extern __shared__ __align__(::nvfp4::kDynamicAlignment) uint8_t name[]

}  // namespace nvfp4

#define NVFP4_RETURN_IF_CUDA_ERROR(expression)            \
  do {                                                    \
    const cudaError_t nvfp4_status = (expression);        \
    if (nvfp4_status != cudaSuccess) return nvfp4_status; \
  } while (false)
