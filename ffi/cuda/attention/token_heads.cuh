// Prepares the heads of one new token inside of the kernel of attention: norms, rotation, and the
// write into the cache. heads/prepare_heads.cu does the same for any number of tokens.
//
// A block has the query heads of one key head, which are all its rows, and their key and value. Its
// warps take one head after the other from shared memory. Every block that computes attention for
// a key head prepares its queries. The block that visits the place of the new key writes key and
// value into the cache, and puts them into its tile.
//
// While the preceding kernel still runs, the block computes sines and requests its first tiles of
// the cache.
#pragma once

#include "cuda/attention/tiles.cuh"
#include "cuda/heads/head_items.cuh"
#include "cuda/launch.h"

namespace nvfp4 {

// Stands for the type of the weights of norms where heads exist, and for the TokenHeads.
struct NoHeads {
  struct Fresh {};
};

// Heads of type T, with norms whose weights are W, for blocks of form F.
template <typename T, typename W, typename F>
class TokenHeads {
 public:
  static constexpr int kMaxHeads = 16 + 2;  // of a block: its queries, then the key and the value
  // Shared memory: the heads as the preceding kernel wrote them, and the new key and value.
  static constexpr int kRawBytes = kMaxHeads * F::kWidth * 2;
  struct alignas(16) Fresh {
    T key[F::kWidth], value[F::kWidth];
    int place;  // among the keys that the block visits; -1 if it does not visit the new one
  };

  // Reads the weights and frequencies. `head` is the key head of row `row` of the batch.
  __device__ __forceinline__ TokenHeads(const InputHeads& heads, int row, int head, int group)
      : call_(heads.call),
        buffers_(heads.buffers),
        items_(heads.call, Lane()),
        row_(row),
        head_(head),
        group_(group),
        position_(heads.buffers.positions[row]) {
    const auto* q_weight = static_cast<const W*>(buffers_.q_weight);
    const auto* k_weight = static_cast<const W*>(buffers_.k_weight);
    queries_.Load(q_weight, buffers_.frequencies, items_, Lane());
    keys_.Load(k_weight, buffers_.frequencies, items_, Lane());
    turns_.Compute(queries_.frequencies, items_, position_, call_.rotation_scale);
  }

