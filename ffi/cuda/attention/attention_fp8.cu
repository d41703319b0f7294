// Computes causal attention with keys and values in E4M3, on mma.sync, for every device since 8.0.
// attention_sm80.cuh has the kernel.
//
//   y = v_scale * softmax(scale * k_scale * q @ k.T) @ v, with one k_scale and v_scale for a head
//
// The scales multiply float32 scores and outputs, so that no number of the cache is rounded. Warps
// decode E4M3 numbers after they have read them from shared memory (warp_rows.cuh).
//
// There are forms for up to 16 rows and for up to 64 rows, which decoding has. With more rows, each
// block decodes all keys again for its tile of 64 rows. It is then faster to widen the cache once,
// as lower_attention of ops/causal_attention/cuda.py does.
//
// Few rows: a number takes half the memory that it takes in 16 bits. A tile therefore has twice as
// many keys with narrow rows: as many bytes are in flight, and a tile's softmax has its fixed costs
// half as often. With wide rows, a tile has as many keys, and fits into the memory of any device.
//
// Bottleneck: memory bandwidth. For four numbers, a thread takes ten instructions of decoding.
//
// Needs: widths that are multiples of 16 up to 256. Tests: tests/emulation/
// test_emulation_attention.py, tests/gpu/test_cuda_attention.py.
#include "cuda/attention/attention_sm80.cuh"

namespace nvfp4 {
namespace {

struct Forms {
  template <typename T, int kWidth, int kValueWidth>
  static cudaError_t Launch(cudaStream_t stream, const AttentionGrid& grid) {
    constexpr bool kWide = kWidth > kNarrowKeys;
    if (grid.rows > 16) {
      constexpr int kKeys = kWidth <= 128 ? 64 : 32;  // more scores would spill registers
      return LaunchForm<T, Form<kWidth, kValueWidth, 4, 1, 1, kKeys, 2, true>>(stream, grid);
    }
    constexpr int kBlocks = kWide ? 1 : 2, kKeys = kWide ? 64 : 128;
    using ThreeStages = Form<kWidth, kValueWidth, 1, 1, 4, kKeys, 3, true>;
    if (Fits<ThreeStages>(kBlocks)) return LaunchForm<T, ThreeStages>(stream, grid);
    return LaunchForm<T, Form<kWidth, kValueWidth, 1, 1, 4, kKeys, 2, true>>(stream, grid);
  }
};

}  // namespace

cudaError_t LaunchAttentionFp8(cudaStream_t stream, const AttentionCall& call,
                               const AttentionBuffers& buffers) {
  return LaunchForms<Forms>(stream, call, buffers);
}

}  // namespace nvfp4
