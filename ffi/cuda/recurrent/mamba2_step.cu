// Few tokens of a Mamba-2 mixer: everything between its two projections, in one pass over the
// state. Several tokens of a row go one by one, as in delta_step.cu.
//
//   x, B, C = act(convolve(xbc) + bias),  S' = exp(dt a) S + dt x B.T
//   gated = (S' C + D x) * silu(z),  output = norm(gated) over the heads of a group
//
// A block of the first kernel handles one head of one row. Its 256 threads hold the state [p, n] in
// registers, so that memory is read once and written once, in place. A thread has 4 columns of
// every so manyth row. Each block computes B and C of its group itself.
//
// The second kernel normalizes the heads of a group together. It also writes the past inputs of B
// and C, which all heads of the group have read by then. On 9.0 and later it starts early and loads
// what the first kernel does not write.
//
// Bottleneck: reading and writing the state. Its loads are issued first. While the preceding kernel
// still runs, the state comes into the L2 cache, or into registers (see delta_step.cu).
//
// Needs: p and n at most 128, n a multiple of 4. cuda_mixer_bindings.cc checks these. Tests:
// tests/emulation/test_emulation_recurrent.py, tests/gpu/test_cuda_recurrent.py.
#include "cuda/call_with_type.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/recurrent.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxWidth = static_cast<int>(kMaxStateWidth);
constexpr int kUsualP = 64, kUsualN = 128;  // the sizes of published models

static_assert(3 * kMaxWidth <= 2 * kThreads, "a thread convolves at most two channels");

// Channels of the convolution, and numbers of a row of `projected`: z, those channels, and dt.
struct Sizes {
  int32_t inner, channels, row;

  __host__ __device__ explicit Sizes(const Mamba2StepCall& c)
      : inner(c.heads * c.p),
        channels(inner + 2 * c.groups * c.n),
        row(inner + channels + c.heads) {}
};

template <typename T>
__device__ __forceinline__ Convolution<T> ConvolutionOf(const Mamba2StepCall& c,
                                                        const Mamba2StepBuffers& p,
                                                        const Sizes& sizes, int64_t row,
                                                        int32_t kept) {
  return {static_cast<T*>(p.inputs) + row * c.w * (c.taps - 1) * sizes.channels, p.conv_weight,
          sizes.channels, c.taps, kept};
}

// Returns the inputs of a channel in the tokens of a row.
template <typename T>
__device__ __forceinline__ TokenInputs<T> InputsOf(const Mamba2StepCall& c,
                                                   const Mamba2StepBuffers& p, const Sizes& sizes,
                                                   int64_t row, int32_t channel) {
  const T* projected = static_cast<const T*>(p.projected) + row * c.t * sizes.row;
  return {projected + sizes.inner + channel, sizes.row};
}

// Returns the number of channel i of a head: 0 to p - 1 are its x, then n of B and n of C.
__device__ __forceinline__ int32_t FindChannel(const Mamba2StepCall& c, const Sizes& sizes,
                                               int head, int group, int i) {
  if (i < c.p) return head * c.p + i;
  const int part = i < c.p + c.n ? 0 : 1;
  return sizes.inner + (part * c.groups + group) * c.n + i - c.p - part * c.n;
}

