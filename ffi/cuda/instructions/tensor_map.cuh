// Copies of tiles by tensor maps of Hopper: one thread starts a copy, and the hardware computes the
// addresses, swizzles the tile, and writes zeros for what lies outside of the array.
//
// The host makes a tensor map, which is a kernel argument. It has the address of the array, so that
// it is made again for each call. Source: PTX ISA 9.0, "cp.async.bulk.tensor"; CUDA driver API,
// "Tensor Map Object Management".
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4 {

using TensorMap = CUtensorMap;

// An array of 16-bit elements with four dimensions, the innermost first, and the tile that one copy
// brings. A tile has 64 elements of the innermost dimension, in the 128-byte swizzle of hopper.cuh.
struct TiledArray {
  const void* values;   // aligned to 16 bytes
  uint64_t sizes[4];    // at least 1
  uint64_t strides[3];  // bytes from one index to the next, without the innermost dimension
  uint32_t tile[3];     // elements of a tile along the outer dimensions, up to 256
};
constexpr uint32_t kTileWidth = 64;

inline cudaError_t MakeTensorMap(const TiledArray& array, TensorMap* map) {
  // The runtime finds the function of the driver. The library is therefore not linked to a driver.
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = {};
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                              12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const uint32_t box[4] = {kTileWidth, array.tile[0], array.tile[1], array.tile[2]};
  const uint32_t steps[4] = {1, 1, 1, 1};
  const CUresult made = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(array.values), array.sizes,
      array.strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Copies the tile at an index to shared memory. All bytes of the tile count on `barrier`, and also
// those outside of the array.
__device__ __forceinline__ void CopyTile(uint32_t target, const TensorMap& map, int i0, int i1,
                                         int i2, int i3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];" ::"r"(target),
      "l"(&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(barrier)
      : "memory");
}

}  // namespace nvfp4
