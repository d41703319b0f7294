// Computes causal attention to keys whose first channels are the values, as latent attention does,
// on mma.sync, for every device since 8.0, in bf16 and f16.
//
//   q [b, t, n, d], k [b, m, s, d], positions [b, t] -> y [b, t, n, dv]
//
// All query heads of DeepSeek-V3 share one latent key of 576 channels, of which 512 are the value.
// A copy of a key in shared memory serves both products, and all rows of a tile (attention.cuh).
// Such a key is too wide for a warp: the warps of a block share the rows, and differ in what they
// compute for them.
//
// A step waits for a tile of 32 keys, starts the copies of a later one, and computes:
//
//   scores   a warp has some rows, keys and channels; its sums go to shared memory.
//   weights  the threads of a row add these sums, mask them, and write exp2(score - maximum).
//   output   a warp has all rows and keys, and its own channels of the values in registers.
//
// If the tiles of rows do not fill a device, blocks divide the keys (LatentSplits), and
// merge_parts.cu joins their results. The cost therefore depends on the filled part of a cache.
//
// The rows of a tile depend on how many there are, and on the shared memory of a block. More rows
// share a key, but take the memory of a second stage or of a second block.
//
//   rows  warps  stages  shared memory  devices
//     16      4       2  95 KiB         all; two blocks on a multiprocessor of 9.0 and 10.x
//     32      8       2  126 KiB        8.0, 8.7, 9.0, 10.x
//     64      8       3  216 KiB        10.x; 9.0 takes latent_attention_sm90.cu
//
// Bottleneck: memory bandwidth up to 32 rows; shared memory and tensor cores with 64.
//
// Needs: widths that are multiples of 8, of up to 576 channels of a key and 512 of a value. Test:
// tests/emulation/test_emulation_latent_attention.py.
#include "cuda/attention/latent_attention.cuh"
#include "cuda/attention/merge_parts.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"

