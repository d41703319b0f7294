// Few tokens of a gated delta net or of Kimi delta attention: everything between its projections,
// in one pass over the state.
//
//   q, k, v = silu(convolve(qkv))
//   S' = a S + k (beta (v - k.T a S)),  y = q.T S' = q.T a S + (q.k) (beta (v - k.T a S))
//   output = norm(y) * silu(z), or norm(y) * sigmoid(z)
//
// The decay a is one number for each value head. In Kimi delta attention, which has the sigmoid, it
// is one for each channel of a key, and a value head has its own key head.
//
// A block handles one value head of one row. Its 256 threads hold the state [d, e] in registers, so
// that memory is read once and written once, in place. A thread has 4 columns of every so manyth
// row. Both products with the old state, for the key and for the query, come from the same
// registers.
//
// Several value heads share one key head. Each of their blocks computes the convolution of the
// shared queries and keys itself, and reads their past inputs. The first of these blocks writes the
// new inputs after all of them have read the old ones: the blocks are a cluster with a barrier. A
// device without clusters, or a key head with more value heads than a cluster has blocks, takes a
// second kernel that writes the inputs.
//
// Bottleneck: reading and writing the state. The loads of the state are issued first, so that the
// convolution hides behind them. While the preceding kernel still runs, the state comes into the L2
// cache.
//
// In a chain, all but the token is unchanged since the previous kernel. If each block has a
// multiprocessor of its own, it then loads the state into registers before it waits, and computes
// once with a token of zeros. On an H200, a step of Qwen3.6-35B-A3B's sizes then ended 4.7 us after
// the projection ahead of it, instead of 8.1.
//
// A call for t tokens of a row, which decoding with drafts makes, goes through them one by one,
// with the operations of a call for one token. It writes the state after each of them, so that the
// next call can go on from any.
//
// Needs: d and e at most 128, e a multiple of 4. cuda_mixer_bindings.cc checks these. Tests:
// tests/emulation/test_emulation_recurrent.py, tests/gpu/test_cuda_recurrent.py.
#include "cuda/call_with_type.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/recurrent/recurrent.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 16;  // rows of the state in the registers of a thread
constexpr int kMaxWidth = static_cast<int>(kMaxStateWidth);
constexpr int kShiftThreads = 256;
constexpr int kMaxClusterBlocks = 8;  // the most that every device with clusters supports
constexpr float kTiny = 1e-6f;        // as in ops/recurrent/gated_delta.py

static_assert(kThreads * kRows * 4 >= kMaxWidth * kMaxWidth, "the registers hold a state");
static_assert(3 * kMaxWidth < 2 * kThreads, "a thread convolves at most two channels");
static_assert(2 * kMaxWidth <= kThreads, "the first one may be of a key, the second one is not");

// Where the numbers of one kind are in a row of `projected`: those of a key head follow each other.
struct Place {
  int32_t first, stride;  // of the first key head, and between two key heads

  __device__ __forceinline__ int32_t Of(int key_head, int within) const {
    return first + key_head * stride + within;
  }
};

// The places of all kinds, the number of channels of the convolution, and the widths of a row of
// `projected` and of `rates`. Rates and steps are in `rates`, which may be a part of `projected`.
struct Places {
  Place query, key, value, gate, rate, step;
  int32_t channels, row, rates_row;
};

Places FindPlaces(const DeltaStepCall& c, bool rates_apart) {
  if (c.channel_decays) {
    const int32_t keys = c.key_heads * c.d, channels = 2 * keys + c.key_heads * c.e;
    const int32_t row = channels + (rates_apart ? 0 : c.key_heads);
    return {{0, c.d}, {keys, c.d}, {2 * keys, c.e},
            {0, c.e}, {0, 1},      {0, 0},
            channels, row,         rates_apart ? c.key_heads : row};
  }
  const int32_t keys = c.key_heads * c.d, own = c.shared * c.e;
  const int32_t channels = 2 * keys + c.key_heads * own, scalars = channels + c.key_heads * own;
  const int32_t rates = 2 * c.key_heads * c.shared, whole = scalars + rates;
  const int32_t row = rates_apart ? scalars : whole, rates_row = rates_apart ? rates : whole;
  if (c.interleaved) {
    const int32_t stride = 2 * (c.d + own);
    return {{0, stride},       {c.d, stride},
            {2 * c.d, stride}, {2 * c.d + own, stride},
            {0, 2 * c.shared}, {c.shared, 2 * c.shared},
            channels,          row,
            rates_row};
  }
  return {{0, c.d},        {keys, c.d},   {2 * keys, own},
          {channels, own}, {0, c.shared}, {c.key_heads * c.shared, c.shared},
          channels,        row,           rates_row};
}

