// Multiplies heads by the matrices of latent attention, for few rows. The product with the matrices
// of keys brings queries into the space of the latents. The product with those of values brings the
// results of attention back from there.
//
//   AbsorbQueries   q [rows, n, p + e], keys [n, p, k] -> y [rows, n, k + e]
//   ExpandValues    x [rows, n, k], values [n, d, k] -> y [rows, n, d]
//
// AbsorbQueries also rotates the last e channels of the queries, as prepare_latents.cu does with
// keys. Sums are in float32.
//
// Bottleneck: reading the matrices. They come into the L2 cache while the preceding kernel still
// runs. Each weight is read once, 16 bytes at a time, and multiplied for all rows.
//
// In AbsorbQueries, a block has 64 outputs of a head. Eight threads share these outputs, and 32
// groups of such threads share the sum. In ExpandValues, a block has 16 outputs, two for each warp,
// whose lanes share the sum.
//
// Tests: tests/emulation/test_emulation_head_products.py, tests/gpu/test_cuda_head_products.py.
#include <cstring>

#include "cuda/heads/sine.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kUnit = 8;                        // values of 16 bytes
constexpr int kQueryOutputs = 64;               // of a block of AbsorbQueries: a line of the matrix
constexpr int kAcross = kQueryOutputs / kUnit;  // threads that share them
constexpr int kGroups = kThreads / kAcross;     // groups that share a sum
constexpr int kWarpOutputs = 2;                 // of a warp of ExpandValues
constexpr int kValueOutputs = kWarps * kWarpOutputs;

template <typename T>
struct alignas(16) Unit {
  T values[kUnit];
};

