// Divides one workspace buffer into arrays. With a null buffer, the same calls only count its
// bytes. This file uses neither XLA nor CUDA.
#pragma once

#include <cstdint>

#include "cuda/routing/expert_rows.h"
#include "nvfp4.h"

namespace nvfp4 {

// Sections start at multiples of 256 bytes, as XLA's own buffers on a GPU do.
constexpr int64_t kSectionBytes = 256;

class Sections {
 public:
  explicit Sections(void* buffer) : buffer_(static_cast<uint8_t*>(buffer)) {}

  template <typename T>
  T* Take(int64_t count) {
    T* section = reinterpret_cast<T*>(buffer_ == nullptr ? nullptr : buffer_ + bytes_);
    const int64_t size = count * static_cast<int64_t>(sizeof(T));
    bytes_ += (size + kSectionBytes - 1) / kSectionBytes * kSectionBytes;
    return section;
  }

  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* buffer_;
  int64_t bytes_ = 0;
};

// The FP4 engine pads rows with zeros to a multiple of this number of columns.
constexpr int64_t kPaddedK = 128;
NVFP4_HOST_DEVICE constexpr int64_t PadK(int64_t k) {
  return (k + kPaddedK - 1) / kPaddedK * kPaddedK;
}

struct QuantizedRows {
  uint8_t* codes = nullptr;        // [rows, k/2]
  uint8_t* block_scale = nullptr;  // [rows, k/16]
  float* row_scale = nullptr;      // [rows]
};

inline ExpertRows TakeExpertRows(Sections* sections, int64_t num_rows, int64_t num_experts,
                                 int64_t tile_rows, bool sorted) {
  ExpertRows rows = {};
  rows.starts = sections->Take<int32_t>(num_experts + 1);
  rows.slots = sorted ? nullptr : sections->Take<int32_t>(num_rows);
  rows.max_tiles = static_cast<int32_t>(MaxTiles(num_rows, num_experts, tile_rows));
  rows.tiles = sections->Take<ListedTile>(rows.max_tiles);
  rows.num_tiles = sections->Take<int32_t>(1);
  rows.counts = sorted ? nullptr : sections->Take<int32_t>(kMaxSegments * num_experts);
  return rows;
}

inline QuantizedRows TakeQuantizedRows(Sections* sections, int64_t num_rows, int64_t k) {
  QuantizedRows rows;
  rows.codes = sections->Take<uint8_t>(num_rows * (k / 2));
  rows.block_scale = sections->Take<uint8_t>(num_rows * (k / 16));
  rows.row_scale = sections->Take<float>(num_rows);
  return rows;
}

}  // namespace nvfp4
