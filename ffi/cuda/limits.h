// Sizes that the CUDA kernels take. Handlers check them, kernels rely on them, and Python reads
// them before it chooses a kernel (launch_facts.cc). This file uses neither XLA nor CUDA.
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

// Pieces of x whose largest magnitudes LaunchQuantize finds first, each a word of its workspace. It
// searches if no global scale is given.
constexpr int kAmaxPartials = 256;
constexpr int64_t QuantizeWorkspaceBytes(bool searches) {
  return searches ? kAmaxPartials * static_cast<int64_t>(sizeof(uint32_t)) : 0;
}

// The widest key and value of attention, and the number of which each width is a multiple.
constexpr int64_t kMaxHeadWidth = 256, kHeadWidthFactor = 8;
// With keys and values in E4M3. With more rows (queries that share a key head), each block would
// decode all keys again.
constexpr int64_t kE4M3HeadWidthFactor = 16, kMaxE4M3AttentionRows = 64;
// Of latent attention, whose values are the first channels of the keys.
constexpr int64_t kMaxLatentWidth = 576, kMaxLatentValueWidth = 512;

// The most rows of LaunchDenseFew, and the number of which k is a multiple; then that for E4M3.
constexpr int64_t kMostDenseRows = 64, kDenseFactor = 8, kDenseE4M3Factor = 16;

// The number of which the width of a head and that of its rotated part are multiples. The widest
// head has kMaxPreparedWidth channels.
constexpr int64_t kPreparedWidthFactor = 4;
// The largest latents of LaunchPrepareLatents: of queries, and of keys and values. Widths are
// multiples of kPreparedWidthFactor, and the rotated key has at most kMaxPreparedWidth channels.
constexpr int64_t kMaxQueryLatent = 1 << 18, kMaxKeyLatent = 4096;

// The most rows of LaunchHeadProduct, and the widest sums over channels of a query and of a latent.
constexpr int64_t kMaxHeadProductRows = 8, kMaxHeadProductQuery = 512, kMaxHeadProductLatent = 1024;
constexpr int64_t kHeadProductFactor = 8;  // of k and of the outputs of queries

// The most rows and columns of the state of a recurrent mixer, and the number of which its columns
// are a multiple.
constexpr int64_t kMaxStateWidth = 128, kStateWidthFactor = 4;

// The number of taps of a convolution, the most parts of its channels, and the number of which all
// widths are multiples.
constexpr int64_t kMinConvolutionTaps = 2, kMaxConvolutionTaps = 8, kConvolutionFactor = 4;
constexpr int kConvolutionParts = 3;

}  // namespace nvfp4
