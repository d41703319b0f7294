// The layers whose products linear_sm90.cu computes. A tile has 64 x 64 weights, and kTileBytes
// in shared memory. StepTiles is the number of tiles of a step, and Stages that of stages in a
// ring. Prefetch brings a tile to the L2 cache, and Bring to shared memory. Load makes fragments of
// it. Extra is what a lane keeps besides its sums. LoadRow loads what the outputs of a lane need,
// and Store stores them.
#pragma once

#include "cuda/epilogues/direct_store.cuh"
#include "cuda/gemm/e4m3_pairs.cuh"
#include "cuda/gemm/linear_sm90.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/mma.cuh"

namespace nvfp4 {

constexpr int kTeamThreads = 128;
constexpr int kRowBytes = 2 * kTileK;              // 64 of k of a row, in 16 bits
constexpr int kChunks = kRowBytes / 16;            // of a row
constexpr int kCopyRows = kTeamThreads / kChunks;  // rows that a team copies at once

// Returns where chunk `chunk` of row `row` lies in a tile whose rows have kBytes. With 128 bytes,
// it is the 128-byte swizzle. With 64, eight rows of equal chunks are in all banks too.
template <int kBytes = kRowBytes>
__device__ __forceinline__ uint32_t SwizzledChunk(int row, int chunk) {
  return static_cast<uint32_t>(row * kBytes + (chunk ^ row * kBytes / 128 % (kBytes / 16)) * 16);
}

// What a lane keeps besides its sums: nothing, unless weights are FP8.
struct NoExtra {
  // Ends a step, whose MMAs are done.
  template <int kCount>
  __device__ __forceinline__ void EndStep(float (&)[kCount]) {}
  // Makes the sums those of all steps.
  template <int kCount>
  __device__ __forceinline__ void Finish(float (&)[kCount]) {}
};

// A layer with NVFP4 weights.
template <typename T>
struct PackedLayer {
  static constexpr int kWeightBits = 4;
  static constexpr bool kIsFp8 = false;
  static constexpr int kTileBytes = kTileCodeBytes + kTileScaleBytes;
  // Unpacking has time for two tiles only if the MMAs of a tile are short.
  static constexpr int StepTiles(int eights) { return eights <= 4 ? 2 : 1; }
  static constexpr int Stages(int teams, int eights) {
    return teams == 2 || eights == 1 || eights == 8 ? 4 : 3;
  }

  ExpertGemm p;
  TileConstants constants;

  using Row = LaneRows;
  template <int>
  using Extra = NoExtra;

  __device__ __forceinline__ int k() const { return p.k; }
  __device__ __forceinline__ const void* x() const { return p.left.values; }
  __device__ __forceinline__ bool weight_is_unchanged() const { return p.schedule_is_unchanged; }

