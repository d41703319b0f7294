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
// that memory is read once and written once, in place. A thread has up to 16 neighbouring rows of 4
// columns. Both products with the old state, for the key and for the query, come from the same
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
// A call for t tokens of a row, which decoding with drafts makes, mixes up to four tokens at once:
// their convolutions, lengths and decays do not depend on the state. Then it goes through them one
// by one, and writes the state after each of them, so that the next call can go on from any.
//
// All kernels below give the same bits. Each adds the rows of a state in the same order, and sums
// of two products are written as fmaf: a compiler may round either product first.
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
constexpr int kRows = 16;      // rows of the state in the registers of a thread
constexpr int kMaxTokens = 4;  // that a block mixes at once
constexpr int kMaxWidth = static_cast<int>(kMaxStateWidth);
constexpr int kSquares = kMaxWidth / 32;
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

// Returns channel i of a block: 0 to d - 1 are the query of its head, up to 2 d - 1 the key. Then
// come its values, which begin at `first_value` among those of all heads with this key.
__device__ __forceinline__ OwnChannel FindChannel(const DeltaStepCall& c, const Places& places,
                                                  int key_head, int first_value, int i) {
  if (i < 2 * c.d) {
    const int part = i < c.d ? 0 : 1, within = i - part * c.d;
    const Place& place = i < c.d ? places.query : places.key;
    return {(part * c.key_heads + key_head) * c.d + within, place.Of(key_head, within)};
  }
  const int within = first_value + i - 2 * c.d;
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

// Returns how many neighbouring rows of a state each of `groups` groups of threads has, a multiple
// of four.
__device__ __forceinline__ int RowsOfGroup(int d, int groups) {
  return (d + 4 * groups - 1) / (4 * groups) * 4;
}

// Four neighbouring numbers of a state or of shared memory.
struct Four {
  float of[4];
};

__device__ __forceinline__ Four FourOf(const float4& four) {
  return {{four.x, four.y, four.z, four.w}};
}
__device__ __forceinline__ Four LoadFour(const float* state) {
  return FourOf(__ldcs(reinterpret_cast<const float4*>(state)));
}
__device__ __forceinline__ Four ReadFour(const float* shared) {
  return FourOf(*reinterpret_cast<const float4*>(shared));
}
__device__ __forceinline__ void StoreFour(float* place, const Four& four) {
  const auto& of = four.of;
  *reinterpret_cast<float4*>(place) = make_float4(of[0], of[1], of[2], of[3]);
}

// The shared memory of a block that mixes `kTokens` tokens at once.
template <int kTokens, bool kChannels>
struct __align__(16) StepShared {
  float queries[kTokens][kMaxWidth], keys[kTokens][kMaxWidth];  // before they have their lengths
  float values[kTokens][kMaxWidth];
  float read_keys[4 * kThreads], read_queries[4 * kThreads];
  float corrections[kTokens][kMaxWidth], query_sums[kTokens][kMaxWidth];
  float channel_decays[kChannels ? kTokens : 1][kMaxWidth];
  float squares[kTokens][kSquares];  // of y, for each 32 columns
  float query_scales[kTokens], key_scales[kTokens], pairs[kTokens];
  float decays[kTokens], rates[kTokens];
  float gates[kTokens][kMaxWidth], norm[kMaxWidth];  // if a row may have several tokens
};

// `kFull` says that d and e are kMaxWidth. The addresses of a thread are then a constant apart, and
// two blocks fit into a multiprocessor. `kChannels` stands for `channel_decays`. `writes_keys` says
// that this kernel also writes the past inputs of queries and keys. `kEarly` says that all but the
// tokens is unchanged since the previous kernel, and that a block may have all registers. `kMany`
// says that `kept` names one of several states, and that a row may have several tokens.
template <typename T, bool kFull, bool kChannels, bool kEarly, bool kMany>
__global__ void __launch_bounds__(kThreads, kFull && !kEarly ? 2 : 1)
    DeltaStep(const DeltaStepCall call, const Places places, const DeltaStepBuffers p,
              const bool writes_keys) {
  constexpr int kTokens = kMany ? kMaxTokens : 1;
  // Numbers of all tokens that a thread has: of y, and of the decays of channels.
  constexpr int kOutputs = kTokens * kMaxWidth > kThreads ? kTokens * kMaxWidth / kThreads : 1;
  using Shared = StepShared<kTokens, kChannels>;
  NVFP4_DYNAMIC_SHARED(dynamic);
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);

  DeltaStepCall c = call;
  if constexpr (kFull) c.d = c.e = kMaxWidth;
  if constexpr (!kMany) c.t = c.w = 1;
  int thread = threadIdx.x;
  const int heads = c.key_heads * c.shared;
  const int head = blockIdx.x % heads, key_head = head / c.shared;
  const int shared_head = head - key_head * c.shared, first_value = shared_head * c.e;
  const int32_t row = blockIdx.x / heads;
  const int lanes = c.e / 4, groups = kThreads / lanes;
  const int group = thread / lanes, column = thread % lanes * 4;
  const int rows = kFull ? kRows : RowsOfGroup(c.d, groups), first_line = group * rows;
  const int used_groups = kFull ? kThreads / (kMaxWidth / 4) : (c.d + rows - 1) / rows;

  // Returns whether this thread has row i of its rows.
  const auto has_row = [&](int i) {
    return kFull || (group < groups && i < rows && first_line + i < c.d);
  };
  // Calls function(the first of them, its line in the state) for each four rows of this thread.
  const auto each_quad = [&](const auto& function) {
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      if (has_row(i)) function(i, first_line + i);
    }
  };
  const int32_t kept = kMany && kEarly ? KeptSlot(p.kept, row, c.w) : 0;
  // Returns the place of this head in arrays that have `count` slots or tokens in a row.
  const auto place_in = [&](int count, int index) -> int64_t {
    return kMany ? (static_cast<int64_t>(row) * count + index) * heads + head : blockIdx.x;
  };
  // Returns the first row of this thread in a state.
  const auto state_in = [&](int slot) {
    return p.state + (place_in(c.w, slot) * c.d + first_line) * c.e + column;
  };
  Convolution<T> convolution = ConvolutionOf<T>(c, p, places, row, kept);
  const auto channel_at = [&](int i) { return FindChannel(c, places, key_head, first_value, i); };
  // Calls function(0 or 1, its number i in the block, the channel) for the channels that this
  // thread convolves.
  const auto each_channel = [&](const auto& function) {
    if constexpr (kMany && !kEarly) {
      asm volatile("" : "+r"(thread));  // otherwise all addresses would stay in registers
    }
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const int i = own * kThreads + thread;
      if (i < 2 * c.d + c.e) {
        function(own, i, channel_at(i));
      }
    }
  };
  Four values[kRows];
  Window<T> windows[2] = {};
  float weight = 0.0f;
  unsigned present = 1;  // a bit for each token that is no padding
  // Loads all that may be unchanged since the previous kernel.
  const auto load_unchanged = [&] {
    const float* state = state_in(convolution.kept);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      values[i] = {};
      if (has_row(i)) values[i] = LoadFour(state + i * c.e);
    }
    each_channel([&](int own, int, const OwnChannel& channel) {
      windows[own] = LoadWindow(convolution, channel.convolved, FromFloat<T>(0.0f));
    });
    if (thread % kMaxWidth < c.e) weight = p.norm[thread % kMaxWidth];
    if (kMany && thread < kMaxWidth) shared.norm[thread] = weight;
    if constexpr (!kMany) present = p.positions[row] < kPaddingPosition;
  };
  if constexpr (kEarly) {
    load_unchanged();
  } else if constexpr (!kMany) {
    each_channel([&](int own, int, const OwnChannel& channel) {
      PrefetchWindow(convolution, channel.convolved);
    });
    PrefetchLines(p.state + place_in(1, 0) * c.d * c.e, c.d * c.e * 4, thread, kThreads);
  }
  // What this thread reads of the tokens.
  struct Tokens {
    T inputs[2][kTokens], gates[kOutputs], decays[kOutputs];
    float rate, step;
  };
  const int rates_token = kThreads - 1 - threadIdx.x;  // whose rates this thread has
  // Returns the place of number `i` of this thread among those of all tokens.
  const auto decay_at = [&](int i) { return i * kThreads + kThreads - 1 - thread; };
  const auto output_at = [&](int i) { return i * kThreads + thread; };
  const auto load_tokens = [&](int first, int count) {
    const int64_t index = static_cast<int64_t>(row) * c.t + first;
    const T* projected = static_cast<const T*>(p.projected) + index * places.row;
    Tokens read = {};
    each_channel([&](int own, int, const OwnChannel& channel) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= count) break;
        read.inputs[own][token] = projected[token * places.row + channel.projected];
      }
    });
    if (rates_token < count) {
      const T* rates = static_cast<const T*>(p.rates) + (index + rates_token) * places.rates_row;
      read.rate = ToFloat(rates[places.rate.Of(key_head, shared_head)]);
      if constexpr (!kChannels) read.step = ToFloat(rates[places.step.Of(key_head, shared_head)]);
    }
    if constexpr (kChannels) {
      const T* decays = static_cast<const T*>(p.decays) + (index * c.key_heads + head) * c.d;
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int token = decay_at(i) / kMaxWidth, line = decay_at(i) % kMaxWidth;
        if (token < count && line < c.d) {
          read.decays[i] = decays[token * c.key_heads * c.d + line];
        }
      }
    }
    const T* gates = projected;
    if constexpr (kChannels) gates = static_cast<const T*>(p.gates) + index * c.key_heads * c.e;
    const int gates_row = kChannels ? c.key_heads * c.e : places.row;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int token = output_at(i) / kMaxWidth, own = output_at(i) % kMaxWidth;
      if (token < count && own < c.e) {
        read.gates[i] = gates[token * gates_row + places.gate.Of(key_head, first_value + own)];
      }
    }
    if constexpr (kMany) {
      present = 0;
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= count) break;
        present |= static_cast<unsigned>(p.positions[index + token] < kPaddingPosition) << token;
      }
    }
    return read;
  };
  // Computes the steps of `count` tokens from `first` on. If they are not real, it takes the place
  // of the wait: its results are not used, and its only token is zero. It brings the code of the
  // others into the instruction cache.
  const auto compute = [&](const int first, const int count, const bool real) {
    if (real && first == 0) {
      WaitForPrecedingKernel();
      StartNextKernel();
      if constexpr (!kEarly && kMany) convolution.kept = KeptSlot(p.kept, row, c.w);
      // All loads are issued before the first of them is used.
      if constexpr (!kEarly) load_unchanged();
    }
    Tokens tokens = {};
    if (real) tokens = load_tokens(first, count);
    if constexpr (kEarly || kMany) {
      if (real) __syncthreads();  // the tokens before have been read from shared memory
    }
    if (rates_token < count) {
      float decay = 1.0f, rate = 0.0f;
      if (present >> rates_token & 1) {
        rate = Sigmoid(tokens.rate);
        if constexpr (!kChannels) {
          decay = expf(-expf(p.A_log[head]) * Softplus(tokens.step + p.dt_bias[head]));
        }
      }
      shared.decays[rates_token] = decay;
      shared.rates[rates_token] = rate;
    }
    if constexpr (kChannels) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int token = decay_at(i) / kMaxWidth, line = decay_at(i) % kMaxWidth;
        if (token >= count || line >= c.d) continue;
        shared.channel_decays[token][line] =
            ChannelDecay(c, p, head, line, ToFloat(tokens.decays[i]));
      }
    }
    if constexpr (kMany) {
      // They stay out of the registers while the tokens go through the state.
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) shared.gates[0][output_at(i)] = ToFloat(tokens.gates[i]);
    }
    each_channel([&](int own, int i, const OwnChannel& channel) {
      float* const mixed = i < c.d       ? shared.queries[0] + i
                           : i < 2 * c.d ? shared.keys[0] + i - c.d
                                         : shared.values[0] + i - 2 * c.d;
      // Returns input `index` of those that token `first` needs.
      const auto input_at = [&](int index) {
        if constexpr (!kMany) return *convolution.Past(index, channel.convolved);
        const TokenInputs<T> inputs = InputsOf<T>(c, p, places, row, channel);
        return InputAt(convolution, channel.convolved, inputs, first + index);
      };
      if constexpr (kMany) {
        // No window stays in registers while tokens go through the state, which has most of them.
        if (first > 0) {
          windows[own] = LoadWindow(convolution, channel.convolved, FromFloat<T>(0.0f), input_at);
        }
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= count) break;
        if (token > 0) Shift(windows[own]);
        windows[own].inputs[0] = tokens.inputs[own][token];
        const auto earlier = [&](int tap) { return input_at(token + tap); };
        mixed[token * kMaxWidth] =
            Silu(Convolve(convolution, channel.convolved, windows[own], earlier));
      }
      if (!kMany && real && i >= 2 * c.d && present != 0) {
        Advance(convolution, channel.convolved, windows[own]);
      }
    });
    if (real && first + count == c.t) ArriveAtCluster();  // this block has read the past inputs
    __syncthreads();

    struct Lengths {
      float query_scale, key_scale, pair;
    };
    // Computes the lengths of a query and a key, with one warp.
    const auto find_lengths = [&](int token) -> Lengths {
      float query_square = 0.0f, key_square = 0.0f, both = 0.0f;
#pragma unroll
      for (int line = thread % 32; line < kMaxWidth; line += 32) {
        const float query = line < c.d ? shared.queries[token][line] : 0.0f;
        const float key = line < c.d ? shared.keys[token][line] : 0.0f;
        query_square += query * query;
        key_square += key * key;
        both += query * key;
      }
      const float query_scale = ReciprocalRoot(SumOfWarp(query_square) + kTiny) * c.scale;
      const float key_scale = ReciprocalRoot(SumOfWarp(key_square) + kTiny);
      return {query_scale, key_scale, SumOfWarp(both) * query_scale * key_scale};
    };
    Lengths lengths = {};
    if constexpr (kMany) {
      const int token = thread / 32;
      if (token < count) {
        lengths = find_lengths(token);
        if (thread % 32 == 0) {
          shared.query_scales[token] = lengths.query_scale;
          shared.key_scales[token] = lengths.key_scale;
          shared.pairs[token] = lengths.pair;
        }
      }
      __syncthreads();
    } else {
      lengths = find_lengths(0);  // each warp computes them itself, which takes no barrier
    }
    const auto lengths_of = [&](int token) -> Lengths {
      if constexpr (!kMany) return lengths;
      return {shared.query_scales[token], shared.key_scales[token], shared.pairs[token]};
    };

    float y[kOutputs] = {};
    // Computes y of all tokens, and the sums of its squares.
    const auto find_y = [&] {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int token = output_at(i) / kMaxWidth, own = output_at(i) % kMaxWidth;
        if (token >= count) break;
        if (own < c.e) {
          y[i] = fmaf(lengths_of(token).pair, shared.corrections[token][own],
                      shared.decays[token] * shared.query_sums[token][own]);
        }
        const float square = SumOfWarp(y[i] * y[i]);
        if (thread % 32 == 0) shared.squares[token][own / 32] = square;
      }
    };
