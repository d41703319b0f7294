// Stores the outputs of a warpgroup by way of shared memory, so that they reach global memory as
// long contiguous parts of each output row. A store directly from registers would have only 16
// bytes of a row. Such stores would take longer than the MMAs of a short k. Bulk copies would not
// have to wait, but lanes must start them one by one.
//
// In shared memory, a sorted row has the outputs of the kTiles weight tiles of the warpgroup. A
// tile has 128 bytes of a row, or 64 bytes in a gated layer. The row has 16 bytes more, which hold
// the output row. They also put the eight rows that stmatrix writes at once into different banks.
#pragma once

#include "cuda/epilogues/finish.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/quantizers/round_block.cuh"

namespace nvfp4 {

// Whether outputs can be stored by way of shared memory. They move in units of 16 bytes, and
// interleaved pairs would go to two places.
__device__ __forceinline__ bool CanStage(const ExpertGemm& p) {
  return p.columns % 8 == 0 && !(p.gated() && p.activation.interleaved);
}

template <int kRows, int kTiles>
struct StagedStore {
  static constexpr int kThreads = 128;
  static constexpr int kRowBytes = kTiles * 2 * kTileM + 16;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kRows <= kThreads, "a thread for each row");

  const ExpertGemm& p;
  const uint32_t buffer;  // in shared memory, kBytes bytes
  const int barrier;      // id of the barrier of the warpgroup
  const int thread;

  // Waits until all threads have sent the previous tile. Thread r gives the output row of sorted
  // row r.
  __device__ __forceinline__ void Begin(int32_t output_row) const {
    SyncGroup(barrier, kThreads);
    if (thread < kRows) StoreShared4(buffer + (thread + 1) * kRowBytes - 16, output_row);
  }

  // Puts the outputs of weight tile `t` of the warpgroup into shared memory, and uses up `sums`.
  template <typename T, int kSize>
  __device__ __forceinline__ void Put(const RowTile& tile, int m_tile, int t, const LaneRows& rows,
                                      float (&sums)[kSize]) const {
    const TileStore<T> store = MakeTileStore<T>(p, tile, rows, m_tile, thread / 32);
    const uint32_t width = p.gated() ? kTileM : 2 * kTileM;  // bytes of a row of this tile
    const uint32_t lane = thread % 32;
    const uint32_t place = buffer + lane % 8 * kRowBytes + t * width + thread / 32 * (width / 4) +
                           (p.gated() ? 0 : lane / 8 % 2 * 16);
    switch (ChooseFinish(p)) {
      case Finish::kPlain:
        return PutUnrolled<Finish::kPlain>(store, place, sums);
      case Finish::kSilu:
        return PutUnrolled<Finish::kSilu>(store, place, sums);
      case Finish::kRelu2:
        return PutUnrolled<Finish::kRelu2>(store, place, sums);
      case Finish::kAny:
        return FinishRolled(store, sums, [&](int row, const OutputPairs& pairs) {
          PutEight(place + row * kRowBytes, pairs, p.gated());
        });
    }
  }

  // Stores all outputs. `first` is the first weight row, or pair, of the warpgroup.
  template <typename T>
  __device__ __forceinline__ void Send(const RowTile& tile, int first) const {
    SyncGroup(barrier, kThreads);
    if (p.output.input_scale != nullptr) return SendRounded<T>(tile, first);
    if (p.gated()) {
      SendRows<kTiles * kTileM / 2>(tile, first);
    } else {
      SendRows<kTiles * kTileM>(tile, first);
    }
  }

 private:
  // Stores rows of kColumns outputs; each thread stores 16 bytes at a time.
  template <int kColumns>
  __device__ __forceinline__ void SendRows(const RowTile& tile, int first) const {
    constexpr int kChunks = kColumns / 8, kRowsAtOnce = kThreads / kChunks;
    const int chunk = thread % kChunks, column = first + 8 * chunk;
    if (column >= p.columns) return;
    constexpr int kTurns = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
    constexpr int kBatch = kTurns < 8 ? kTurns : 8;  // loads before the first store
    static_assert(kTurns % kBatch == 0, "whole batches");
#pragma unroll
    for (int turn = 0; turn < kTurns; turn += kBatch) {
      const int first_row = turn * kRowsAtOnce + thread / kChunks;
      if (first_row >= tile.rows) break;
      int64_t output_rows[kBatch];
      uint4 outputs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = min(first_row + i * kRowsAtOnce, kRows - 1);
        output_rows[i] = LoadShared4(buffer + row * kRowBytes + kRowBytes - 16);
        outputs[i] = LoadShared16(buffer + row * kRowBytes + 16 * chunk);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first_row + i * kRowsAtOnce >= tile.rows) break;
        uint16_t* out = static_cast<uint16_t*>(p.output.values) + output_rows[i] * p.columns;
        *reinterpret_cast<uint4*>(out + column) = outputs[i];
      }
    }
  }

  // As SendRows, but rounds to NVFP4. Two neighboring lanes have a block of 16. The output rows are
  // the sorted rows.
  template <typename T>
  __device__ __forceinline__ void SendRounded(const RowTile& tile, int first) const {
    const int chunks = kTiles * kTileM / (p.gated() ? 16 : 8), rows_at_once = kThreads / chunks;
    const int chunk = thread % chunks, column = first + 8 * chunk, own_row = thread / chunks;
    const float input_scale = p.output.input_scale[tile.expert];
    uint16_t* out = static_cast<uint16_t*>(p.output.values) +
                    static_cast<int64_t>(tile.row + own_row) * p.columns + column;
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += rows_at_once) {
      const int source = min(row + own_row, kRows - 1);  // rows past the tile are not stored
      const uint4 outputs = LoadShared16(buffer + source * kRowBytes + 16 * chunk);
      uint32_t pairs[4] = {outputs.x, outputs.y, outputs.z, outputs.w};
      RoundSpreadBlock<T, 2>(input_scale, pairs);
      if (row + own_row < tile.rows && column < p.columns) {
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * p.columns) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }

  // Full tiles have code without a branch for every eight rows. With branches, each eight rows
  // would wait for those before.
  template <Finish kFinish, typename T, int kSize>
  __device__ __forceinline__ void PutUnrolled(const TileStore<T>& store, uint32_t place,
                                              const float (&sums)[kSize]) const {
    if (store.tile.rows > kRows - 8) {
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) PutRows<kFinish>(store, place, j, sums);
    } else {
#pragma unroll
      for (int j = 0; j < kSize / 4 - 1; ++j) {
        if (8 * j >= store.tile.rows) break;
        PutRows<kFinish>(store, place, j, sums);
      }
    }
  }

  template <Finish kFinish, typename T, int kSize>
  __device__ __forceinline__ void PutRows(const TileStore<T>& store, uint32_t place, int j,
                                          const float (&sums)[kSize]) const {
    PutEight(place + 8 * j * kRowBytes,
             store.template Finished<kFinish>(8 * j, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                                              sums[4 * j + 3]),
             kFinish == Finish::kSilu);
  }

  static __device__ __forceinline__ void PutEight(uint32_t place, const OutputPairs& pairs,
                                                  bool gated) {
    if (gated) {
      StoreMatrix(place, pairs.low);
    } else {
      StoreMatrices(place, pairs.low, pairs.high);
    }
  }
};

}  // namespace nvfp4