  __device__ __forceinline__ int64_t TileAt(int tile, int k_tile) const {
    return static_cast<int64_t>(tile) * ((p.k + kTileK - 1) / kTileK) + k_tile;
  }
  __device__ __forceinline__ void Prefetch(int tile, int k_tile, int thread) const {
    const int64_t at = TileAt(tile, k_tile);
    constexpr int kCodeLines = kTileCodeBytes / 128, kScaleLines = kTileScaleBytes / 128;
    if (thread < kCodeLines) {
      PrefetchLine(p.weight.packed + at * kTileCodeBytes + thread * 128);
    } else if (thread < kCodeLines + kScaleLines) {
      PrefetchLine(p.weight.block_scale + at * kTileScaleBytes + (thread - kCodeLines) * 128);
    }
  }
  __device__ __forceinline__ void Bring(int tile, int k_tile, int thread, uint32_t target) const {
    const int64_t at = TileAt(tile, k_tile);
    Copy(target + thread * 16, p.weight.packed + at * kTileCodeBytes + thread * 16);
    if (thread < kTileScaleBytes / 16) {
      Copy(target + kTileCodeBytes + thread * 16,
           p.weight.block_scale + at * kTileScaleBytes + thread * 16);
    }
  }
  __device__ __forceinline__ void Load(const uint8_t* tile, int thread, uint32_t (&fragments)[4][4],
                                       NoExtra&) const {
    UnpackTile<T>(*reinterpret_cast<const uint4*>(tile + thread * 16),
                  *reinterpret_cast<const uint2*>(tile + kTileCodeBytes + thread / 4 * 8),
                  constants, fragments);
  }
  __device__ __forceinline__ Row LoadRow(int tile, int slab) const {
    return LoadLaneRows(p, 0, tile, slab);
  }
  __device__ __forceinline__ void Store(int tile, int slab, int rows, const Row& row, int eight,
                                        const float4& sums) const {
    const RowTile all = {0, 0, rows};
    const TileStore<T> store = MakeTileStore<T>(p, all, row, tile, slab);
    if (store.first >= p.columns) return;  // padding, for the whole warp
    StoreRows(store, 8 * eight, 8 * eight + store.g,
              store.template Finished<Finish::kPlain>(8 * eight, sums.x, sums.y, sums.z, sums.w));
  }
};

// The operands of layers whose weights are not NVFP4 but elements E, and the outputs of a lane.
template <typename T, typename E>
struct PlainOperands {
  static constexpr int kWeightRowBytes = kTileK * int{sizeof(E)};  // in a tile
  static constexpr int kWeightBytes = kTileM * kWeightRowBytes;
  static constexpr int kElements = 16 / int{sizeof(E)};  // of a chunk

  DenseFewBuffers buffers;
  int32_t columns, length;  // n and k
  bool rounds;              // whether y has the type of x instead of f32
  int32_t bias_size;        // bytes of an element of the bias: 0 without one, 2 or 4
  bool unchanged;

  struct Row {
    float bias[2];  // of the two weight rows of a lane
  };

  __device__ __forceinline__ int k() const { return length; }
  __device__ __forceinline__ const void* x() const { return buffers.x; }
  __device__ __forceinline__ bool weight_is_unchanged() const { return unchanged; }

  __device__ __forceinline__ const E* Weight(int row, int at) const {
    return static_cast<const E*>(buffers.weight) + static_cast<int64_t>(row) * length + at;
  }
  __device__ __forceinline__ void Prefetch(int tile, int k_tile, int thread) const {
    const int row = tile * kTileM + thread, at = k_tile * kTileK;
    if (thread < kTileM && row < columns) PrefetchLine(Weight(row, at));
  }
  // Weights past n and past k are zeros.
  __device__ __forceinline__ void Bring(int tile, int k_tile, int thread, uint32_t target) const {
    constexpr int kRowChunks = kWeightRowBytes / 16, kRows = kTeamThreads / kRowChunks;
    const int chunk = thread % kRowChunks, at = k_tile * kTileK + chunk * kElements;
#pragma unroll
    for (int i = 0; i < kTileM / kRows; ++i) {
      const int own = thread / kRowChunks + kRows * i, row = tile * kTileM + own;
      const bool exists = row < columns && at < length;
      CopyOrZero(target + SwizzledChunk<kWeightRowBytes>(own, chunk),
                 exists ? Weight(row, at) : Weight(0, 0), exists ? 16 : 0);
    }
  }
  // Returns weight row g of this lane, in the slab of its warp.
  static __device__ __forceinline__ int LowRow(int tile, int slab) {
    return tile * kTileM + slab * 16 + static_cast<int>(threadIdx.x % 32 / 4);
  }
  __device__ __forceinline__ Row LoadRow(int tile, int slab) const {
    const int low = LowRow(tile, slab);
    Row row = {{0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = min(low + 8 * i, columns - 1);
      if (bias_size == 4) row.bias[i] = static_cast<const float*>(buffers.bias)[at];
      if (bias_size == 2) row.bias[i] = ToFloat(static_cast<const T*>(buffers.bias)[at]);
    }
    return row;
  }
  __device__ __forceinline__ void Store(int tile, int slab, int rows, const Row& row, int eight,
                                        const float4& sums) const {
    const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, q = lane % 4;
    const int first = tile * kTileM + slab * 16;
    // Not fused with a product by scales, so that the bits are those of an addition to its result.
    const float low[2] = {__fadd_rn(sums.x, row.bias[0]), __fadd_rn(sums.y, row.bias[0])};
    const float high[2] = {__fadd_rn(sums.z, row.bias[1]), __fadd_rn(sums.w, row.bias[1])};
    if (rounds) {
      const uint32_t left = Transpose(MakePair<T>(low[0], low[1]));
      const uint32_t right = Transpose(MakePair<T>(high[0], high[1]));
      if (8 * eight + g >= rows) return;
      uint16_t* out = static_cast<uint16_t*>(buffers.y) + int64_t{8 * eight + g} * columns;
      StorePair(out, first + 2 * q, columns, left);
      StorePair(out, first + 8 + 2 * q, columns, right);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = 8 * eight + 2 * q + i;
      if (place >= rows) break;
      float* out = static_cast<float*>(buffers.y) + int64_t{place} * columns;
      if (first + g < columns) out[first + g] = low[i];
      if (first + 8 + g < columns) out[first + 8 + g] = high[i];
    }
  }
};

// A layer with weights of the type of x.
template <typename T>
struct DenseLayer : PlainOperands<T, uint16_t> {
  static constexpr int kWeightBits = 16;
  static constexpr bool kIsFp8 = false;
  static constexpr int kTileBytes = PlainOperands<T, uint16_t>::kWeightBytes;
  static constexpr int StepTiles(int) { return 1; }
  static constexpr int Stages(int teams, int eights) {
    const bool two = teams == 2;
    return eights == 1 ? (two ? 6 : 5) : eights == 2 ? (two ? 5 : 4) : eights == 4 ? 4 : 3;
  }
  template <int>
  using Extra = NoExtra;

