// Replaces tensor_map.cuh on a CPU: a tensor map is the description of its array.
#pragma once

#include "cuda/instructions/hopper.cuh"

namespace nvfp4 {

struct TiledArray {
  const void* values;
  uint64_t sizes[4];
  uint64_t strides[3];
  uint32_t tile[3];
};
constexpr uint32_t kTileWidth = 64;
using TensorMap = TiledArray;

// Checks what the function of the driver checks.
inline cudaError_t MakeTensorMap(const TiledArray& array, TensorMap* map) {
  bool valid = reinterpret_cast<uintptr_t>(array.values) % 16 == 0;
  for (int i = 0; i < 4; ++i) valid &= array.sizes[i] > 0 && array.sizes[i] <= uint64_t{1} << 32;
  for (int i = 0; i < 3; ++i) {
    valid &= array.strides[i] % 16 == 0 && array.strides[i] < uint64_t{1} << 40;
    valid &= array.tile[i] > 0 && array.tile[i] <= 256;
  }
  *map = array;
  return valid ? cudaSuccess : cudaErrorInvalidValue;
}

inline void CopyTile(uint32_t target, const TensorMap& map, int i0, int i1, int i2, int i3,
                     uint32_t barrier) {
  if (target % 1024 != 0) emulation::Fail("a tile in the 128-byte swizzle is not aligned");
  const int64_t first[4] = {i0, i1, i2, i3};
  const uint32_t rows = map.tile[0] * map.tile[1] * map.tile[2];
  for (uint32_t row = 0; row < rows; ++row) {
    const uint32_t steps[3] = {row % map.tile[0], row / map.tile[0] % map.tile[1],
                               row / map.tile[0] / map.tile[1]};
    const uint8_t* source = static_cast<const uint8_t*>(map.values);
    bool inside = true;
    for (int i = 0; i < 3; ++i) {
      const int64_t index = first[i + 1] + steps[i];
      inside &= index >= 0 && index < static_cast<int64_t>(map.sizes[i + 1]);
      source += index * static_cast<int64_t>(map.strides[i]);
    }
    for (uint32_t column = 0; column < kTileWidth; ++column) {
      const int64_t index = first[0] + column;
      uint32_t address = target + row * 128 + 2 * column;
      address ^= (address >> 7 & 7) << 4;
      uint16_t bits = 0;
      if (inside && index >= 0 && index < static_cast<int64_t>(map.sizes[0])) {
        std::memcpy(&bits, source + 2 * index, 2);
      }
      std::memcpy(At(address, 2), &bits, 2);
    }
  }
  Mbarrier& counted = MbarrierAt(barrier);
  counted.bytes -= rows * 128;
  Count(counted);
}

}  // namespace nvfp4