#pragma unroll 1
    for (int token = 0; token < count; ++token) {
      const Lengths of = lengths_of(token);
      const float decay = shared.decays[token];
      Four keys = {}, queries = {};
      each_quad([&](int first_row, int line) {
        const Four own_keys = ReadFour(shared.keys[token] + line);
        const Four own_queries = ReadFour(shared.queries[token] + line);
        Four decays = {};
        if constexpr (kChannels) decays = ReadFour(shared.channel_decays[token] + line);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!has_row(first_row + i)) continue;
          float key = own_keys.of[i] * of.key_scale, query = own_queries.of[i] * of.query_scale;
          if constexpr (kChannels) {
            key *= decays.of[i];
            query *= decays.of[i];
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            keys.of[j] += key * values[first_row + i].of[j];
            queries.of[j] += query * values[first_row + i].of[j];
          }
        }
      });
      // The place of a thread is group * e + column, because the threads of a group follow each
      // other.
      StoreFour(shared.read_keys + thread * 4, keys);
      StoreFour(shared.read_queries + thread * 4, queries);
      __syncthreads();
      // Half of the threads has the products with the key, the other one those with the query.
      const int own = thread % kMaxWidth;
      if (own < c.e) {
        const float* read = thread < kMaxWidth ? shared.read_keys : shared.read_queries;
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < used_groups; ++i) sum += read[i * c.e + own];
        if (thread < kMaxWidth) {
          shared.corrections[token][own] =
              shared.rates[token] * fmaf(-decay, sum, shared.values[token][own]);
        } else {
          shared.query_sums[token][own] = sum;
        }
      }
      __syncthreads();
      if (token == count - 1) find_y();
      if (real && (present != 0 || kMany)) {
        const auto correction = ReadFour(shared.corrections[token] + column);
        float* const state = state_in(first + token);
        const bool changes = !kMany || (present >> token & 1) != 0;
        each_quad([&](int first_row, int line) {
          const Four own_keys = ReadFour(shared.keys[token] + line);
          Four decays = {};
          if constexpr (kChannels) decays = ReadFour(shared.channel_decays[token] + line);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (!has_row(first_row + i)) continue;
            Four& own_values = values[first_row + i];
            const float key = own_keys.of[i] * of.key_scale;
            const float left = kChannels ? decays.of[i] : decay;
            Four after;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              after.of[j] = fmaf(key, correction.of[j], left * own_values.of[j]);
            }
            if (changes) own_values = after;
            StoreFour(state + (first_row + i) * c.e, own_values);
          }
        });
      }
    }
    if (!real) return;  // from this lambda
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int token = output_at(i) / kMaxWidth, own = output_at(i) % kMaxWidth;
      if (token >= count || own >= c.e) continue;
      float sum = 0.0f;
