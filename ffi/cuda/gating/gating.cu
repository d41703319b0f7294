// The operations between the products of a gated feed-forward block, and after it, and the gates of
// an attention:
//
//   Activate        y = act(gate) * up           gate_up [rows, 2 i] -> y [rows, i]
//   AddGated        y = x + sigmoid(gate) * z    x, z [rows, h], gate [rows] -> y [rows, h]
//   AddLinearGated  y = x + sigmoid(a @ w) * z   x, z [rows, h], a [rows, k], w [k] -> y [rows, h]
//   GateHeads       y = x * sigmoid(gate)        x [rows, n, d], gates [rows, w] -> y [rows, n, d]
//
// AddGated rounds the sigmoid and the product to the type of x, as jax.numpy does. A null gate
// stands for a factor of 1.
//
// AddLinearGated computes the gate too, because a linear layer with a single output would be a
// kernel of its own. The gate is a float32 sum, rounded to the type of x.
//
// GateHeads reads the gates where the projection of an attention has left them, because a copy
// would be a kernel of its own. In the projection, the d channels of each head's gate follow those
// of its query. Or each head has one gate, and w is n. Or each channel has one, and w is n d.
//
// A thread of the other kernels computes one value, except in heads of more than 256 channels.
// Threads of a warp have neighboring columns, so that loads are whole lines.
//
// Bottleneck: latency. The kernels are for the few rows of a decoding step, between the kernels of
// the products.
//
// Tests: tests/emulation/test_emulation_gating.py, tests/gpu/test_cuda_gating.py.
#include "cuda/call_with_type.cuh"
#include "cuda/epilogues/activations.cuh"
#include "cuda/gating/gates.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/warp_sum.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 128, kHeadThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) Activate(const ActivateCall p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = at / p.columns, column = at % p.columns;
  const bool interleaved = p.activation.interleaved;
  WaitAndStartNextKernel(p.starts_next);
  if (row >= p.rows) return;
  const T* gate_up = static_cast<const T*>(p.gate_up) + row * 2 * p.columns;
  const float gate = ToFloat(gate_up[interleaved ? 2 * column : column]);
  const float up = ToFloat(gate_up[interleaved ? 2 * column + 1 : p.columns + column]);
  static_cast<T*>(p.y)[at] = FromFloat<T>(ActivateGated(p.activation, gate, up));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) AddGated(const AddGatedCall p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  WaitAndStartNextKernel(p.starts_next);
  if (at >= p.rows * p.columns) return;
  float z = ToFloat(static_cast<const T*>(p.z)[at]);
  if (p.gate != nullptr) {
    z = Round<T>(z * GateFactor<T>(ToFloat(static_cast<const T*>(p.gate)[at / p.columns])));
  }
  static_cast<T*>(p.y)[at] = FromFloat<T>(ToFloat(static_cast<const T*>(p.x)[at]) + z);
}

// A block computes kWidth columns of one row for each of its threads. Each of the blocks that share
// a row computes its gate, so that no block waits for another. With pieces of 16 bytes, 2048
// columns of a 16-bit type are a single block. Sums have a fixed order, so that bits repeat.
//
// Needs: kWidth divides k and the number of columns.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLinearThreads) AddLinearGated(const AddLinearGatedCall p) {
  using Values = Piece<T, kWidth>;
  constexpr uint32_t kStep = GatePieces<T, kWidth>::kAhead * kLinearThreads;
  const auto pieces = static_cast<uint32_t>(p.columns) / kWidth;
  const auto inputs = static_cast<uint32_t>(p.k) / kWidth;
  const uint32_t row_blocks = (pieces + kLinearThreads - 1) / kLinearThreads;
  const uint32_t row = blockIdx.x / row_blocks;
  const uint32_t piece = blockIdx.x % row_blocks * kLinearThreads + threadIdx.x;
  const int64_t at = static_cast<int64_t>(row) * pieces + piece;
  const T* gate_input = static_cast<const T*>(p.gate_input) + row * p.k;
  PrefetchLines(p.gate_weight, static_cast<int>(p.k) * static_cast<int>(sizeof(T)), threadIdx.x,
                kLinearThreads);
  WaitAndStartNextKernel(p.starts_next);
  // All loads of a row of 2048 values are in flight before the first is used.
  GatePieces<T, kWidth> gate_pieces;
  gate_pieces.Load(gate_input, p.gate_weight, threadIdx.x, inputs);
  Values x = {}, z = {};
  if (piece < pieces) {
    x = static_cast<const Values*>(p.x)[at];
    z = static_cast<const Values*>(p.z)[at];
  }
  float product = gate_pieces.Multiply(0.0f);