// A channel that a block convolves: its number in the convolution, which has all queries, then all
// keys, then all values, and its place in `projected`.
struct OwnChannel {
  int32_t convolved, projected;
};

// Returns channel i of a head: 0 to d - 1 are its query, up to 2 d - 1 its key, and then its value.
__device__ __forceinline__ OwnChannel FindChannel(const DeltaStepCall& c, const Places& places,
                                                  int key_head, int shared_head, int i) {
  if (i < 2 * c.d) {
    const int part = i < c.d ? 0 : 1, within = i - part * c.d;
    const Place& place = i < c.d ? places.query : places.key;
    return {(part * c.key_heads + key_head) * c.d + within, place.Of(key_head, within)};
  }
  const int within = shared_head * c.e + i - 2 * c.d;
  return {2 * c.key_heads * c.d + key_head * c.shared * c.e + within,
          places.value.Of(key_head, within)};
}

template <typename T>
__device__ __forceinline__ Convolution<T> ConvolutionOf(const DeltaStepCall& c,
                                                        const DeltaStepBuffers& p,
                                                        const Places& places, int64_t row,
                                                        int32_t kept) {
  return {static_cast<T*>(p.inputs) + row * c.w * (c.taps - 1) * places.channels, p.conv_weight,
          places.channels, c.taps, kept};
}

// Returns the inputs of a channel in the tokens of a row.
template <typename T>
__device__ __forceinline__ TokenInputs<T> InputsOf(const DeltaStepCall& c,
                                                   const DeltaStepBuffers& p, const Places& places,
                                                   int64_t row, const OwnChannel& own) {
  return {static_cast<const T*>(p.projected) + row * c.t * places.row + own.projected, places.row};
}

// Returns the decay of channel `i` of a head for a token that has the number `given` for it.
__device__ __forceinline__ float ChannelDecay(const DeltaStepCall& c, const DeltaStepBuffers& p,
                                              int head, int i, float given) {
  const float rate = expf(p.A_log[head]), x = given + p.dt_bias[head * c.d + i];
  return expf(c.lower_bound < 0.0f ? c.lower_bound * Sigmoid(rate * x) : -rate * Softplus(x));
}

