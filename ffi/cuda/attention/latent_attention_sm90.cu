// Computes latent attention on Hopper with wgmma, for tiles of more than 32 rows, in bf16 and f16.
// See latent_attention.cu for the operands.
//
// wgmma wants 64 rows. With the 128 heads of DeepSeek-V3, products on mma.sync would take longer
// than the keys take from memory, because each fragment comes from shared memory through registers.
//
//   step  wait for a tile of 64 keys; start the copies of the next one
//         scores = queries @ keys.T, weights in registers, output += weights @ keys
//
// Two warpgroups have the same 64 rows and half of the channels of the output each. Both compute
// all scores, so that they need not exchange weights. One computes its softmax while the other one
// multiplies.
//
// A tile of queries or keys consists of parts of 64 columns, and a part of rows of 128 bytes in the
// 128-byte swizzle. wgmma reads a part along its rows for the scores, and transposed for the
// output.
//
// Bottleneck: tensor cores. Needs: sm_90a. Tests:
// tests/emulation/test_emulation_latent_attention.py, tests/gpu/test_sass.py.
#include "cuda/attention/latent_attention.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/instructions/hopper.cuh"

namespace nvfp4 {
namespace {

constexpr int kGroups = 2;  // warpgroups
constexpr int kThreads = 128 * kGroups;
constexpr int kRows = 64, kKeys = 64, kStages = 2;
constexpr int kPartWidth = 64, kParts = kMaxLatentWidth / kPartWidth;
constexpr int kPartBytes = 2 * kPartWidth * kKeys;  // of queries too
constexpr int kTileBytes = kParts * kPartBytes;
constexpr int kBytes = (1 + kStages) * kTileBytes;
constexpr int kGroupParts = kMaxLatentValueWidth / kPartWidth / kGroups;
constexpr int kSumWidth = 128, kSums = kGroupParts * kPartWidth / kSumWidth;  // of one MMA
static_assert(kRows == kKeys, "the parts of queries and of keys are alike");

// Starts copies of 64 rows of `width` values, padded with zeros. Row r begins at find(r); rows from
// `count` on are zeros.
template <typename Find>
__device__ __forceinline__ void CopyParts(uint32_t target, int width, int count, Find find) {
  const int thread = static_cast<int>(threadIdx.x), unit = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kRows; row += kThreads / 8) {
    const uint16_t* source = find(row) + unit * kUnit;
    const uint32_t place = target + row * 2 * kPartWidth + (unit ^ row % 8) * 16;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool exists = row < count && unit * kUnit + part * kPartWidth < width;
      CopyOrZero(place + part * kPartBytes, source + part * kPartWidth, exists ? 16 : 0);
    }
  }
}

// The rows of a warpgroup. Lane 4 g + q of warp w has rows 16 w + g and 16 w + g + 8, which are its
// rows 0 and 1.
template <typename T>
struct Group {
  float largest[2] = {-INFINITY, -INFINITY};  // scores without the factor
  float totals[2] = {};                       // of this lane's exponentials
  float sums[kSums][kSumWidth / 2] = {};

  __device__ __forceinline__ static int Index() { return static_cast<int>(threadIdx.x) / 128; }
  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int Row(int half) {
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + Lane() / 4 + 8 * half;
  }

