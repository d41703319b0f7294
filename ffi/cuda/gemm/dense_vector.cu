// Computes y = W @ x + bias with float32 sums for one row x: routers and other small layers.
//
//   x     [k]     bf16 or f16
//   W     [n, k]  the type of x; or f32, if x is bf16
//   bias  [n]     the type of x, or f32; it may be left out
//   y     [n]     f32, or rounded to the type of x
//
// The bias is added in float32, and the result is rounded once. x may be the result of a norm that
// the kernel computes, too: each block normalizes the row for itself, into shared memory, and the
// first one writes it.
//
// One, two, four or eight warps compute an output. A lane has up to kPieces pieces of 16 bytes of
// the weight row, all of them in registers. It loads them while the preceding kernel still runs, if
// they are unchanged since that kernel, and otherwise only prefetches them. Then it loads the
// pieces of x that belong to them. The sums of the lanes are added in a fixed order, and so are
// those of the warps.
//
// dense_few.cu needs tensor cores, shared memory and clusters, and has up to 64 rows for that. With
// one row, their latencies cost more than the products. On an H200, its 128 outputs of 2048 took
// 1.9 us from the end of the preceding kernel, of which it waited 1.3 us after its last product.
//
// Bottleneck: latency.
//
// Needs: sm_80; k a multiple of 8. Tests: tests/emulation/test_dense_few.py,
// tests/gpu/test_dense_few.py.
#include "cuda/gemm/dense_vector.cuh"

#include <type_traits>

#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/norms/norm_pieces.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kPieces = 8;
constexpr int kPieceBytes = 16;
constexpr int kNormPieces = 2;  // of a norm that a thread has: FitsInputNorm
constexpr int64_t kWarpBytes = kPieces * 32 * kPieceBytes;  // of a weight row that a warp has

struct VectorSizes {
  int32_t n, k;
  int32_t warps_log2;  // of the warps of an output
  bool rounds;         // whether y has the type of x instead of f32
  int32_t bias_size;   // bytes of an element of the bias: 0 without one, 2 or 4
  bool weight_is_unchanged;
};

// A piece of a weight row, or the elements of x that belong to it.
template <typename E, int kCount>
struct alignas(kCount * sizeof(E)) Elements {
  Word<E> words[kCount / 2];
};

template <typename T>
__device__ __forceinline__ float LoadBias(const void* bias, int32_t bias_size, int output) {
  if (bias_size == 4) return static_cast<const float*>(bias)[output];
  return bias_size == 2 ? ToFloat(static_cast<const T*>(bias)[output]) : 0.0f;
}

// N: the type of the weight of the norm of x.
template <typename T, typename W, typename N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    DenseVector(const DenseFewBuffers buffers, const InputNormRow norm, const VectorSizes p) {
  constexpr bool kNorm = !std::is_same_v<N, NoNorm>;
  constexpr int kWidth = kPieceBytes / static_cast<int>(sizeof(W));
  using Weights = Elements<W, kWidth>;
  using Inputs = Elements<T, kWidth>;
  using Pieces = NormPieces<T, std::conditional_t<kNorm, N, T>, kNorm ? kNormPieces : 1>;
  __shared__ float sums[kWarps];
  __shared__ float groups[kNormPieces * kWarps];
  __shared__ uint4 row[kNorm ? kNormPieces * kThreads : 1];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int warps = 1 << p.warps_log2, part = warp % warps;
  const int output = (static_cast<int>(blockIdx.x) * kWarps + warp) / warps;
  const int first = (part * kPieces * 32 + lane) * kWidth;
  const auto* weight =
      static_cast<const W*>(buffers.weight) + static_cast<int64_t>(min(output, p.n - 1)) * p.k;
  Weights weights[kPieces] = {};
  // Calls function(i, its place along k) for the pieces of this lane.
  const auto each_piece = [&](const auto& function) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = first + i * 32 * kWidth;
      if (at < p.k) function(i, at);
    }
  };
  const auto load = [&](int i, int at) {
    weights[i] = *reinterpret_cast<const Weights*>(weight + at);
  };
  Pieces pieces(norm.h, static_cast<int>(threadIdx.x), kThreads);
  if constexpr (kNorm) {
    PrefetchLines(norm.buffers.weight, norm.h * static_cast<int>(sizeof(N)), threadIdx.x, kThreads);
  }
  if (p.weight_is_unchanged) {
    each_piece(load);
  } else {
    each_piece([&](int, int at) {
      if (lane % (128 / kPieceBytes) == 0) PrefetchLine(weight + at);
    });
  }
  const bool finishes = lane == 0 && part == 0 && output < p.n;
  float total = 0.0f, bias = 0.0f;
  // The first pass takes the place of the wait. Its result is not used: it multiplies the weights
  // by themselves, whose bits are in the place of x. It brings the code of the second pass into the
  // instruction cache. Without it, the second pass took 0.8 us longer on an H200.