// `kFull` says that d and e are kMaxWidth. The addresses of a thread are then a constant apart, and
// two blocks fit into a multiprocessor. `kChannels` stands for `channel_decays`. `writes_keys` says
// that this kernel also writes the past inputs of queries and keys. `kEarly` says that all but the
// tokens is unchanged since the previous kernel, and that a block may have all registers. `kMany`
// says that `kept` names one of several states, and that a row may have several tokens.
template <typename T, bool kFull, bool kChannels, bool kEarly, bool kMany>
__global__ void __launch_bounds__(kThreads, kFull && !kEarly ? 2 : 1)
    DeltaStep(const DeltaStepCall call, const Places places, const DeltaStepBuffers p,
              const bool writes_keys) {
  __shared__ float mixed[3 * kMaxWidth];  // the query, the key and the value of this head
  __shared__ __align__(16) float read_keys[4 * kThreads];
  __shared__ __align__(16) float read_queries[4 * kThreads];
  __shared__ __align__(16) float corrections[kMaxWidth];
  __shared__ float squares[kMaxWidth / 32];
  __shared__ float decay_and_rate[2];
  __shared__ float channel_decays[kChannels ? kMaxWidth : 1];

  DeltaStepCall c = call;
  if constexpr (kFull) c.d = c.e = kMaxWidth;
  if constexpr (!kMany) c.t = c.w = 1;
  const int heads = c.key_heads * c.shared, thread = threadIdx.x;
  const int head = blockIdx.x % heads, key_head = head / c.shared;
  const int shared_head = head - key_head * c.shared;
  const int64_t row = blockIdx.x / heads;
  const int lanes = c.e / 4, groups = kThreads / lanes;
  const int group = thread / lanes, column = thread % lanes;

  const bool active = group < groups;
  const int32_t kept = kMany && kEarly ? KeptSlot(p.kept, row, c.w) : 0;
  // Returns the place of this head in arrays that have `count` slots or tokens in a row.
  const auto place_in = [&](int count, int index) -> int64_t {
    return kMany ? (row * count + index) * heads + head : blockIdx.x;
  };
  // Returns what this thread has of a state.
  const auto state_in = [&](int slot) {
    return reinterpret_cast<float4*>(p.state) + place_in(c.w, slot) * c.d * lanes + thread;
  };
  Convolution<T> convolution = ConvolutionOf<T>(c, p, places, row, kept);
  OwnChannel channels[2] = {};
  // Calls function(its number, the channel of the head) for the channels that this thread
  // convolves.
  const auto each_channel = [&](const auto& function) {
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const int i = own * kThreads + thread;
      if (i < 2 * c.d + c.e) function(own, i);
    }
  };
  each_channel(
      [&](int own, int i) { channels[own] = FindChannel(c, places, key_head, shared_head, i); });
  float4 values[kRows];
  Window<T> windows[2] = {};
  float weight = 0.0f;
  bool present = false;
  // Loads all that may be unchanged since the previous kernel.
  const auto load_unchanged = [&] {
    const float4* state = state_in(convolution.kept);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int line = group + i * groups;
      values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (kFull || (active && line < c.d)) values[i] = __ldcs(state + i * groups * lanes);
    }
    each_channel([&](int own, int) {
      windows[own] = LoadWindow(convolution, channels[own].convolved, FromFloat<T>(0.0f));
    });
    if (thread < c.e) weight = p.norm[thread];
    present = p.positions[row * c.t] < kPaddingPosition;
  };
  if constexpr (kEarly) {
    load_unchanged();
  } else if constexpr (!kMany) {
    each_channel([&](int own, int) { PrefetchWindow(convolution, channels[own].convolved); });
    PrefetchLines(state_in(0) - thread, c.d * lanes * 16, thread, kThreads);
  }
  // What this thread reads of a token.
  struct Token {
    T inputs[2];
    float gate, rate, step, decay;
    bool present;
  };
  const auto load_token = [&](int token) {
    const int64_t index = row * c.t + token;
    Token read = {};
    const T* projected = static_cast<const T*>(p.projected) + index * places.row;
    each_channel([&](int own, int) { read.inputs[own] = projected[channels[own].projected]; });
    if (thread < c.e) {
      const T* gates = projected;
      if constexpr (kChannels) gates = static_cast<const T*>(p.gates) + index * c.key_heads * c.e;
      read.gate = ToFloat(gates[places.gate.Of(key_head, shared_head * c.e + thread)]);
    }
    if (thread == kThreads - 1) {
      const T* rates = static_cast<const T*>(p.rates) + index * places.rates_row;
      read.rate = ToFloat(rates[places.rate.Of(key_head, shared_head)]);
      if constexpr (!kChannels) read.step = ToFloat(rates[places.step.Of(key_head, shared_head)]);
    }
    if constexpr (kChannels) {  // the other half of the threads convolves values
      const int i = thread - kMaxWidth;
      if (i >= 0 && i < c.d) {
        read.decay =
            ToFloat(static_cast<const T*>(p.decays)[(index * c.key_heads + head) * c.d + i]);
      }
    }
    if constexpr (kMany) read.present = p.positions[index] < kPaddingPosition;
    return read;
  };
  Token next = {};
  // Computes the step of token `pass`. Pass -1 takes the place of the wait: its results are not
  // used, and its token is zero. It brings the code of the others into the instruction cache.
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
      if constexpr (kChannels) {
        decay_and_rate[0] = 1.0f;
      } else {
        const float g = -expf(p.A_log[head]) * Softplus(token.step + p.dt_bias[head]);
        decay_and_rate[0] = present ? expf(g) : 1.0f;
      }
      decay_and_rate[1] = present ? Sigmoid(token.rate) : 0.0f;
    }
    if constexpr (kChannels) {
      const int i = thread - kMaxWidth;
      if (i >= 0 && i < c.d) channel_decays[i] = ChannelDecay(c, p, head, i, token.decay);
    }
    each_channel([&](int own, int i) {
      const int32_t channel = channels[own].convolved;
      const auto earlier = [&](int tap) {
        if constexpr (!kMany) return *convolution.Past(tap, channel);
        const TokenInputs<T> inputs = InputsOf<T>(c, p, places, row, channels[own]);
        return InputAt(convolution, channel, inputs, max(pass, 0) + tap);
      };
      mixed[i] = Silu(Convolve(convolution, channel, windows[own], earlier));
      if (!kMany && real && i >= 2 * c.d && present) {
        Advance(convolution, channel, windows[own]);
      }
    });
    if (pass == c.t - 1) ArriveAtCluster();
    __syncthreads();

    // Each warp computes the lengths itself, which takes no further barrier.
    float query_square = 0.0f, key_square = 0.0f, both = 0.0f;
