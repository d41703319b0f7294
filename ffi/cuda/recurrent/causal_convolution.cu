// The causal convolution of a recurrent mixer for the tokens of a prompt, and what follows it:
//
//   sum[t, c] = weight[c, 0] x[t - taps + 1, c] + ... + weight[c, taps - 1] x[t, c]
//   y[t, c] = silu(sum[t, c] + bias[c])
//
// Tokens before the first one are the past inputs. The results are float32, because the recurrence
// reads float32. They are written part by part, in contiguous arrays, so that nobody copies them.
// Sums begin with the oldest token, as those of numerics/convolution.py do, and multiply and add
// with one rounding. Sigmoid has its own rounding (activations.cuh), so that results differ from
// XLA's in the last bits.
//
// A thread handles four channels of a run of tokens. It keeps the last inputs in registers, so that
// it reads each input once, and those just ahead of its run once more. It requests the inputs of
// kBatch tokens before it uses the first of them. Neighboring threads have neighboring channels,
// and all loads and stores of a warp are contiguous.
//
// The threads of the first run of a row also replace the past inputs. No other thread reads them.
//
// Inputs of padding are not used, and its results are zeros. Padding follows all other tokens of
// its row. The position of the last token of a run therefore tells whether a run has padding. Only
// such a run has to look for its last token that is no padding.
//
// Bottleneck: memory bandwidth, of which the results take two thirds. The kernel does not overlap
// with the preceding one; see LaunchCached.
//
// Needs: 2 to 8 taps; all counts of channels and columns are multiples of 4.
// cuda_recurrent_bindings.cc checks these. Tests: tests/emulation/test_emulation_convolution.py,
// tests/gpu/test_cuda_convolution.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cuda/call_with_type.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/recurrent.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = static_cast<int>(kConvolutionFactor);
constexpr int kBatch = 4;  // tokens whose inputs are in flight at once
// A prompt is cut into so many runs that all blocks run at once, with so many blocks on each
// multiprocessor. If that would cut a row into fewer than kFewestRuns runs, there are many rows or
// channels, and runs have kUsualRun tokens. The length of a run is a multiple of kRunFactor.
constexpr int kBlocksPerMultiprocessor = 3;
constexpr int kFewestRuns = 4, kUsualRun = 64, kRunFactor = 8;

static_assert(kRunFactor >= kMaxConvolutionTaps - 1, "only the first run may read past inputs");
static_assert(kRunFactor % kBatch == 0 && kUsualRun % kRunFactor == 0, "a run has whole batches");

// Where the four channels of a thread are: their column in x, and their place in a part.
struct Place {
  int32_t column, part, width, channel;  // `width` is that of a row of the part
};

__device__ __forceinline__ Place FindPlace(const ConvolutionCall& c, int32_t channel) {
  int32_t column = c.first, part = 0, width = c.widths[0];
#pragma unroll
  for (int i = 0; i < kConvolutionParts - 1; ++i) {
    if (part == i && channel >= c.heads * width) {
      channel -= c.heads * width;
      column += width;
      width = c.widths[i + 1];
      ++part;
    }
  }
  return {column + channel / width * c.stride + channel % width, part, c.heads * width, channel};
}

template <typename T>
struct Inputs {
  T values[kVector];
};
static_assert(sizeof(Inputs<__nv_bfloat16>) == sizeof(uint2), "8 bytes");

template <typename T>
__device__ __forceinline__ Inputs<T> LoadInputs(const T* source) {
  const uint2 word = *reinterpret_cast<const uint2*>(source);
  Inputs<T> inputs;
  std::memcpy(&inputs, &word, sizeof(inputs));
  return inputs;
}

// The inputs of the last tokens, the oldest first, with their weights.
template <int kTaps>
struct Window {
  float inputs[kTaps][kVector], weights[kTaps][kVector], bias[kVector];

  // Loads the weights [kVector, kTaps] and the bias [kVector], which may be null.
  __device__ __forceinline__ void LoadWeights(const float* source, const float* bias_source) {
    float4 loaded[kTaps], loaded_bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) loaded[j] = reinterpret_cast<const float4*>(source)[j];
    if (bias_source != nullptr) loaded_bias = *reinterpret_cast<const float4*>(bias_source);
    float flat[kVector * kTaps];
    std::memcpy(flat, loaded, sizeof(flat));
    std::memcpy(bias, &loaded_bias, sizeof(bias));
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) weights[j][i] = flat[i * kTaps + j];
    }
  }

  template <typename T>
  __device__ __forceinline__ void Put(int slot, const Inputs<T>& newest) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) inputs[slot][i] = ToFloat(newest.values[i]);
  }

  // Takes the inputs of the next token, and writes its results.
  template <typename T>
  __device__ __forceinline__ void Step(const Inputs<T>& newest, float* y) {
    Put(kTaps - 1, newest);
    float results[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum += inputs[j][i] * weights[j][i];
      results[i] = Silu(sum + bias[i]);
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) inputs[j][i] = inputs[j + 1][i];
    }
    *reinterpret_cast<float4*>(y) = make_float4(results[0], results[1], results[2], results[3]);
  }
};

// Returns how many tokens of a row are no padding. All threads of the block take part.
__device__ __forceinline__ int64_t CountPresent(const int32_t* positions, int64_t t,
                                                int32_t (&counts)[kThreads / 32]) {
  int32_t count = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < t; i += kThreads) count += positions[i] < kPaddingPosition;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
  __syncthreads();
  int32_t total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += counts[i];
  return total;
}