  __device__ __forceinline__ void Load(const uint8_t* tile, int thread, uint32_t (&fragments)[4][4],
                                       NoExtra&) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      LoadMatrices(tile + SwizzledChunk(row, 2 * j + lane / 16), fragments[j]);
    }
  }
};

// What a lane keeps of FP8 weights: which of its two weight rows have a NaN, and the sums over all
// groups of k, if each has a scale.
template <bool kGroups, int kCount>
struct Fp8Extra {
  static constexpr int kTotals = kGroups ? kCount : 1;
  uint32_t changed[2] = {};
  float scale[2] = {}, totals[kTotals] = {};

  __device__ __forceinline__ void EndStep(float (&sums)[kCount]) {
    if constexpr (kGroups) {
      FenceSums(sums);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        totals[i] += scale[i / 2 % 2] * sums[i];
        sums[i] = 0.0f;
      }
      scale[0] = scale[1] = 0.0f;  // of a step that is not there
    }
  }
  __device__ __forceinline__ void Finish(float (&sums)[kCount]) {
    NanPair nan;
    nan.upper = FindInQuad(changed[0]);
    nan.lower = FindInQuad(changed[1]);
    FenceSums(sums);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float* from = kGroups ? totals : sums;
      const float4 all = nan.Spread(make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]));
      sums[i] = all.x, sums[i + 1] = all.y, sums[i + 2] = all.z, sums[i + 3] = all.w;
    }
  }

 private:
  static __device__ __forceinline__ bool FindInQuad(uint32_t bits) {
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
    return (bits & kNanBits) != 0;
  }
};

// A layer with FP8 weights. Each weight row has a scale, or with kGroups one for each 128 of k. A
// tile has 64 rows of 64 bytes, whose chunks of 16 bytes are in such an order that a warp reads
// from all banks; then the scales of its rows.
template <typename T, bool kGroups>
struct Fp8Layer : PlainOperands<T, uint8_t> {
  using Base = PlainOperands<T, uint8_t>;