namespace nvfp4 {
namespace {

constexpr int kWidth = kMaxLatentWidth;  // of a row in shared memory; keys are padded with zeros
constexpr int kValueWidth = kMaxLatentValueWidth;
constexpr int kKeys = 32;      // of a tile
constexpr int kPartSteps = 4;  // steps of 16 channels in 128 bytes of a row

// The sizes of a block. For the scores, its warps divide the rows, the keys, and the steps of 16
// channels; for the output, the channels alone.
template <int kRowCount, int kRowWarpCount, int kKeyWarpCount, int kStepWarpCount, int kStageCount>
struct LatentForm {
  static constexpr int kRows = kRowCount, kStages = kStageCount;
  static constexpr int kRowWarps = kRowWarpCount, kKeyWarps = kKeyWarpCount;
  static constexpr int kStepWarps = kStepWarpCount;
  static constexpr int kWarps = kRowWarps * kKeyWarps * kStepWarps, kThreads = 32 * kWarps;
  static constexpr int kGroups = kRows / 16;              // groups of 16 rows
  static constexpr int kOwnGroups = kGroups / kRowWarps;  // those that a warp scores
  static constexpr int kOwnKeys = kKeys / kKeyWarps;
  static constexpr int kOwnChannels = kValueWidth / kWarps;  // of the output of a warp
  static constexpr int kRowThreads = kThreads / kRows;       // that compute the weights of a row
  static constexpr int kVectors = kKeys / kRowThreads / 4;   // of four scores in a thread
  static constexpr int kQueryBytes = kRows * kWidth * 2, kStageBytes = kKeys * kWidth * 2;
  static constexpr int kScoreBytes = kStepWarps * kRows * kKeys * 4;
  static constexpr int kWeightBytes = kRows * kKeys * 2;
  static constexpr int kBytes = kQueryBytes + kStages * kStageBytes + kScoreBytes + kWeightBytes;
  static_assert(kPartSteps % kStepWarps == 0, "each warp has a step of each 64 channels");
  static_assert(kOwnChannels % 64 == 0, "the swizzle of a warp's channels begins at 0");
  static_assert(kOwnKeys % 16 == 0 && kVectors >= 1, "a fragment has 16 keys, a vector has four");
};
using Rows16 = LatentForm<16, 1, 2, 2, 2>;
using Rows32 = LatentForm<32, 1, 2, 4, 2>;
using Rows64 = LatentForm<64, 2, 1, 4, 3>;
constexpr int kStaticBytes = 2 << 10;  // at least what a block has besides kBytes

// The place of a score in memory: columns of four are swizzled, so that a fragment is written, and
// a row is read, without bank conflicts.
__device__ __forceinline__ int ScoreIndex(int row, int key) {
  return row * kKeys + (key ^ ((row & 1) * 16 + (row & 2) * 4));
}
// The same for weights, in bytes: 16-byte units are swizzled for ldmatrix.
__device__ __forceinline__ int WeightOffset(int row, int unit) {
  return row * kKeys * 2 + (unit ^ (row >> 1 & 3)) * 16;
}

// Writes this warp's part of queries @ keys.T. `parts` counts the 64 channels of a row.
template <typename T, typename F>
__device__ __forceinline__ void Score(const uint8_t* queries, const uint8_t* keys, int parts,
                                      float* scores) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int step_warp = warp % F::kStepWarps, key_warp = warp / F::kStepWarps % F::kKeyWarps;
  const int first_row = warp / (F::kStepWarps * F::kKeyWarps) * F::kOwnGroups * 16;
  const int first_key = key_warp * F::kOwnKeys;
  queries += first_row * kWidth * 2;
  keys += first_key * kWidth * 2;
  const uint32_t row = StepOffset(UnitOffset<kWidth>(lane % 16, lane / 16), step_warp);
  const uint32_t key =
      StepOffset(UnitOffset<kWidth>(lane % 8 + lane / 16 * 8, lane / 8 % 2), step_warp);
  float sums[F::kOwnGroups][F::kOwnKeys / 8][4] = {};
  // The addresses of several parts would take registers from the output of 64 rows.
  constexpr int kUnrolled = F::kGroups <= 2 ? 3 : 1;
#pragma unroll kUnrolled
  for (int part = 0; part < parts; ++part) {
#pragma unroll
    for (int step = 0; step < kPartSteps; step += F::kStepWarps) {
      uint32_t q[F::kOwnGroups][4];
#pragma unroll
      for (int group = 0; group < F::kOwnGroups; ++group) {
        LoadMatrices(queries + group * 16 * kWidth * 2 + StepOffset(row, step) + part * 128,
                     q[group]);
      }
#pragma unroll
      for (int pair = 0; pair < F::kOwnKeys / 16; ++pair) {
        uint32_t k[4];
        LoadMatrices(keys + pair * 16 * kWidth * 2 + StepOffset(key, step) + part * 128, k);
#pragma unroll
        for (int group = 0; group < F::kOwnGroups; ++group) {
          MultiplyAdd<T>(sums[group][2 * pair], q[group], k[0], k[1]);
          MultiplyAdd<T>(sums[group][2 * pair + 1], q[group], k[2], k[3]);
        }
      }
    }
  }
  scores += step_warp * F::kRows * kKeys;
#pragma unroll
  for (int group = 0; group < F::kOwnGroups; ++group) {
#pragma unroll
    for (int tile = 0; tile < F::kOwnKeys / 8; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = ScoreIndex(first_row + 16 * group + lane / 4 + 8 * half,
                                  first_key + 8 * tile + lane % 4 * 2);
        *reinterpret_cast<float2*>(scores + at) =
            make_float2(sums[group][tile][2 * half], sums[group][tile][2 * half + 1]);
      }
    }
  }
}

// The softmax of one row, of which each of kRowThreads threads has some keys of a tile.
template <typename T, typename F>
struct RowSoftmax {
  float largest = -INFINITY;  // score without the factor
  float sum = 0.0f;           // of this thread's exponentials

  __device__ __forceinline__ static int Row() {
    return static_cast<int>(threadIdx.x) / F::kRowThreads;
  }
  __device__ __forceinline__ static int Member() {
    return static_cast<int>(threadIdx.x) % F::kRowThreads;
  }

