// Computes causal attention on mma.sync, for every device since 8.0, with keys and values of 16
// bits. attention_sm80.cuh has the kernel.
//
// A tile has one of two forms:
//
// Many rows: each warp has 16 or 32 rows and all keys of a tile. With 32 rows, a fragment of keys
// or values that ldmatrix reads serves twice as many MMAs.
//
// Few rows, for decoding, which reads keys once: 16 rows. Each warp has 16 keys of a tile and its
// own softmax. The warps join their results at the end, each for its part of the channels. With
// three stages, the first two tiles arrive together. Devices with less memory have two stages. If
// those do not fit either, wide rows have half as many warps and keys.
//
// Bottleneck: tensor cores and shared memory in a prefill; memory bandwidth in decoding.
//
// Needs: widths that are multiples of 8 up to 256. Test:
// tests/emulation/test_emulation_attention.py.
#include <type_traits>

#include "cuda/attention/attention_sm80.cuh"

namespace nvfp4 {
namespace {

constexpr int64_t kFewTiles = 64;

// Chooses the form of tiles with few rows. Wide rows leave room for one block on a multiprocessor,
// which has as many warps and keys as two blocks with narrow rows.
template <typename T, int kWidth, int kValueWidth, typename W = NoHeads>
cudaError_t LaunchFewRows(cudaStream_t stream, const AttentionGrid& grid) {
  constexpr bool kWide = kWidth > kNarrowKeys;
  constexpr int kBlocks = kWide ? 1 : 2;
  using ThreeStages = Form<kWidth, kValueWidth, 1, 1, 4, 64, 3>;
  using TwoStages = Form<kWidth, kValueWidth, 1, 1, 4, 64>;
  // Where a block has all keys of its rows, and most multiprocessors are idle anyway.
  using Alone = Form<kWidth, kValueWidth, 1, 1, 8, 128>;
  if constexpr (kWidth <= 128) {
    const bool is_alone = grid.splits == 1 && grid.call.shape.b * grid.call.shape.m <= kFewTiles;
    if (is_alone && Fits<Alone>(1)) return LaunchForm<T, Alone, W>(stream, grid);
  }
  // With wide rows, three stages and the heads of a token would spill registers.
  constexpr bool kSpills = kWide && !std::is_same_v<W, NoHeads>;
  if constexpr (kBlocks * ThreeStages::kBytes <= kMostSharedBytes && !kSpills) {
    if (Fits<ThreeStages>(kBlocks)) return LaunchForm<T, ThreeStages, W>(stream, grid);
  }
  if constexpr (kWide) {  // 8.6, 8.9 and 12.x have at most 99 KiB of shared memory for a block
    using Small = Form<kWidth, kValueWidth, 1, 1, 2, 32>;
    if (!Fits<TwoStages>(kBlocks)) return LaunchForm<T, Small, W>(stream, grid);
  }
  return LaunchForm<T, TwoStages, W>(stream, grid);
}

// As LaunchFewRows, for one token of each row, whose heads are prepared.
template <typename T, int kWidth, int kValueWidth>
cudaError_t LaunchTokens(cudaStream_t stream, const AttentionGrid& grid) {
  if constexpr (kWidth != kValueWidth) {
    return cudaErrorInvalidValue;  // the keys and values of a cache have one width
  } else if (grid.buffers.heads->call.weight_type == DataType::kF32) {
    return LaunchFewRows<T, kWidth, kValueWidth, float>(stream, grid);
  } else {
    return LaunchFewRows<T, kWidth, kValueWidth, T>(stream, grid);
  }
}

// Chooses the form of the tiles. More rows in a tile read keys less often; fewer rows make more
// blocks.
struct Forms {
  template <typename T, int kWidth, int kValueWidth>
  static cudaError_t Launch(cudaStream_t stream, const AttentionGrid& grid) {
    if (grid.buffers.heads != nullptr) return LaunchTokens<T, kWidth, kValueWidth>(stream, grid);
    if (grid.rows <= 16) return LaunchFewRows<T, kWidth, kValueWidth>(stream, grid);
    constexpr int kKeys = kWidth <= 128 ? 64 : 32;  // for a block of 99 KiB
    if constexpr (kValueWidth <= 128) {  // two groups of 256 values would spill registers
      const int64_t blocks = grid.call.shape.b * grid.call.shape.m * CeilDiv(grid.rows, 128);
      if (grid.splits == 1 && blocks >= MultiprocessorCount()) {
        return LaunchForm<T, Form<kWidth, kValueWidth, 4, 2, 1, kKeys>>(stream, grid);
      }
    }
    return LaunchForm<T, Form<kWidth, kValueWidth, 4, 1, 1, kKeys>>(stream, grid);
  }
};

}  // namespace

cudaError_t LaunchAttentionSm80(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers) {
  return LaunchForms<Forms>(stream, call, buffers);
}

}  // namespace nvfp4