// Writes the last channels of a head of the queries, rotated if there are frequencies. Each thread
// has pairs of channels.
template <typename T, int kRows>
__device__ __forceinline__ void RotateQueries(const HeadProductCall& call,
                                              const HeadProductBuffers& p, int head) {
  const int half = call.e / 2;
  const bool turns = call.half > 0, adjacent = turns && call.interleaved;
  for (int index = threadIdx.x; index < call.rows * half; index += kThreads) {
    const int row = index / half, i = index - row * half;
    const int64_t place = static_cast<int64_t>(row) * call.n + head;
    const T* source = static_cast<const T*>(p.x) + place * (call.k + call.e) + call.k;
    T* target = static_cast<T*>(p.y) + place * (call.outputs + call.e) + call.outputs;
    const T first = source[adjacent ? 2 * i : i], second = source[adjacent ? 2 * i + 1 : i + half];
    if (!turns) {
      target[i] = first;
      target[i + half] = second;
      continue;
    }
    const SineCosine turn = SineAndCosine(static_cast<float>(p.positions[row]) * p.frequencies[i]);
    const float sine = turn.sine * call.rotation_scale, cosine = turn.cosine * call.rotation_scale;
    target[i] = FromFloat<T>(ToFloat(first) * cosine - ToFloat(second) * sine);
    target[i + half] = FromFloat<T>(ToFloat(second) * cosine + ToFloat(first) * sine);
  }
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads)
    AbsorbQueries(const HeadProductCall call, const HeadProductBuffers p) {
  __shared__ float queries[kRows][kMaxHeadProductQuery];
  __shared__ float sums[kWarps][kRows][kQueryOutputs];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int pieces = (call.outputs + kQueryOutputs - 1) / kQueryOutputs;
  const int head = static_cast<int>(blockIdx.x) / pieces;
  const int piece = static_cast<int>(blockIdx.x) % pieces, first = piece * kQueryOutputs;
  const T* matrix = static_cast<const T*>(p.matrices) +
                    static_cast<int64_t>(head) * call.k * call.outputs + first;
  for (int i = thread; i < call.k; i += kThreads) {
    PrefetchLine(matrix + static_cast<int64_t>(i) * call.outputs);
  }
  WaitForPrecedingKernel();
  StartNextKernel();
  for (int index = thread; index < kRows * call.k; index += kThreads) {
    const int row = index / call.k, i = index - row * call.k;
    const int64_t place = static_cast<int64_t>(row) * call.n + head;
    const T* source = static_cast<const T*>(p.x) + place * (call.k + call.e) + i;
    queries[row][i] = row < call.rows ? ToFloat(*source) : 0.0f;
  }
  if (piece == 0) RotateQueries<T, kRows>(call, p, head);
  __syncthreads();
  const int column = thread % kAcross * kUnit;
  const int end = first + column < call.outputs ? call.k : 0;
  float own[kRows][kUnit] = {};
#pragma unroll 4
  for (int i = thread / kAcross; i < end; i += kGroups) {
    const auto weights =
        *reinterpret_cast<const Unit<T>*>(matrix + static_cast<int64_t>(i) * call.outputs + column);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float query = queries[row][i];
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        own[row][j] = fmaf(query, ToFloat(weights.values[j]), own[row][j]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
#pragma unroll
      for (int step = kAcross; step < 32; step *= 2) {
        own[row][j] += __shfl_xor_sync(kAllLanes, own[row][j], step);
      }
      if (lane < kAcross) sums[warp][row][column + j] = own[row][j];
    }
  }
  __syncthreads();
  for (int index = thread; index < call.rows * kQueryOutputs; index += kThreads) {
    const int row = index / kQueryOutputs, output = index % kQueryOutputs;
    if (first + output >= call.outputs) continue;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += sums[i][row][output];
    const int64_t place = static_cast<int64_t>(row) * call.n + head;
    static_cast<T*>(p.y)[place * (call.outputs + call.e) + first + output] = FromFloat<T>(sum);
  }
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads)
    ExpandValues(const HeadProductCall call, const HeadProductBuffers p) {
  __shared__ Unit<T> inputs[kRows][kMaxHeadProductLatent / kUnit];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int pieces = (call.outputs + kValueOutputs - 1) / kValueOutputs;
  const int head = static_cast<int>(blockIdx.x) / pieces;
  const int first = static_cast<int>(blockIdx.x) % pieces * kValueOutputs + warp * kWarpOutputs;
  const int units = call.k / kUnit;
  const auto* matrix = static_cast<const T*>(p.matrices) +
                       (static_cast<int64_t>(head) * call.outputs + first) * call.k;
  const int count = min(call.outputs - first, kWarpOutputs);  // may be below 1
  if (count > 0) {
    PrefetchLines(matrix, count * call.k * static_cast<int>(sizeof(T)), lane, 32);
  }
  WaitForPrecedingKernel();
  StartNextKernel();
  for (int index = thread; index < call.rows * units; index += kThreads) {
    const int row = index / units, unit = index - row * units;
    const int64_t place = static_cast<int64_t>(row) * call.n + head;
    inputs[row][unit] = *reinterpret_cast<const Unit<T>*>(static_cast<const T*>(p.x) +
                                                          place * call.k + unit * kUnit);
  }
  __syncthreads();
  if (count <= 0) return;
  float own[kRows][kWarpOutputs] = {};
  for (int unit = lane; unit < units; unit += 32) {
    Unit<T> weights[kWarpOutputs];
#pragma unroll
    for (int output = 0; output < kWarpOutputs; ++output) {
      const int64_t place = static_cast<int64_t>(min(output, count - 1)) * call.k + unit * kUnit;
      weights[output] = *reinterpret_cast<const Unit<T>*>(matrix + place);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= call.rows) break;
      const Unit<T> input = inputs[row][unit];
#pragma unroll
      for (int output = 0; output < kWarpOutputs; ++output) {
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          own[row][output] =
              fmaf(ToFloat(input.values[j]), ToFloat(weights[output].values[j]), own[row][output]);
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= call.rows) break;
#pragma unroll
    for (int output = 0; output < kWarpOutputs; ++output) {
      const float sum = WarpSum(own[row][output]);
      const int64_t place = static_cast<int64_t>(row) * call.n + head;
      if (lane == 0 && output < count) {
        static_cast<T*>(p.y)[place * call.outputs + first + output] = FromFloat<T>(sum);
      }
    }
  }
}

template <typename T, int kRows>
cudaError_t LaunchRows(cudaStream_t stream, const HeadProductCall& call,
                       const HeadProductBuffers& p) {
  const int64_t outputs = call.expands ? kValueOutputs : kQueryOutputs;
  const dim3 grid(static_cast<unsigned>(call.n * CeilDiv(call.outputs, outputs)));
  return call.expands
             ? LaunchWide(stream, grid, kThreads, 0, true, ExpandValues<T, kRows>, call, p)
             : LaunchWide(stream, grid, kThreads, 0, true, AbsorbQueries<T, kRows>, call, p);
}

template <typename T>
cudaError_t LaunchTyped(cudaStream_t stream, const HeadProductCall& call,
                        const HeadProductBuffers& p) {
  if (call.rows == 1) return LaunchRows<T, 1>(stream, call, p);
  if (call.rows <= 4) return LaunchRows<T, 4>(stream, call, p);
  return LaunchRows<T, kMaxHeadProductRows>(stream, call, p);
}

}  // namespace

cudaError_t LaunchHeadProduct(cudaStream_t stream, const HeadProductCall& call,
                              const HeadProductBuffers& buffers) {
  if (call.rows == 0 || call.n == 0) return cudaSuccess;
  return call.type == DataType::kBF16 ? LaunchTyped<__nv_bfloat16>(stream, call, buffers)
                                      : LaunchTyped<__half>(stream, call, buffers);
}

}  // namespace nvfp4