// Returns how many of the `count` tokens of a run are no padding. The last one is padding.
__device__ __forceinline__ int32_t CountRun(const int32_t* positions, int32_t count) {
  if (positions[0] >= kPaddingPosition) return 0;
  int32_t present = 1, end = count - 1;  // token present - 1 is no padding, and token `end` is
#pragma unroll 1
  while (present < end) {
    const int32_t middle = (present + end) / 2;
    if (positions[middle] < kPaddingPosition) {
      present = middle + 1;
    } else {
      end = middle;
    }
  }
  return present;
}

// Published models have four taps. Other kernels may take as many registers as they like.
constexpr int MinBlocks(int taps) { return taps == 4 ? kBlocksPerMultiprocessor : 1; }

// A block handles kThreads vectors of channels of one run. Its number counts the vectors first,
// then the runs, and then the rows.
template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads, MinBlocks(kTaps))
    CausalConvolution(const ConvolutionCall c, const ConvolutionBuffers p, int32_t run_tokens,
                      int32_t runs, int32_t blocks) {
  constexpr int kPast = kTaps - 1;
  __shared__ int32_t counts[kThreads / 32];
  const uint32_t block = blockIdx.x % blocks, row_and_run = blockIdx.x / blocks;
  const uint32_t run = row_and_run % runs;
  const int64_t row = row_and_run / runs;
  const int32_t channel = kVector * static_cast<int32_t>(block * kThreads + threadIdx.x);
  const bool active = channel < c.channels;
  const Place place = FindPlace(c, active ? channel : 0);
  const T* x = static_cast<const T*>(p.x) + row * c.t * c.columns + place.column;
  T* past = static_cast<T*>(p.inputs) + row * kPast * c.channels + channel;
  const int64_t start = static_cast<int64_t>(run) * run_tokens;

  if (active) {
    const int64_t rest = c.t - start;
    const int32_t tokens = rest < run_tokens ? static_cast<int32_t>(rest) : run_tokens;
    const int32_t* positions = p.positions + row * c.t + start;
    // Requested ahead of the weights and the window, which then arrive in the meantime.
    const int32_t last_position = positions[tokens - 1];
    Window<kTaps> window;
    window.LoadWeights(p.weight + static_cast<int64_t>(channel) * kTaps,
                       p.bias == nullptr ? nullptr : p.bias + channel);
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      const int64_t before = (start - kPast + j) * c.columns;
      window.Put(j, LoadInputs(run == 0 ? past + j * c.channels : x + before));
    }

    const int32_t count = last_position < kPaddingPosition ? tokens : CountRun(positions, tokens);
    const T* source = x + start * c.columns;
    float* part = place.part == 0 ? p.y[0] : place.part == 1 ? p.y[1] : p.y[2];
    float* y = part + (row * c.t + start) * place.width + place.channel;
    // Before the products, which then need no register for the number of these tokens.
#pragma unroll 1
    for (int32_t padding = count; padding < tokens; ++padding) {
      *reinterpret_cast<float4*>(y + static_cast<int64_t>(padding) * place.width) =
          make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    int32_t token = 0;
#pragma unroll 1
    for (; token + kBatch <= count; token += kBatch) {
      Inputs<T> batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        batch[k] = LoadInputs(source);
        source += c.columns;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        window.Step(batch[k], y);
        y += place.width;
      }
    }
#pragma unroll 1
    for (; token < count; ++token) {
      window.Step(LoadInputs(source), y);
      source += c.columns;
      y += place.width;
    }
  }

  if (run > 0) return;
  const int64_t present = CountPresent(p.positions + row * c.t, c.t, counts);
  if (!active) return;
  // In this order, a thread reads a past input before it replaces it.
#pragma unroll
  for (int j = 0; j < kPast; ++j) {
    const int64_t token = present - kPast + j;
    const T* source = token < 0 ? past + (token + kPast) * c.channels : x + token * c.columns;
    *reinterpret_cast<uint2*>(past + j * c.channels) = *reinterpret_cast<const uint2*>(source);
  }
}

template <typename T, int kTaps>
cudaError_t LaunchTaps(cudaStream_t stream, const ConvolutionCall& c, const ConvolutionBuffers& p) {
  const int64_t blocks = CeilDiv(c.channels, kThreads * kVector);
  const int64_t together = int64_t{kBlocksPerMultiprocessor} * MultiprocessorCount();
  int64_t tokens = kUsualRun;
  if (const int64_t cut = together / std::max<int64_t>(c.b * blocks, 1); cut >= kFewestRuns) {
    tokens = CeilDiv(CeilDiv(c.t, cut), kRunFactor) * kRunFactor;
  }
  const int64_t runs = CeilDiv(c.t, tokens);
  return LaunchCached(stream, dim3(static_cast<unsigned>(c.b * runs * blocks)), kThreads,
                      CausalConvolution<T, kTaps>, c, p, static_cast<int32_t>(tokens),
                      static_cast<int32_t>(runs), static_cast<int32_t>(blocks));
}

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const ConvolutionCall& c, const ConvolutionBuffers& p) {
  switch (c.taps) {
    case 2:
      return LaunchTaps<T, 2>(stream, c, p);
    case 3:
      return LaunchTaps<T, 3>(stream, c, p);
    case 4:
      return LaunchTaps<T, 4>(stream, c, p);
    case 5:
      return LaunchTaps<T, 5>(stream, c, p);
    case 6:
      return LaunchTaps<T, 6>(stream, c, p);
    case 7:
      return LaunchTaps<T, 7>(stream, c, p);
    case 8:
      return LaunchTaps<T, 8>(stream, c, p);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchConvolution(cudaStream_t stream, const ConvolutionCall& call,
                              const ConvolutionBuffers& buffers) {
  return CallWithHalf(call.type,
                      [&](auto type) { return LaunchOf<decltype(type)>(stream, call, buffers); });
}

}  // namespace nvfp4