#pragma unroll
      for (const float square : shared.squares[token]) sum += square;
      const float norm = kMany ? shared.norm[own] : weight;
      const float normal = norm * (y[i] * ReciprocalRoot(sum / static_cast<float>(c.e) + c.eps));
      const float gate = kMany ? shared.gates[token][own] : ToFloat(tokens.gates[i]);
      static_cast<T*>(p.y)[place_in(c.t, first + token) * c.e + own] =
          FromFloat<T>(normal * (kChannels ? Sigmoid(gate) : Silu(gate)));
    }
  };
  if constexpr (kEarly || kMany) {
#pragma unroll 1
    for (int first = kEarly ? -kTokens : 0; first < c.t; first += kTokens) {
      const bool real = first >= 0;
      compute(max(first, 0), kMany && real ? min(kTokens, c.t - first) : 1, real);
    }
  } else {
    compute(0, 1, /*real=*/true);
  }
  WaitForCluster();
  const bool writes = writes_keys && shared_head == 0;
  if constexpr (kMany) {
    const int count = CountPresent(p.positions, row, c.t);
#pragma unroll 1
    for (int i = (writes ? 0 : 2 * c.d) + thread; i < 2 * c.d + c.e; i += kThreads) {
      const OwnChannel channel = channel_at(i);
      const TokenInputs<T> inputs = InputsOf<T>(c, p, places, row, channel);
      WriteSlots(convolution, channel.convolved, inputs, c.t, count);
    }
  } else if (writes && present != 0 && thread < 2 * c.d) {
    const OwnChannel channel = channel_at(thread);
    Advance(convolution, channel.convolved, windows[0]);
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
  using Shared = StepShared<kMany ? kMaxTokens : 1, kChannels>;
  const Places places = FindPlaces(c, buffers.rates != nullptr);
  DeltaStepBuffers p = buffers;
  if (p.rates == nullptr) {
    const int32_t last = kChannels ? c.key_heads : 2 * c.key_heads * c.shared;
    p.rates = static_cast<const T*>(p.projected) + places.row - last;
  }
  const dim3 grid(static_cast<unsigned>(c.b * c.key_heads * c.shared));
  const bool clusters = c.shared <= kMaxClusterBlocks && HasClusters(kKernel);
  const bool writes_keys = c.shared == 1 || clusters;
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchClusters(stream, grid, clusters ? c.shared : 1, kThreads,
                                            static_cast<int>(sizeof(Shared)), /*overlaps=*/true,
                                            kKernel, c, places, p, writes_keys));
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