#pragma unroll
    for (int first = 0; first < kMaxWidth; first += 32) {
      const int i = first + thread % 32;
      const float query = i < c.d ? mixed[i] : 0.0f, key = i < c.d ? mixed[c.d + i] : 0.0f;
      query_square += query * query;
      key_square += key * key;
      both += query * key;
    }
    const float query_scale = ReciprocalRoot(SumOfWarp(query_square) + kTiny) * c.scale;
    const float key_scale = ReciprocalRoot(SumOfWarp(key_square) + kTiny);
    const float decay = decay_and_rate[0];
    const auto decay_of = [&](int line) { return kChannels ? channel_decays[line] : decay; };

    float4 keys = make_float4(0.0f, 0.0f, 0.0f, 0.0f), queries = keys;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int line = group + i * groups;
      if (!kFull && line >= c.d) continue;
      float key = mixed[c.d + line] * key_scale, query = mixed[line] * query_scale;
      if constexpr (kChannels) {
        key *= channel_decays[line];
        query *= channel_decays[line];
      }
      keys.x += key * values[i].x;
      keys.y += key * values[i].y;
      keys.z += key * values[i].z;
      keys.w += key * values[i].w;
      queries.x += query * values[i].x;
      queries.y += query * values[i].y;
      queries.z += query * values[i].z;
      queries.w += query * values[i].w;
    }
    // A place is group * e + 4 * column, because the threads of a group follow each other.
    reinterpret_cast<float4*>(read_keys)[thread] = keys;
    reinterpret_cast<float4*>(read_queries)[thread] = queries;
    const float pair = SumOfWarp(both) * query_scale * key_scale;
    __syncthreads();

    float y = 0.0f;
    if (thread < kMaxWidth) {
      if (thread < c.e) {
        const int used = groups < c.d ? groups : c.d;
        float key_sum = 0.0f, query_sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < used; ++i) {
          key_sum += read_keys[i * c.e + thread];
          query_sum += read_queries[i * c.e + thread];
        }
        const float correction = decay_and_rate[1] * (mixed[2 * c.d + thread] - decay * key_sum);
        corrections[thread] = correction;
        y = decay * query_sum + pair * correction;
      }
      const float square = SumOfWarp(y * y);
      if (thread % 32 == 0) squares[thread / 32] = square;
    }
    __syncthreads();

    if (real && (present || kMany)) {
      const float4 correction = reinterpret_cast<const float4*>(corrections)[column];
      float4* state = state_in(real ? pass : 0);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int line = group + i * groups;
        if (!kFull && (!active || line >= c.d)) continue;
        const float key = mixed[c.d + line] * key_scale, left = decay_of(line);
        const float4 after = make_float4(
            left * values[i].x + key * correction.x, left * values[i].y + key * correction.y,
            left * values[i].z + key * correction.z, left * values[i].w + key * correction.w);
        if constexpr (kMany) {
          if (present) values[i] = after;
          state[i * groups * lanes] = values[i];
        } else {
          state[i * groups * lanes] = after;
        }
      }
    }
    if (real && thread < c.e) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kMaxWidth / 32; ++i) sum += squares[i];
      const float normal = weight * (y * ReciprocalRoot(sum / static_cast<float>(c.e) + c.eps));
      static_cast<T*>(p.y)[place_in(c.t, pass) * c.e + thread] =
          FromFloat<T>(normal * (kChannels ? Sigmoid(token.gate) : Silu(token.gate)));
    }
  };
  if constexpr (kEarly || kMany) {
#pragma unroll 1
    for (int pass = kEarly ? -1 : 0; pass < c.t; ++pass) compute(pass);
  } else {
    compute(0);
  }
  WaitForCluster();
  const bool writes = writes_keys && shared_head == 0;
  if constexpr (kMany) {
    const int count = CountPresent(p.positions, row, c.t);
    each_channel([&](int own, int i) {
      const TokenInputs<T> inputs = InputsOf<T>(c, p, places, row, channels[own]);
      if (writes || i >= 2 * c.d) {
        WriteSlots(convolution, channels[own].convolved, inputs, c.t, count);
      }
    });
  } else if (writes && present && thread < 2 * c.d) {
    Advance(convolution, channels[0].convolved, windows[0]);
  }
}