// `kUsual` says that p and n have the usual sizes. `kRows` is the number of rows of the state in
// the registers of a thread. `kEarly` and `kMany` are as in delta_step.cu.
template <typename T, bool kUsual, int kRows, bool kEarly, bool kMany>
__global__ void __launch_bounds__(kThreads, kUsual && !kEarly ? (kMany ? 2 : 3) : 1)
    Mamba2Step(const Mamba2StepCall call, const Mamba2StepBuffers p) {
  __shared__ __align__(16) float mixed[3 * kMaxWidth];  // x, B and C
  // One partial sum for each row and lane. Rows of odd length start in different banks.
  constexpr int kRowLanes = kMaxWidth / 4 + 1;
  __shared__ float partial[(kUsual ? kUsualP : kMaxWidth) * kRowLanes];
  __shared__ float step_and_decay[2];

  Mamba2StepCall c = call;
  if constexpr (kUsual) {
    c.p = kUsualP;
    c.n = kUsualN;
  }
  if constexpr (!kMany) c.t = c.w = 1;
  const Sizes sizes(c);
  const int thread = threadIdx.x, lanes = c.n / 4, groups = kThreads / lanes;
  const int line_group = thread / lanes, column = thread % lanes;
  const bool active = line_group < groups;
  const int head = blockIdx.x % c.heads, group = head / (c.heads / c.groups);
  const int64_t row = blockIdx.x / c.heads;
  const int32_t kept = kMany && kEarly ? KeptSlot(p.kept, row, c.w) : 0;
  // Returns what this thread has of a state.
  const auto state_in = [&](int slot) {
    const int64_t block = kMany ? (row * c.w + slot) * c.heads + head : blockIdx.x;
    return reinterpret_cast<float4*>(p.state) + block * c.p * lanes + thread;
  };
  Convolution<T> convolution = ConvolutionOf<T>(c, p, sizes, row, kept);
  int32_t channels[2] = {};
  // Calls function(its number, the channel of the head) for the channels that this thread
  // convolves.
  const auto each_channel = [&](const auto& function) {
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const int i = own * kThreads + thread;
      if (i < c.p + 2 * c.n) function(own, i);
    }
  };
  each_channel([&](int own, int i) { channels[own] = FindChannel(c, sizes, head, group, i); });
  float4 values[kRows];
  Window<T> windows[2] = {};
  float biases[2] = {};
  bool present = false;
  // Loads all that may be unchanged since the previous kernel.
  const auto load_unchanged = [&] {
    const float4* state = state_in(convolution.kept);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (kUsual || (active && line_group + i * groups < c.p)) {
        values[i] = __ldcs(state + i * groups * lanes);
      }
    }
    each_channel([&](int own, int) {
      windows[own] = LoadWindow(convolution, channels[own], FromFloat<T>(0.0f));
      biases[own] = p.conv_bias == nullptr ? 0.0f : p.conv_bias[channels[own]];
    });
    present = p.positions[row * c.t] < kPaddingPosition;
  };
  if constexpr (kEarly) {
    load_unchanged();
  } else if constexpr (!kMany) {
    each_channel([&](int own, int) { PrefetchWindow(convolution, channels[own]); });
    PrefetchLines(state_in(0) - thread, c.p * lanes * 16, thread, kThreads);
  }
  // What this thread reads of a token.
  struct Token {
    T inputs[2];
    float gate, raw;
    bool present;
  };
  const auto load_token = [&](int token) {
    const int64_t index = row * c.t + token;
    Token read = {};
    const T* projected = static_cast<const T*>(p.projected) + index * sizes.row;
    each_channel([&](int own, int) { read.inputs[own] = projected[sizes.inner + channels[own]]; });
    if (thread < c.p) read.gate = ToFloat(projected[head * c.p + thread]);
    if (thread == kThreads - 1) read.raw = ToFloat(projected[sizes.inner + sizes.channels + head]);
    if constexpr (kMany) read.present = p.positions[index] < kPaddingPosition;
    return read;
  };
  Token next = {};
  // Computes the step of token `pass`; pass -1 is as in delta_step.cu.
  const auto compute = [&](const int pass) {
    const bool real = pass >= 0;
    if (pass == 0) {
      WaitForPrecedingKernel();
      StartNextKernel();
      if constexpr (!kEarly && kMany) convolution.kept = KeptSlot(p.kept, row, c.w);
      // All loads are issued before the first of them is used.
      if constexpr (!kEarly) load_unchanged();
    }
    // Blocks that share a multiprocessor hide the latency of each other, and have fewer registers.
    if (pass == 0 || (!kEarly && real)) next = load_token(pass);
    const Token token = next;
    if (real) {
      each_channel([&](int own, int) {
        if constexpr (kMany) {
          if (pass > 0) Shift(windows[own]);
        }
        windows[own].inputs[0] = token.inputs[own];
      });
      if constexpr (kMany) {
        present = token.present;
        if (kEarly && pass + 1 < c.t) next = load_token(pass + 1);  // while this one is computed
      }
      if constexpr (kEarly || kMany) __syncthreads();  // the pass before has read shared memory
    }
    if (thread == kThreads - 1) {
      const float step = Softplus(token.raw + p.dt_bias[head]);
      const float clipped = AtLeast(AtMost(step, c.largest_step), c.smallest_step);
      step_and_decay[0] = present ? clipped : 0.0f;
      step_and_decay[1] = present ? expf(-clipped * expf(p.A_log[head])) : 1.0f;
    }
    each_channel([&](int own, int i) {
      const auto earlier = [&](int tap) {
        if constexpr (!kMany) return *convolution.Past(tap, channels[own]);
        const TokenInputs<T> inputs = InputsOf<T>(c, p, sizes, row, channels[own]);
        return InputAt(convolution, channels[own], inputs, max(pass, 0) + tap);
      };
      const float sum = Convolve(convolution, channels[own], windows[own], earlier);
      mixed[i] = ActivateGate(c.activation, sum + biases[own]);
      if (!kMany && real && i < c.p && present) Advance(convolution, channels[own], windows[own]);
    });
    __syncthreads();

    const float step = step_and_decay[0], decay = step_and_decay[1];
    float b[4], out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j] = mixed[c.p + 4 * column + j];
      out[j] = mixed[c.p + c.n + 4 * column + j];
    }
    float4* state = state_in(real ? pass : 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int line = line_group + i * groups;
      if (!kUsual && (!active || line >= c.p)) continue;
      const float scaled = step * mixed[line];
      const float4 after =
          make_float4(decay * values[i].x + scaled * b[0], decay * values[i].y + scaled * b[1],
                      decay * values[i].z + scaled * b[2], decay * values[i].w + scaled * b[3]);
      if constexpr (kMany) {
        if (real && present) values[i] = after;
        if (real) state[i * groups * lanes] = values[i];
      } else {
        if (real && present) state[i * groups * lanes] = after;
      }
      partial[line * kRowLanes + column] =
          (after.x * out[0] + after.y * out[1]) + (after.z * out[2] + after.w * out[3]);
    }
    __syncthreads();

    if (thread < c.p) {
      float y = 0.0f;
#pragma unroll 8
      for (int lane = 0; lane < lanes; ++lane) y += partial[thread * kRowLanes + lane];
      y += p.D[head] * mixed[thread];
      const int64_t place = (row * c.t + pass) * sizes.inner + head * c.p + thread;
      if (real) p.gated[place] = y * Silu(token.gate);
    }
  };
  if constexpr (kEarly || kMany) {
#pragma unroll 1
    for (int pass = kEarly ? -1 : 0; pass < c.t; ++pass) compute(pass);
  } else {
    compute(0);
  }
  if constexpr (kMany) {
    const int count = CountPresent(p.positions, row, c.t);
    each_channel([&](int own, int i) {
      const TokenInputs<T> inputs = InputsOf<T>(c, p, sizes, row, channels[own]);
      if (i < c.p) WriteSlots(convolution, channels[own], inputs, c.t, count);
    });
  }
}