  // Writes the weights of a tile of keys from `first_key` on, and by how much the output of the row
  // shrinks.
  __device__ __forceinline__ void Weigh(const float* scores, int first_key, float factor,
                                        uint8_t* weights, RowFacts<F::kRows>* facts) {
    const int row = Row();
    const KeyRange range = facts->range[row];
    float own[F::kVectors][4];
    float most = largest;
#pragma unroll
    for (int vector = 0; vector < F::kVectors; ++vector) {
      const int key = (Member() + vector * F::kRowThreads) * 4;
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < F::kStepWarps; ++i) {
        const float4 part =
            *reinterpret_cast<const float4*>(scores + i * F::kRows * kKeys + ScoreIndex(row, key));
        total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
      }
      own[vector][0] = total.x;
      own[vector][1] = total.y;
      own[vector][2] = total.z;
      own[vector][3] = total.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first_key + key + i;
        if (at < range.begin || at >= range.end) own[vector][i] = -INFINITY;
        most = fmaxf(most, own[vector][i]);
      }
    }
#pragma unroll
    for (int step = F::kRowThreads / 2; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    }
    // Until a row sees its first key, its maximum is -inf, and -inf - -inf would be NaN.
    const float base = most == -INFINITY ? 0.0f : most * factor;
    const float shrink = FastExp2(fmaf(largest, factor, -base));
    largest = most;
    sum *= shrink;
#pragma unroll
    for (int vector = 0; vector < F::kVectors; ++vector) {
      const int key = (Member() + vector * F::kRowThreads) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[vector][i] = FastExp2(fmaf(own[vector][i], factor, -base));
        sum += own[vector][i];
      }
      *reinterpret_cast<uint2*>(weights + WeightOffset(row, key / kUnit) + key % kUnit * 2) =
          make_uint2(MakePair<T>(own[vector][0], own[vector][1]),
                     MakePair<T>(own[vector][2], own[vector][3]));
    }
    if (Member() == 0) facts->factor[row] = shrink;
  }

  // Returns the sum of the whole row.
  __device__ __forceinline__ float Total() const {
    float total = sum;
#pragma unroll
    for (int step = F::kRowThreads / 2; step > 0; step /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, step);
    }
    return total;
  }
};

// The output of all rows of a tile, for the channels of one warp from `first_channel` on. A thread
// has rows g and g + 8 of each group, with lane = 4 g + q.
template <typename T, typename F>
struct Output {
  static constexpr int kTiles = F::kOwnChannels / 8;
  float values[F::kGroups][kTiles][4] = {};

  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int FirstChannel() {
    return static_cast<int>(threadIdx.x) / 32 * F::kOwnChannels;
  }

  // output = output * factor + weights @ keys
  __device__ __forceinline__ void Add(const uint8_t* weights, const uint8_t* keys,
                                      const float* factors) {
    const int lane = Lane();
#pragma unroll
    for (int group = 0; group < F::kGroups; ++group) {
      const float factor[2] = {factors[16 * group + lane / 4], factors[16 * group + lane / 4 + 8]};
      // The maximum of a row rarely grows after its first tiles.
      if (__ballot_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f) == 0) continue;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[group][tile][i] *= factor[i / 2];
      }
    }
    const uint32_t offset = UnitOffset<kWidth>(lane % 16, lane / 16);
    keys += FirstChannel() * 2;
#pragma unroll
    for (int pair = 0; pair < kKeys / 16; ++pair) {
      uint32_t p[F::kGroups][4];
#pragma unroll
      for (int group = 0; group < F::kGroups; ++group) {
        LoadMatrices(
            weights + group * 16 * kKeys * 2 + WeightOffset(lane % 16, 2 * pair + lane / 16),
            p[group]);
      }
#pragma unroll
      for (int step = 0; step < kTiles / 2; ++step) {
        uint32_t v[4];
        LoadTransposed(keys + pair * 16 * kWidth * 2 + StepOffset(offset, step), v);
#pragma unroll
        for (int group = 0; group < F::kGroups; ++group) {
          MultiplyAdd<T>(values[group][2 * step], p[group], v[0], v[1]);
          MultiplyAdd<T>(values[group][2 * step + 1], p[group], v[2], v[3]);
        }
      }
    }
  }

  // Calls store(place + channel, two values) for the channels below `width` of each row, where
  // place = find(row). A null place means that the row is not stored.
  template <typename Find, typename Store>
  __device__ __forceinline__ void ForEach(int width, Find find, Store store) const {
    const int lane = Lane();
#pragma unroll
    for (int group = 0; group < F::kGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto place = find(16 * group + lane / 4 + 8 * half);
        if (place == nullptr) continue;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int channel = FirstChannel() + 8 * tile + lane % 4 * 2;
          if (channel < width) {
            store(place + channel, values[group][tile][2 * half],
                  values[group][tile][2 * half + 1]);
          }
        }
      }
    }
  }
};