// Writes the past inputs of queries and keys, one channel for each thread.
template <typename T>
__global__ void __launch_bounds__(kShiftThreads)
    AdvanceKeys(const DeltaStepCall c, const Places places, const DeltaStepBuffers p) {
  const int32_t keys = 2 * c.key_heads * c.d;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kShiftThreads + threadIdx.x;
  const int64_t row = index / keys;
  WaitForPrecedingKernel();
  StartNextKernel();
  if (row >= c.b) return;
  const auto convolved = static_cast<int32_t>(index % keys);
  const int32_t part = convolved / (c.key_heads * c.d);
  const int32_t key_head = convolved / c.d % c.key_heads, within = convolved % c.d;
  const OwnChannel own = FindChannel(c, places, key_head, 0, part * c.d + within);
  const int32_t kept = KeptSlot(p.kept, row, c.w);
  const Convolution<T> convolution = ConvolutionOf<T>(c, p, places, row, kept);
  WriteSlots(convolution, convolved, InputsOf<T>(c, p, places, row, own), c.t,
             CountPresent(p.positions, row, c.t));
}

template <typename T, bool kFull, bool kChannels, bool kEarly, bool kMany>
cudaError_t LaunchDeltaStepAs(cudaStream_t stream, const DeltaStepCall& c,
                              const DeltaStepBuffers& buffers) {
  constexpr auto kKernel = DeltaStep<T, kFull, kChannels, kEarly, kMany>;
  const Places places = FindPlaces(c, buffers.rates != nullptr);
  DeltaStepBuffers p = buffers;
  if (p.rates == nullptr) {
    const int32_t last = kChannels ? c.key_heads : 2 * c.key_heads * c.shared;
    p.rates = static_cast<const T*>(p.projected) + places.row - last;
  }
  const dim3 grid(static_cast<unsigned>(c.b * c.key_heads * c.shared));
  const bool clusters = c.shared <= kMaxClusterBlocks && HasClusters(kKernel);
  const bool writes_keys = c.shared == 1 || clusters;
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchClusters(stream, grid, clusters ? c.shared : 1, kThreads, 0,
                                            /*overlaps=*/true, kKernel, c, places, p, writes_keys));
  if (writes_keys) return cudaSuccess;
  const int64_t channels = c.b * 2 * c.key_heads * c.d;
  const dim3 blocks(static_cast<unsigned>(CeilDiv(channels, kShiftThreads)));
  return LaunchWide(stream, blocks, kShiftThreads, 0, /*overlaps=*/true, AdvanceKeys<T>, c, places,
                    p);
}

template <typename T, bool kChannels, bool kMany>
cudaError_t LaunchDeltaStepOf(cudaStream_t stream, const DeltaStepCall& c,
                              const DeltaStepBuffers& p) {
  const bool full = c.d == kMaxWidth && c.e == kMaxWidth;
  if (!full) return LaunchDeltaStepAs<T, false, kChannels, false, kMany>(stream, c, p);
  const bool early = c.state_is_unchanged &&
                     MayOverlap(DeltaStep<T, true, kChannels, true, kMany>) &&
                     c.b * c.key_heads * c.shared <= MultiprocessorCount();
  return early ? LaunchDeltaStepAs<T, true, kChannels, true, kMany>(stream, c, p)
               : LaunchDeltaStepAs<T, true, kChannels, false, kMany>(stream, c, p);
}

template <typename T>
cudaError_t LaunchDeltaStepOf(cudaStream_t stream, const DeltaStepCall& c,
                              const DeltaStepBuffers& p) {
  const bool many = p.kept != nullptr;
  if (c.channel_decays) {
    return many ? LaunchDeltaStepOf<T, true, true>(stream, c, p)
                : LaunchDeltaStepOf<T, true, false>(stream, c, p);
  }
  return many ? LaunchDeltaStepOf<T, false, true>(stream, c, p)
              : LaunchDeltaStepOf<T, false, false>(stream, c, p);
}

}  // namespace

cudaError_t LaunchDeltaStep(cudaStream_t stream, const DeltaStepCall& call,
                            const DeltaStepBuffers& buffers) {
  return CallWithType(call.type, [&](auto type) {
    return LaunchDeltaStepOf<decltype(type)>(stream, call, buffers);
  });
}

}  // namespace nvfp4