// Normalizes one group of one token. For the first token of a row, it also writes the past inputs
// of the B and C of the group.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    FinishMamba2(const Mamba2StepCall c, const Mamba2StepBuffers p) {
  __shared__ float squares[kThreads / 32];
  const Sizes sizes(c);
  const int thread = threadIdx.x, group = blockIdx.x % c.groups;
  const int64_t index = blockIdx.x / c.groups, row = index / c.t;
  const bool writes = index == row * c.t && thread < 2 * c.n;
  const bool many = p.kept != nullptr;
  const int32_t channel = writes ? FindChannel(c, sizes, 0, group, c.p + thread) : 0;
  const TokenInputs<T> inputs = InputsOf<T>(c, p, sizes, row, channel);
  Convolution<T> convolution = ConvolutionOf<T>(c, p, sizes, row, 0);
  const bool present = !many && p.positions[row] < kPaddingPosition;
  Window<T> window = {};
  if (writes && !many) window = LoadWindow(convolution, channel, *inputs.first);
  WaitForPrecedingKernel();
  StartNextKernel();
  if (writes && many) {
    convolution.kept = KeptSlot(p.kept, row, c.w);
    WriteSlots(convolution, channel, inputs, c.t, CountPresent(p.positions, row, c.t));
  } else if (writes && present) {
    Advance(convolution, channel, window);
  }

  const int32_t width = sizes.inner / c.groups;
  const float* gated = p.gated + index * sizes.inner + group * width;
  float square = 0.0f;
#pragma unroll 4
  for (int32_t i = thread; i < width; i += kThreads) square += gated[i] * gated[i];
  square = SumOfWarp(square);
  if (thread % 32 == 0) squares[thread / 32] = square;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) sum += squares[i];
  const float scale = ReciprocalRoot(sum / static_cast<float>(width) + c.eps);
  T* y = static_cast<T*>(p.y) + index * sizes.inner + group * width;
#pragma unroll 4
  for (int32_t i = thread; i < width; i += kThreads) {
    y[i] = FromFloat<T>(gated[i] * scale * p.norm[group * width + i]);
  }
}

template <typename T, bool kMany>
cudaError_t LaunchMamba2StepOf(cudaStream_t stream, const Mamba2StepCall& c,
                               const Mamba2StepBuffers& p) {
  constexpr int kUsualRows = kUsualP * kUsualN / 4 / kThreads;
  constexpr int kMostRows = kMaxWidth * kMaxWidth / 4 / kThreads;
  const bool usual = c.p == kUsualP && c.n == kUsualN;
  const bool early = c.state_is_unchanged &&
                     MayOverlap(Mamba2Step<T, true, kUsualRows, true, kMany>) &&
                     c.b * c.heads <= MultiprocessorCount();
  const auto kernel = !usual  ? Mamba2Step<T, false, kMostRows, false, kMany>
                      : early ? Mamba2Step<T, true, kUsualRows, true, kMany>
                              : Mamba2Step<T, true, kUsualRows, false, kMany>;
  const dim3 grid(static_cast<unsigned>(c.b * c.heads));
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchWide(stream, grid, kThreads, 0, true, kernel, c, p));
  const dim3 blocks(static_cast<unsigned>(c.b * c.t * c.groups));
  return LaunchWide(stream, blocks, kThreads, 0, true, FinishMamba2<T>, c, p);
}

}  // namespace

cudaError_t LaunchMamba2Step(cudaStream_t stream, const Mamba2StepCall& call,
                             const Mamba2StepBuffers& buffers) {
  return CallWithType(call.type, [&](auto type) {
    using T = decltype(type);
    return buffers.kept == nullptr ? LaunchMamba2StepOf<T, false>(stream, call, buffers)
                                   : LaunchMamba2StepOf<T, true>(stream, call, buffers);
  });
}

}  // namespace nvfp4