#pragma unroll 1
  for (int pass = p.weight_is_unchanged ? 0 : 1; pass < 2; ++pass) {
    const auto* source = reinterpret_cast<const T*>(weight);
    if (pass == 1) {
      WaitForPrecedingKernel();
      StartNextKernel();
      if (!p.weight_is_unchanged) each_piece(load);
      source = static_cast<const T*>(buffers.x);
      if constexpr (kNorm) LoadInput(norm, pieces);
    }
    if constexpr (kNorm) {
      Pieces own = pieces;  // the first pass changes nothing
      FinishNorm(norm, pass == 1 && blockIdx.x == 0, groups, reinterpret_cast<uint8_t*>(row), own);
      __syncthreads();
      source = reinterpret_cast<const T*>(row);
    }
    Inputs x[kPieces] = {};
    each_piece([&](int i, int at) { x[i] = *reinterpret_cast<const Inputs*>(source + at); });
    if (pass == 1 && finishes) bias = LoadBias<T>(buffers.bias, p.bias_size, output);
    float2 own[2] = {make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f)};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j) {
        const float2 w = ToFloats(weights[i].words[j]), v = ToFloats(x[i].words[j]);
        float2& sum = own[j % 2];
        sum.x = fmaf(w.x, v.x, sum.x);
        sum.y = fmaf(w.y, v.y, sum.y);
      }
    }
    total = WarpSum((own[0].x + own[0].y) + (own[1].x + own[1].y));
  }
  if (warps > 1) {
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    if (!finishes) return;
    for (int other = 1; other < warps; ++other) total += sums[warp + other];
  }
  if (!finishes) return;
  if (p.rounds) {
    static_cast<T*>(buffers.y)[output] = FromFloat<T>(total + bias);
  } else {
    static_cast<float*>(buffers.y)[output] = total + bias;
  }
}

// Returns the number of warps of an output as a power of two; more than kWarps if k is too large.
int32_t WarpsLog2(const DenseFewCall& call) {
  const int64_t bytes = call.k * (call.weight_type == DataType::kF32 ? 4 : 2);
  int32_t log2 = 0;
  while ((kWarpBytes << log2) < bytes) ++log2;
  return log2;
}

int64_t Blocks(const DenseFewCall& call) { return CeilDiv(call.n << WarpsLog2(call), kWarps); }

template <typename T, typename W>
cudaError_t LaunchTyped(cudaStream_t stream, const DenseFewCall& call,
                        const DenseFewBuffers& buffers, const VectorSizes& sizes) {
  const auto launch = [&](auto kernel, const InputNormRow& norm) {
    return LaunchWide(stream, dim3(static_cast<unsigned>(Blocks(call))), kThreads, 0,
                      /*overlaps=*/true, kernel, buffers, norm, sizes);
  };
  if (buffers.norm == nullptr) return launch(DenseVector<T, W, NoNorm>, {});
  const InputNormRow norm = RowOf(*buffers.norm);
  return buffers.norm->call.weight_type == DataType::kF32 ? launch(DenseVector<T, W, float>, norm)
                                                          : launch(DenseVector<T, W, T>, norm);
}

}  // namespace

bool FitsDenseVector(const DenseFewCall& call) {
  return call.rows == 1 && call.weight_type != DataType::kE4M3 && 1 << WarpsLog2(call) <= kWarps &&
         Blocks(call) <= int64_t{kBlocksPerSm} * MultiprocessorCount();
}

cudaError_t LaunchDenseVector(cudaStream_t stream, const DenseFewCall& call,
                              const DenseFewBuffers& buffers) {
  const VectorSizes sizes = {static_cast<int32_t>(call.n),
                             static_cast<int32_t>(call.k),
                             WarpsLog2(call),
                             call.output_type != DataType::kF32,
                             static_cast<int32_t>(call.bias_size),
                             call.weight_is_unchanged};
  if (call.weight_type == DataType::kF32) {
    return LaunchTyped<__nv_bfloat16, float>(stream, call, buffers, sizes);
  }
  return call.type == DataType::kF16
             ? LaunchTyped<__half, __half>(stream, call, buffers, sizes)
             : LaunchTyped<__nv_bfloat16, __nv_bfloat16>(stream, call, buffers, sizes);
}

}  // namespace nvfp4