  // scores = queries @ keys.T
  __device__ __forceinline__ static void Score(uint32_t queries, uint32_t keys,
                                               float (&scores)[kKeys / 2]) {
    const uint32_t a = DescriptorAddress(queries), b = DescriptorAddress(keys);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < kParts * kPartWidth / 16; ++j) {
      const uint32_t offset = j / 4 * (kPartBytes / 16) + j % 4 * 2;
      WgmmaShared<T, kKeys>::Run(scores, TileDescriptor(a + offset), TileDescriptor(b + offset),
                                 j > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    FenceSums(scores);
  }

  // Turns scores of the keys from `first_key` on into weights, and rescales what was summed before.
  __device__ __forceinline__ void Weigh(const KeyRange (&seen)[2], int first_key, float factor,
                                        float (&scores)[kKeys / 2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half];
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * half + i % 2];
        const int key = first_key + i / 2 * 8 + Lane() % 4 * 2 + i % 2;
        if (key < seen[half].begin || key >= seen[half].end) score = -INFINITY;
        most = fmaxf(most, score);
      }
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      // Until a row sees its first key, its maximum is -inf, and -inf - -inf would be NaN.
      const float base = most == -INFINITY ? 0.0f : most * factor;
      const float shrink = FastExp2(fmaf(largest[half], factor, -base));
      largest[half] = most;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * half + i % 2];
        score = FastExp2(fmaf(score, factor, -base));
        total += score;
      }
      totals[half] = fmaf(totals[half], shrink, total);
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
#pragma unroll
        for (int j = 0; j < kSumWidth / 4; ++j) sums[i][j / 2 * 4 + 2 * half + j % 2] *= shrink;
      }
    }
  }

  // sums += weights @ keys, for the channels of this warpgroup.
  __device__ __forceinline__ void AddValues(uint32_t keys, const float (&scores)[kKeys / 2]) {
    uint32_t weights[kKeys / 16][4];
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[j][i] = MakePair<T>(scores[8 * j + 2 * i], scores[8 * j + 2 * i + 1]);
      }
    }
    const uint32_t b = TransposedAddress(keys + Index() * kGroupParts * kPartBytes, kPartBytes);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const uint32_t part = i * (kSumWidth / kPartWidth) * (kPartBytes / 16);
        Wgmma<T, kSumWidth>::RunTransposed(sums[i], weights[j], TileDescriptor(b + part + j * 128));
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) FenceSums(sums[i]);
  }

  // Adds the totals of the four lanes of a row.
  __device__ __forceinline__ void JoinLanes() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      totals[half] += __shfl_xor_sync(kAllLanes, totals[half], 1);
      totals[half] += __shfl_xor_sync(kAllLanes, totals[half], 2);
    }
  }

  // Calls store(place + channel, two values) for the channels below `width` of one row.
  template <typename Place, typename Store>
  __device__ __forceinline__ void ForEach(int half, int width, Place* place, Store store) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int tile = 0; tile < kSumWidth / 8; ++tile) {
        const int channel =
            Index() * kGroupParts * kPartWidth + i * kSumWidth + 8 * tile + Lane() % 4 * 2;
        const float (&own)[kSumWidth / 2] = sums[i];
        if (channel < width) {
          store(place + channel, own[4 * tile + 2 * half], own[4 * tile + 2 * half + 1]);
        }
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) LatentAttentionSm90(const LatentGrid p) {
  NVFP4_DYNAMIC_SHARED(shared);
  __shared__ RowFacts<kRows> facts;
  WaitForPrecedingKernel();
  StartNextKernel();
  const AttentionShape& shape = p.call.shape;
  const int index = static_cast<int>(blockIdx.x), part = index / p.tiles;
  const int split = part % p.splits, head_index = part / p.splits;
  const int num_heads = static_cast<int>(shape.m);
  const LatentPlace at = {head_index / num_heads, head_index % num_heads,
                          (p.tiles - 1 - index % p.tiles) * kRows};
  FindKeys<kRows>(p, at, &facts);
  __syncthreads();
  const KeyRange seen = facts.any;
  const KeyTiles tiles = FindTiles(p, split, seen, kKeys);
  const int rows_left = p.rows - at.first_row;
  const int64_t part_row =
      (static_cast<int64_t>(head_index) * p.splits + split) * p.rows + at.first_row;
  if (p.splits > 1 && tiles.count <= 0) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < kRows && row < rows_left) p.parts.sums[part_row + row] = {0.0f, 0.0f};
    return;
  }

  const uint32_t queries = SharedAddress(shared);
  const int width = static_cast<int>(shape.d), value_width = static_cast<int>(shape.dv);
  const auto* q = static_cast<const uint16_t*>(p.buffers.q);
  CopyParts(queries, width, rows_left,
            [&](int row) { return q + RowIndex(p, at, at.first_row + row) * width; });
  const auto* all_k = static_cast<const uint16_t*>(p.buffers.k) + head_index * shape.s * width;
  const auto stage_of = [&](int tile) {
    return queries + static_cast<uint32_t>((1 + tile % kStages) * kTileBytes);
  };
  const auto copy = [&](int tile) {
    if (tile < tiles.count) {
      const int key = tiles.first + tile * kKeys;
      CopyParts(stage_of(tile), width, seen.end - key,
                [&](int row) { return all_k + static_cast<int64_t>(key + row) * width; });
    }
    CommitCopies();
  };
  copy(0);

  Group<T> group;
  const KeyRange own[2] = {facts.range[Group<T>::Row(0)], facts.range[Group<T>::Row(1)]};
#pragma unroll 1
  for (int tile = 0; tile < tiles.count; ++tile) {
    WaitCopies<0>();
    FenceAsyncProxy();
    __syncthreads();  // both groups have the tile, and have left the stage that is filled next
    copy(tile + 1);
    float scores[kKeys / 2];
    Group<T>::Score(queries, stage_of(tile), scores);
    group.Weigh(own, tiles.first + tile * kKeys, p.factor, scores);
    group.AddValues(stage_of(tile), scores);
  }
  WaitCopies<0>();
  group.JoinLanes();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = Group<T>::Row(half);
    if (row >= rows_left) continue;
    if (p.splits > 1) {
      if (Group<T>::Index() == 0 && Group<T>::Lane() % 4 == 0) {
        p.parts.sums[part_row + row] = {group.largest[half] * p.factor, group.totals[half]};
      }
      group.ForEach(half, value_width, p.parts.values + (part_row + row) * value_width,
                    [](float* place, float low, float high) {
                      *reinterpret_cast<float2*>(place) = make_float2(low, high);
                    });
      continue;
    }
    float total = group.totals[half];
    if (p.buffers.sinks != nullptr) {
      const int head = at.head * p.group + (at.first_row + row) % p.group;
      total += FastExp2(__ldg(p.buffers.sinks + head) * kLog2E - group.largest[half] * p.factor);
    }
    const float inverse = total > 0.0f ? FastReciprocal(total) : 0.0f;
    T* y = static_cast<T*>(p.buffers.y) + RowIndex(p, at, at.first_row + row) * value_width;
    group.ForEach(half, value_width, y, [inverse](T* place, float low, float high) {
      *reinterpret_cast<uint32_t*>(place) = MakePair<T>(low * inverse, high * inverse);
    });
  }
}

template <typename T>
cudaError_t LaunchTyped(cudaStream_t stream, const LatentGrid& grid) {
  const AttentionShape& shape = grid.call.shape;
  const int64_t blocks = shape.b * shape.m * grid.tiles * grid.splits;
  return LaunchWide(stream, dim3(static_cast<unsigned>(blocks)), kThreads, kBytes,
                    /*overlaps=*/true, LatentAttentionSm90<T>, grid);
}

}  // namespace

cudaError_t LaunchLatentSm90(cudaStream_t stream, const LatentGrid& grid) {
  LatentGrid own = grid;
  own.tiles = static_cast<int32_t>(CeilDiv(grid.rows, kRows));
  return grid.call.type == DataType::kBF16 ? LaunchTyped<__nv_bfloat16>(stream, own)
                                           : LaunchTyped<__half>(stream, own);
}

}  // namespace nvfp4