#pragma unroll 1
  for (uint32_t first = kStep + threadIdx.x; first < inputs; first += kStep) {
    gate_pieces.Load(gate_input, p.gate_weight, first, inputs);
    product = gate_pieces.Multiply(product);
  }
  const float gate = Round<T>(BlockSum<kLinearThreads / 32>(product));
  const float factor = GateFactor<T>(gate);
  if (piece >= pieces) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    x.values[j] = FromFloat<T>(ToFloat(x.values[j]) + Round<T>(ToFloat(z.values[j]) * factor));
  }
  static_cast<Values*>(p.y)[at] = x;
}

// A block computes one head of one row, so that all of its threads find the row by one division.
template <typename T>
__global__ void __launch_bounds__(kHeadThreads) GateHeads(const GateHeadsCall p) {
  const uint32_t row = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.d;
  const int64_t column = p.first_gate + static_cast<int64_t>(head) * p.gate_step;
  const T* x = static_cast<const T*>(p.x) + first;
  const T* gates = static_cast<const T*>(p.gates) + row * p.gate_columns + column;
  T* y = static_cast<T*>(p.y) + first;
  WaitAndStartNextKernel(p.starts_next);
  for (uint32_t channel = threadIdx.x; channel < p.d; channel += kHeadThreads) {
    const float gate = ToFloat(gates[p.one_gate ? 0 : channel]);
    y[channel] = FromFloat<T>(ToFloat(x[channel]) * Sigmoid(gate));
  }
}

template <typename Call>
cudaError_t LaunchRows(cudaStream_t stream, const Call& call, void (*kernel)(Call)) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(call.rows * call.columns, kThreads)));
  return LaunchWide(stream, grid, kThreads, 0, /*overlaps=*/true, kernel, call);
}

template <typename T, int kWidth>
cudaError_t LaunchLinearWidth(cudaStream_t stream, const AddLinearGatedCall& call) {
  const dim3 grid(
      static_cast<unsigned>(call.rows * CeilDiv(call.columns / kWidth, kLinearThreads)));
  return LaunchWide(stream, grid, kLinearThreads, 0, /*overlaps=*/true, AddLinearGated<T, kWidth>,
                    call);
}

template <typename T>
cudaError_t LaunchLinear(cudaStream_t stream, const AddLinearGatedCall& call) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool is_whole = call.columns % kWidth == 0 && call.k % kWidth == 0;
  return is_whole ? LaunchLinearWidth<T, kWidth>(stream, call)
                  : LaunchLinearWidth<T, 1>(stream, call);
}

}  // namespace

cudaError_t LaunchActivate(cudaStream_t stream, const ActivateCall& call) {
  return CallWithType(
      call.type, [&](auto type) { return LaunchRows(stream, call, Activate<decltype(type)>); });
}

cudaError_t LaunchAddGated(cudaStream_t stream, const AddGatedCall& call) {
  return CallWithType(
      call.type, [&](auto type) { return LaunchRows(stream, call, AddGated<decltype(type)>); });
}

cudaError_t LaunchAddLinearGated(cudaStream_t stream, const AddLinearGatedCall& call) {
  return CallWithType(call.type,
                      [&](auto type) { return LaunchLinear<decltype(type)>(stream, call); });
}

cudaError_t LaunchGateHeads(cudaStream_t stream, const GateHeadsCall& call) {
  const dim3 grid(static_cast<unsigned>(call.d == 0 ? 0 : call.rows * call.heads));
  return CallWithType(call.type, [&](auto type) {
    return LaunchWide(stream, grid, kHeadThreads, 0, /*overlaps=*/true, GateHeads<decltype(type)>,
                      call);
  });
}

}  // namespace nvfp4