template <typename T, typename F>
__global__ void __launch_bounds__(F::kThreads, 1) LatentAttention(const LatentGrid p) {
  NVFP4_DYNAMIC_SHARED(shared);
  __shared__ RowFacts<F::kRows> facts;
  WaitForPrecedingKernel();
  StartNextKernel();
  const AttentionShape& shape = p.call.shape;
  // The blocks of the same keys follow each other and share them in the L2 cache. The last tile of
  // rows sees most keys and starts first.
  const int index = static_cast<int>(blockIdx.x), part = index / p.tiles;
  const int split = part % p.splits, head_index = part / p.splits;
  const int num_heads = static_cast<int>(shape.m);
  const LatentPlace at = {head_index / num_heads, head_index % num_heads,
                          (p.tiles - 1 - index % p.tiles) * F::kRows};
  FindKeys<F::kRows>(p, at, &facts);
  __syncthreads();
  const KeyRange seen = facts.any;
  const KeyTiles keys_of_part = FindTiles(p, split, seen, kKeys);
  const int first_key = keys_of_part.first, count = keys_of_part.count;
  const int rows_left = p.rows - at.first_row;
  const int64_t part_row =
      (static_cast<int64_t>(head_index) * p.splits + split) * p.rows + at.first_row;
  if (p.splits > 1 && count <= 0) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < F::kRows && row < rows_left) p.parts.sums[part_row + row] = {0.0f, 0.0f};
    return;
  }

  const uint32_t memory = SharedAddress(shared);
  uint8_t* const stages = shared + F::kQueryBytes;
  auto* const scores = reinterpret_cast<float*>(stages + F::kStages * F::kStageBytes);
  uint8_t* const weights = reinterpret_cast<uint8_t*>(scores) + F::kScoreBytes;
  const int width = static_cast<int>(shape.d), value_width = static_cast<int>(shape.dv);
  const auto* q = static_cast<const uint16_t*>(p.buffers.q);
  CopyRows<F::kRows, kWidth, F::kThreads>(memory, width, rows_left, [&](int row) {
    return q + RowIndex(p, at, at.first_row + row) * width;
  });
  const auto* all_k = static_cast<const uint16_t*>(p.buffers.k) + head_index * shape.s * width;
  const auto copy = [&](int tile) {
    if (tile < count) {
      const int key = first_key + tile * kKeys;
      CopyRows<kKeys, kWidth, F::kThreads>(
          memory + F::kQueryBytes + tile % F::kStages * F::kStageBytes, width, seen.end - key,
          Consecutive<F::kThreads>(all_k + static_cast<int64_t>(key) * width, width));
    }
    CommitCopies();
  };
#pragma unroll
  for (int stage = 0; stage < F::kStages - 1; ++stage) copy(stage);

  RowSoftmax<T, F> softmax;
  Output<T, F> output;
  const int parts = (width + 63) / 64;
  const bool has_channels = Output<T, F>::FirstChannel() < value_width;
