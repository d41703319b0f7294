// One way to start a kernel, so that every launch checks its error and none has an empty grid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(cudaStream_t stream, dim3 grid, int threads, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  kernel<<<grid, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

// As Launch, with `shared_bytes` of dynamic shared memory; where `overlaps`, blocks may start
// before the kernel ahead in the stream has ended: they have to wait for what it writes (sm_90 and
// later).
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchWide(cudaStream_t stream, dim3 grid, int threads, int shared_bytes, bool overlaps,
                       void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Multiprocessors of the current device.
inline int MultiprocessorCount() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  return count;
}

}  // namespace nvfp4

#define NVFP4_RETURN_IF_CUDA_ERROR(expression)            \
  do {                                                    \
    const cudaError_t nvfp4_status = (expression);        \
    if (nvfp4_status != cudaSuccess) return nvfp4_status; \
  } while (false)