  static constexpr int kWeightBits = 8;
  static constexpr bool kIsFp8 = true;
  static constexpr int kTileBytes =
      Base::kWeightBytes + (kGroups ? kTileM * int{sizeof(float)} : 0);
  static_assert(kDenseGroup == 2 * kTileK, "a step of two tiles is a group");
  // With 64 rows, registers are too few for the fragments of two tiles.
  static constexpr int StepTiles(int eights) { return eights <= 4 ? 2 : 1; }
  static constexpr int Stages(int, int eights) { return eights == 1 ? 5 : eights == 4 ? 3 : 4; }
  template <int kCount>
  using Extra = Fp8Extra<kGroups, kCount>;

  int32_t row_scales;  // 0, 1 or those of all rows of x
  int32_t groups;      // scales of a weight row

  struct Row : Base::Row {
    float scale[2];  // of the two weight rows of a lane
  };

  __device__ __forceinline__ void Bring(int tile, int k_tile, int thread, uint32_t target) const {
    Base::Bring(tile, k_tile, thread, target);
    if constexpr (kGroups) {
      const int row = tile * kTileM + thread, group = k_tile * kTileK / kDenseGroup;
      if (thread >= kTileM) return;
      const bool exists = row < this->columns;
      Copy4OrZero(
          target + Base::kWeightBytes + thread * 4,
          this->buffers.weight_scale + (exists ? static_cast<int64_t>(row) * groups + group : 0),
          exists ? 4 : 0);
    }
  }
  // Starts the copies of the scales of x, or writes ones. The first kMostDenseRows threads of a
  // block do so.
  __device__ __forceinline__ void BringRowScales(int rows, int thread, float* target) const {
    if (thread >= kMostDenseRows) return;
    if (row_scales == 0) {
      target[thread] = 1.0f;
    } else {
      const int row = row_scales == 1 || thread >= rows ? 0 : thread;
      Copy4OrZero(SharedAddress(target + thread), this->buffers.row_scale + row, 4);
    }
  }
  // A lane reads the two bytes that are its part of a fragment. Wider loads would read numbers of
  // other lanes, because tensor cores read x in its order.
  template <typename Lane>
  __device__ __forceinline__ void Load(const uint8_t* tile, int thread, uint32_t (&fragments)[4][4],
                                       Lane& extra) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint8_t* chunk = tile + SwizzledChunk<Base::kWeightRowBytes>(row, j) + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int lower = i % 2, half = i / 2;
        const uint32_t pair = *reinterpret_cast<const uint16_t*>(
            chunk + lower * 8 * Base::kWeightRowBytes + half * 8);
        NoteNan(pair, extra.changed[lower]);
        fragments[j][i] = DecodeBytes<T>(WidenBytes<0>(pair));
      }
    }
    if constexpr (kGroups) {
      const auto* scales = reinterpret_cast<const float*>(tile + Base::kWeightBytes) + row;
      extra.scale[0] = scales[0], extra.scale[1] = scales[8];
    }
  }
  __device__ __forceinline__ Row LoadRow(int tile, int slab) const {
    Row row = {Base::LoadRow(tile, slab), {1.0f, 1.0f}};
    if constexpr (!kGroups) {
      const int low = Base::LowRow(tile, slab);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row.scale[i] = this->buffers.weight_scale[min(low + 8 * i, this->columns - 1)];
      }
    }
    return row;
  }
  // Multiplies sums by the scales of their rows, and then by those of their columns.
  __device__ __forceinline__ void Scale(const float* scales, int eight, const Row& row,
                                        float4& sums) const {
    const int place = 8 * eight + static_cast<int>(threadIdx.x % 4) * 2;
    const float2 rows = *reinterpret_cast<const float2*>(scales + place);
    sums.x *= rows.x, sums.y *= rows.y, sums.z *= rows.x, sums.w *= rows.y;
    if constexpr (!kGroups) {
      sums.x *= row.scale[0], sums.y *= row.scale[0], sums.z *= row.scale[1];
      sums.w *= row.scale[1];
    }
  }
};

}  // namespace nvfp4
