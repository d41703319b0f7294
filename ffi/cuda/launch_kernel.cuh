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

}  // namespace nvfp4

#define NVFP4_RETURN_IF_CUDA_ERROR(expression)            \
  do {                                                    \
    const cudaError_t nvfp4_status = (expression);        \
    if (nvfp4_status != cudaSuccess) return nvfp4_status; \
  } while (false)