  // Writes zeros where heads are narrower than F::kWidth, and to rows that do not exist.
  __device__ __forceinline__ static void Clear(uint8_t* queries, Fresh* fresh) {
    const auto clear = [](void* memory, int bytes) {
      for (int at = 16 * static_cast<int>(threadIdx.x); at < bytes; at += 16 * F::kThreads) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(memory) + at) = make_uint4(0, 0, 0, 0);
      }
    };
    clear(queries, F::kQueryBytes);
    clear(fresh->key, sizeof(fresh->key));
    clear(fresh->value, sizeof(fresh->value));
  }

  // Copies the heads of the block to `raw`.
  __device__ __forceinline__ void Bring(uint8_t* raw) const {
    constexpr int kUnits = F::kWidth / kUnit;  // of a head; a unit has 16 bytes
    constexpr int kSteps = (kMaxHeads * kUnits + F::kThreads - 1) / F::kThreads;
    const int query_step = call_.gated ? 2 : 1, queries = query_step * call_.n;
    const auto* qkv = static_cast<const T*>(buffers_.qkv) +
                      static_cast<int64_t>(row_) * (queries + 2 * call_.m) * call_.d;
    uint4 units[kSteps];
    const auto each = [&](const auto& function) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int index = static_cast<int>(threadIdx.x) + step * F::kThreads;
        const int own = index / kUnits, channel = index % kUnits * kUnit;
        if (own < group_ + 2 && channel < call_.d) function(step, own, channel);
      }
    };
    each([&](int step, int own, int channel) {
      const int behind = own - group_;  // the queries of the group
      const int head =
          behind < 0 ? query_step * (head_ * group_ + own) : queries + behind * call_.m + head_;
      units[step] = *reinterpret_cast<const uint4*>(qkv + head * call_.d + channel);
    });
    each([&](int step, int own, int channel) {
      *reinterpret_cast<uint4*>(raw + (own * F::kWidth + channel) * 2) = units[step];
    });
  }

  // Prepares `count` heads from `raw`: queries into `queries`, key and value into `fresh`. If
  // `writes`, it also writes these into the cache. A warp prepares two heads at a time.
  __device__ __forceinline__ void Prepare(int count, const uint8_t* raw, bool writes,
                                          uint8_t* queries, Fresh* fresh) const {
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x) / 32; first < count; first += 2 * kWarps) {
      const int own[2] = {first, first + kWarps};
      Head<T, kItems> heads[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = min(own[j], count - 1);  // the second one need not exist
        heads[j].Load(reinterpret_cast<const T*>(raw) + at * F::kWidth, items_);
      }
      const bool normalizes = buffers_.q_weight != nullptr;
      if (normalizes && !call_.rotates_first) Normalize(own, heads);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (own[j] <= group_) heads[j].Rotate(turns_, items_);
      }
      if (normalizes && call_.rotates_first) Normalize(own, heads);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (own[j] < group_) {
          StoreQuery(heads[j], own[j], queries);
        } else if (own[j] < count) {
          StoreNew(heads[j], own[j] == group_, writes, fresh);
        }
      }
    }
  }

  // Puts the new key and value into row `row` of a tile.
  __device__ __forceinline__ static void PutInto(int row, const Fresh& fresh, uint8_t* keys,
                                                 uint8_t* values) {
    constexpr int kUnits = F::kWidth / kUnit;
    for (int index = static_cast<int>(threadIdx.x); index < 2 * kUnits; index += F::kThreads) {
      const int unit = index % kUnits;
      const T* source = (index < kUnits ? fresh.key : fresh.value) + unit * kUnit;
      uint8_t* target = (index < kUnits ? keys : values) + UnitOffset<F::kWidth>(row, unit);
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    }
  }

  __device__ __forceinline__ int position() const { return position_; }

 private:
  static constexpr int kItems = (F::kWidth + 127) / 128, kWarps = F::kThreads / 32;
  static_assert(F::kWidth == F::kValueWidth, "the cache has keys and values of one width");

  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Normalizes two heads, except for values. Their sums are added together, step by step.
  __device__ __forceinline__ void Normalize(const int (&own)[2],
                                            Head<T, kItems> (&heads)[2]) const {
    float squares[2] = {heads[0].Squares(), heads[1].Squares()};
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {  // in the order of WarpSum
#pragma unroll
      for (int j = 0; j < 2; ++j) squares[j] += __shfl_xor_sync(kAllLanes, squares[j], step);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (own[j] > group_) continue;
      const float inverse_root = InverseRoot(squares[j], call_.d, call_.eps);
      Factors<W, kItems> factors = queries_;
      if (own[j] == group_) factors = keys_;
      heads[j].Scale(factors, inverse_root, items_);
    }
  }

  // Stores the new key or value.
  __device__ __forceinline__ void StoreNew(const Head<T, kItems>& head, bool is_key, bool writes,
                                           Fresh* fresh) const {
    head.Store(is_key ? fresh->key : fresh->value, items_);
    if (!writes) return;
    const int64_t place = (static_cast<int64_t>(row_) * call_.m + head_) * call_.s + position_;
    head.Store(static_cast<T*>(is_key ? buffers_.keys : buffers_.values) + place * call_.d, items_);
  }

  __device__ __forceinline__ void StoreQuery(const Head<T, kItems>& head, int row,
                                             uint8_t* queries) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!items_.exist[i]) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int channel = j == 0 ? items_.first[i] : items_.second[i];
        uint8_t* unit = queries + UnitOffset<F::kWidth>(row, channel / kUnit);
        *reinterpret_cast<Word<T>*>(unit + channel % kUnit * 2) = head.words[i][j];
      }
    }
  }

  const HeadsCall& call_;
  const HeadsBuffers& buffers_;
  LaneItems<kItems> items_;
  Factors<W, kItems> queries_, keys_;
  Turns<kItems> turns_;
  int row_, head_, group_, position_;
};

}  // namespace nvfp4