#pragma unroll 1
  for (int tile = 0; tile < count; ++tile) {
    WaitCopies<F::kStages - 2>();
    __syncthreads();  // all warps have the tile, and have left the stage that is filled next
    copy(tile + F::kStages - 1);
    const uint8_t* keys = stages + tile % F::kStages * F::kStageBytes;
    Score<T, F>(shared, keys, parts, scores);
    __syncthreads();
    softmax.Weigh(scores, first_key + tile * kKeys, p.factor, weights, &facts);
    __syncthreads();
    if (has_channels) output.Add(weights, keys, facts.factor);
  }
  WaitCopies<0>();

  const int row = RowSoftmax<T, F>::Row();
  const float total = softmax.Total();
  if (p.splits > 1) {
    if (RowSoftmax<T, F>::Member() == 0 && row < rows_left) {
      p.parts.sums[part_row + row] = {softmax.largest * p.factor, total};
    }
    output.ForEach(
        value_width,
        [&](int row) -> float* {
          if (row >= rows_left) return nullptr;
          return p.parts.values + (part_row + row) * value_width;
        },
        [](float* place, float low, float high) {
          *reinterpret_cast<float2*>(place) = make_float2(low, high);
        });
    return;
  }
  __syncthreads();  // all warps have read the factors of the last tile
  if (RowSoftmax<T, F>::Member() == 0) {
    float all = total;
    if (p.buffers.sinks != nullptr && row < rows_left) {
      const float sink =
          __ldg(p.buffers.sinks + at.head * p.group + (at.first_row + row) % p.group);
      all += FastExp2(sink * kLog2E - softmax.largest * p.factor);
    }
    facts.factor[row] = all > 0.0f ? FastReciprocal(all) : 0.0f;
  }
  __syncthreads();
  float inverse = 0.0f;
  output.ForEach(
      value_width,
      [&](int row) -> T* {
        if (row >= rows_left) return nullptr;
        inverse = facts.factor[row];
        return static_cast<T*>(p.buffers.y) + RowIndex(p, at, at.first_row + row) * value_width;
      },
      [&](T* place, float low, float high) {
        *reinterpret_cast<uint32_t*>(place) = MakePair<T>(low * inverse, high * inverse);
      });
}

template <typename T, typename F>
cudaError_t LaunchForm(cudaStream_t stream, LatentGrid grid) {
  const AttentionShape& shape = grid.call.shape;
  grid.tiles = static_cast<int32_t>(CeilDiv(grid.rows, F::kRows));
  const int64_t blocks = shape.b * shape.m * grid.tiles * grid.splits;
  return LaunchWide(stream, dim3(static_cast<unsigned>(blocks)), F::kThreads, F::kBytes,
                    /*overlaps=*/true, LatentAttention<T, F>, grid);
}

template <typename T>
cudaError_t LaunchTyped(cudaStream_t stream, const LatentGrid& grid) {
  const int room = BlockSharedBytes() - kStaticBytes;
  if (grid.rows > 32 && room >= Rows64::kBytes) return LaunchForm<T, Rows64>(stream, grid);
  if (grid.rows > 16 && room >= Rows32::kBytes) return LaunchForm<T, Rows32>(stream, grid);
  return LaunchForm<T, Rows16>(stream, grid);
}

}  // namespace

static_assert(Rows16::kBytes + kStaticBytes == kSharedBytesLatentAttention, "limits.h");

cudaError_t LaunchLatentKernels(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers, bool is_hopper) {
  if (call.is_empty()) return cudaSuccess;
  LatentGrid grid = {};
  grid.call = call;
  grid.buffers = buffers;
  grid.factor = call.scale * kLog2E;
  grid.group = static_cast<int32_t>(call.shape.group());
  grid.rows = static_cast<int32_t>(call.shape.t * grid.group);
  grid.splits = static_cast<int32_t>(LatentSplits(call.shape));
  grid.num_keys = static_cast<int32_t>(call.shape.s);
  Sections sections(buffers.workspace);
  grid.parts = TakeParts(&sections, call.shape, grid.splits);
  if (is_hopper && grid.rows > 32) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchLatentSm90(stream, grid));
  } else if (call.type == DataType::kBF16) {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchTyped<__nv_bfloat16>(stream, grid));
  } else {
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchTyped<__half>(stream, grid));
  }
  if (grid.splits == 1) return cudaSuccess;
  return LaunchMergeParts(stream, call, buffers, grid.parts, grid.splits);
}

cudaError_t LaunchLatentAttention(cudaStream_t stream, const AttentionCall& call,
                                  const AttentionBuffers& buffers) {
  return LaunchLatentKernels(stream, call, buffers, ComputeCapabilityMajor() == 9);
}

}  // namespace nvfp4
