// Limits that several CUDA kernels share. Those of one kernel stand beside its launch (launch.h).
// This file uses neither XLA nor CUDA.
#pragma once

#include <cstdint>

#include "shapes.h"

namespace nvfp4 {

// No known model has more experts. sort_by_expert.cu keeps 16 counters of each expert in shared
// memory.
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 32;
// Kernels count rows and tiles, and index k and n, in 32 bits. A grid also has at most 65535 tiles
// of n.
constexpr int64_t kMaxRows = 1 << 30;
constexpr int64_t kMaxExtent = 1 << 22;
// Rows and columns of a matrix on an engine. The engines find a row of a chunk by a 32-bit number
// of 16-byte units.
constexpr int64_t kMaxEngineExtent = 1 << 18;

// Bytes of shared memory that a block needs: for the largest kernel of each engine, and for latent
// attention with the fewest rows. The files of these kernels compare the numbers with their own.
constexpr int64_t kSharedBytesSm80 = 67232, kSharedBytesSm90 = 225280, kSharedBytesSm120 = 83104;
constexpr int64_t kSharedBytesLatentAttention = 99328;

// The most rows and columns of the state of a recurrent mixer, and the number of which its columns
// are a multiple.
constexpr int64_t kMaxStateWidth = 128, kStateWidthFactor = 4;
// The most states of a row that a step of a recurrent mixer can go on from.
constexpr int64_t kMaxStates = 1 << 10;

}  // namespace nvfp4
