// Computes y[r] = W @ x[r] + bias for at most kLinearFewRows rows, in one launch, with wgmma on
// Hopper, in bf16 and f16. W is NVFP4 with global scales (linear_few.cuh), FP8, or has the type of
// x (dense_few.cuh). linear_sm90_layers.cuh has what is particular to each.
//
// A block has 64 weight rows, which are the M of wgmma, and all rows of x, which are its N. Two or
// four warpgroups, the teams of a block, divide k in turns. If there are few blocks, those of a
// cluster divide k first. Each team has a ring of stages in shared memory, which it fills by
// cp.async and waits for by itself. A step of a team is one stage:
//
//   Wait for the MMAs of the step before, and for this stage.
//   Start the copies of a later step.
//   Make fragments of the weights in registers, and start the MMAs. If groups of k have scales, add
//   the step before, multiplied by its scales.
//
// The MMAs of one team run while others make fragments. A stage has one or two tiles of 64 of k:
//   x        [8 kEights][128 bytes] in the 128-byte swizzle, with zeros past k. Rows past the last
//            one are what memory holds. No output depends on them.
//   weights  a tile of the layout "mma_64x64", or 64 rows as the layer has them
//
// FP8 weights have scales as in dense_few.cu. Those of groups multiply the sums of each step.
//
// Each block reads its weights from memory, and x from the L2 cache. With 64 rows and 5120 x 2048
// weights, these are 6 MB of weights and 21 MB of x in all. Partial sums are added in the order of
// the blocks of a cluster, and in that of their teams. The bits of a row depend on the other rows
// of a call only where their number changes kEights.
//
// The kernel may start before the preceding one ends. If that kernel may have written the weights,
// this one only prefetches them into the L2 cache before it waits.
//
// Bottleneck: latencies, and the L2 cache. On an H200, 5120 x 2048 NVFP4 weights took 4.9 us for 16
// rows and 8.1 for 64, in a chain of such layers.
//
// Needs: sm_90a; k a multiple of 8, or of 16 if weights are FP8.
// Tests: tests/emulation/test_linear_few.py and test_dense_few.py, tests/gpu/test_linear_few.py and
// test_dense_few.py.
#include "cuda/gemm/linear_sm90.cuh"

#include <algorithm>
#include <type_traits>

#include "cuda/call_with_type.cuh"
#include "cuda/gemm/add_sums.cuh"
#include "cuda/gemm/linear_sm90_layers.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

constexpr int kMaxRanks = 4;

// The sizes of the kernel for up to 8 * kEights rows.
template <typename Layer, int kEightCount, int kTeamCount>
struct Form {
  static constexpr int kEights = kEightCount, kTeams = kTeamCount;
  static constexpr int kThreads = kTeams * kTeamThreads;
  static constexpr int kStepTiles = Layer::StepTiles(kEights);
  static constexpr int kStages = Layer::Stages(kTeams, kEights);
  static constexpr int kRowTileBytes = 8 * kEights * kRowBytes;  // of x for 64 of k
  static constexpr int kRowsBytes = kStepTiles * kRowTileBytes;  // of x in a stage
  static constexpr int kWeightBytes = kStepTiles * Layer::kTileBytes;
  static constexpr int kWeightsAt = kTeams * kStages * kRowsBytes;  // behind all of x
  static constexpr int kRingBytes = kWeightsAt + kTeams * kStages * kWeightBytes;
  static constexpr int kSlabs = 4;  // slabs of 16 weight rows, one for each warp of a team
  static constexpr int kPartialBytes = kTeams * kEights * kSlabs * 32 * int{sizeof(float4)};
  static constexpr int kRowScalesAt = kRingBytes > kPartialBytes ? kRingBytes : kPartialBytes;
  static constexpr int kRowScaleBytes = Layer::kIsFp8 ? kMostDenseRows * sizeof(float) : 0;
  static constexpr int kSharedBytes = kRowScalesAt + kRowScaleBytes;
  static_assert(kRowTileBytes % 1024 == 0, "the swizzle repeats after 1024 bytes");
  static_assert(kStages >= 3, "two steps are in flight while another one is used");
  static_assert(kSharedBytes <= (kTeams == 2 ? 113 : 227) << 10, "two blocks on a multiprocessor");
};

struct Sizes {
  int32_t rows;
  int32_t ranks;
  int32_t rank_tiles;
};

template <typename T, typename Layer, int kEights, int kTeams>
__global__ void __launch_bounds__(kTeams* kTeamThreads, kTeams == 2 ? 2 : 1)
    LinearSm90(const __grid_constant__ Layer layer, const Sizes p) {
  using F = Form<Layer, kEights, kTeams>;
  NVFP4_DYNAMIC_SHARED(shared);
  const int tile = static_cast<int>(blockIdx.x) / p.ranks;
  const int rank = static_cast<int>(blockIdx.x) % p.ranks;
  // The shuffle tells the compiler that all lanes have the same team.
  const int team = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kTeamThreads, 0);
  const int thread = static_cast<int>(threadIdx.x) % kTeamThreads;
  const int k_tiles = (layer.k() + kTileK - 1) / kTileK, first_tile = rank * p.rank_tiles;
  const int end_tile = min(first_tile + p.rank_tiles, k_tiles);
  const int all_steps = max(end_tile - first_tile + F::kStepTiles - 1, 0) / F::kStepTiles;
  const int rounds = (all_steps + kTeams - 1) / kTeams;  // most steps of a team
  const int steps = (all_steps - team + kTeams - 1) / kTeams;
  const uint32_t rows_at = SharedAddress(shared) + team * F::kStages * F::kRowsBytes;
  uint8_t* const weights = shared + F::kWeightsAt + team * F::kStages * F::kWeightBytes;

  // Calls function(tile of a step, its number along k) for the tiles of this team's step.
  const auto each_tile = [&](int step, const auto& function) {
#pragma unroll
    for (int d = 0; d < F::kStepTiles; ++d) {
      function(d, first_tile + (step * kTeams + team) * F::kStepTiles + d);
    }
  };
  // Past the last tile of the block, a step has zeros of x and some weights, which must be finite.
  const auto bring_weights = [&](int step) {
    const uint32_t target = SharedAddress(weights) + step % F::kStages * F::kWeightBytes;
    each_tile(step, [&](int d, int k_tile) {
      layer.Bring(tile, min(k_tile, k_tiles - 1), thread, target + d * Layer::kTileBytes);
    });
  };
  const auto bring_rows = [&](int step) {
    const uint32_t target = rows_at + step % F::kStages * F::kRowsBytes;
    const auto* x = static_cast<const uint16_t*>(layer.x());
    const int chunk = thread % kChunks;
    each_tile(step, [&](int d, int k_tile) {
      const int at = k_tile * kTileK + chunk * 8;
      const bool exists = k_tile < end_tile && at < layer.k();
#pragma unroll
      for (int i = 0; i < (8 * kEights + kCopyRows - 1) / kCopyRows; ++i) {
        const int row = thread / kChunks + kCopyRows * i;
        if (row >= p.rows) break;
        CopyOrZero(target + d * F::kRowTileBytes + SwizzledChunk(row, chunk),
                   x + (exists ? static_cast<int64_t>(row) * layer.k() + at : 0), exists ? 16 : 0);
      }
    });
  };
  constexpr int kAhead = F::kStages - 1;
  const bool unchanged = layer.weight_is_unchanged();
#pragma unroll 1
  for (int step = 0; step < min(steps, kAhead); ++step) {
    if (unchanged) {
      bring_weights(step);
    } else {
      each_tile(step,
                [&](int, int k_tile) { layer.Prefetch(tile, min(k_tile, k_tiles - 1), thread); });
    }
  }
  WaitForPrecedingKernel();
  StartNextKernel();
  auto* const row_scales = reinterpret_cast<float*>(shared + F::kRowScalesAt);
  if constexpr (Layer::kIsFp8) {
    layer.BringRowScales(p.rows, static_cast<int>(threadIdx.x), row_scales);
  }
#pragma unroll 1
  for (int step = 0; step < kAhead; ++step) {
    if (step < steps) {
      if (!unchanged) bring_weights(step);
      bring_rows(step);
    }
    CommitCopies();
  }
  const int lane = thread % 32, slab = thread / 32;
  const typename Layer::Row row = layer.LoadRow(tile, slab);

  float sums[4 * kEights] = {};
  typename Layer::template Extra<4 * kEights> extra;
  uint32_t fragments[F::kStepTiles][4][4];
#pragma unroll 1
  for (int step = 0; step < rounds; ++step) {
    WgmmaWait<0>();
    extra.EndStep(sums);
    WaitCopies<kAhead - 1>();
    FenceAsyncProxy();  // without it, tensor cores do not see rows that came by cp.async
    SyncGroup(team + 1, kTeamThreads);
    // All teams wait at equally many barriers, because racecheck orders accesses by their number.
    if (step == steps) break;
    if (step + kAhead < steps) {
      bring_weights(step + kAhead);
      bring_rows(step + kAhead);
    }
    CommitCopies();
    const int stage = step % F::kStages;
#pragma unroll
    for (int d = 0; d < F::kStepTiles; ++d) {
      layer.Load(weights + stage * F::kWeightBytes + d * Layer::kTileBytes, thread, fragments[d],
                 extra);
    }
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < F::kStepTiles; ++d) {
      const uint32_t b = DescriptorAddress(rows_at + stage * F::kRowsBytes + d * F::kRowTileBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Wgmma<T, 8 * kEights>::Run(sums, fragments[d][j], TileDescriptor(b + 2 * j));
      }
    }
    WgmmaCommit();
  }
  WgmmaWait<0>();
  extra.EndStep(sums);
  extra.Finish(sums);
  WaitCopies<0>();
  __syncthreads();  // the partial sums take the place of the rings
  // Returns where a team's partial sums of eight rows of x lie, for the slab of this warp.
  const auto partial_at = [&](int of_team, int eight) {
    return reinterpret_cast<float4*>(shared) +
           ((of_team * kEights + eight) * F::kSlabs + slab) * 32 + lane;
  };
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    *partial_at(team, eight) =
        make_float4(sums[4 * eight], sums[4 * eight + 1], sums[4 * eight + 2], sums[4 * eight + 3]);
  }
  const auto store = [&](int eight, float4 total) {
    if constexpr (Layer::kIsFp8) layer.Scale(row_scales, eight, row, total);
    layer.Store(tile, slab, p.rows, row, eight, total);
  };
  if (p.ranks == 1) {
    __syncthreads();
#pragma unroll 1
    for (int eight = team; 8 * eight < p.rows; eight += kTeams) {
      float4 total = *partial_at(0, eight);
#pragma unroll
      for (int other = 1; other < kTeams; ++other) Add(total, *partial_at(other, eight));
      store(eight, total);
    }
    return;
  }
  SyncCluster();
#pragma unroll 1
  for (int eight = team * p.ranks + rank; 8 * eight < p.rows; eight += p.ranks * kTeams) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2
    for (int peer = 0; peer < p.ranks; ++peer) {
#pragma unroll
      for (int other = 0; other < kTeams; ++other) {
        Add(total, LoadPeer16(SharedAddress(partial_at(other, eight)), peer));
      }
    }
    store(eight, total);
  }
  LeaveCluster();  // until then, other blocks may read the shared memory of this one
}

// Calls function(number) for the kEights of the kernel for `rows` rows.
template <typename Function>
auto WithEights(int64_t rows, const Function& function) {
  if (rows <= 8) return function(std::integral_constant<int, 1>());
  if (rows <= 16) return function(std::integral_constant<int, 2>());
  if (rows <= 32) return function(std::integral_constant<int, 4>());
  return function(std::integral_constant<int, 8>());
}

template <typename T, int kTeams, typename Layer>
cudaError_t LaunchTeams(cudaStream_t stream, const Layer& layer, int64_t rows, int64_t n, int64_t k,
                        int32_t ranks) {
  return WithEights(rows, [&](auto eights) {
    using F = Form<Layer, eights, kTeams>;
    const int64_t steps = CeilDiv(CeilDiv(k, kTileK), F::kStepTiles);
    const Sizes sizes = {static_cast<int32_t>(rows), ranks,
                         static_cast<int32_t>(CeilDiv(steps, ranks) * F::kStepTiles)};
    const dim3 grid(static_cast<unsigned>(CeilDiv(n, kTileM) * ranks));
    const auto kernel = LinearSm90<T, Layer, eights, kTeams>;
    const int bytes = SharedBytesAlone(grid.x, ranks, F::kThreads, F::kSharedBytes, kernel);
    return LaunchClusters(stream, grid, ranks, F::kThreads, bytes, /*overlaps=*/true, kernel, layer,
                          sizes);
  });
}

template <typename T, typename Layer>
cudaError_t LaunchLayer(cudaStream_t stream, const Layer& layer, int64_t rows, int64_t n,
                        int64_t k) {
  const LinearSm90Cut cut = CutLinearSm90(n, k, /*few=*/rows <= 16, Layer::kWeightBits);
  return cut.teams == 2 ? LaunchTeams<T, 2>(stream, layer, rows, n, k, cut.ranks)
                        : LaunchTeams<T, 4>(stream, layer, rows, n, k, cut.ranks);
}

}  // namespace

LinearSm90Cut CutLinearSm90(int64_t n, int64_t k, bool few, int weight_bits) {
  const int64_t tiles = CeilDiv(n, kTileM), count = MultiprocessorCount();
  if (2 * tiles > count && tiles <= count) return {4, 1};
  // A cluster has as many blocks as leave each multiprocessor one, and each team a step.
  const int64_t steps = CeilDiv(k, 2 * kTileK);
  const int64_t ranks =
      std::clamp<int64_t>(std::min(count / tiles, steps / 2), 1, int64_t{kMaxRanks});
  const bool few_fp4 = few && weight_bits == 4;
  // With a few times more tiles than multiprocessors, the last tiles would leave most of the device
  // idle, and smaller blocks spread better. A layer of 28672 x 4096 with 4 rows took 24.9 us
  // instead of 26.3. But one of 248320 x 2048, which has 30 times as many tiles as there are
  // multiprocessors, took 116 us instead of 94.
  if (few_fp4 && tiles > count && tiles <= 4 * count && steps >= 16) return {2, 2};
  // Clusters of four do not cover a device whose GPCs have, for example, 18 multiprocessors. While
  // the preceding kernel still runs, up to three of these blocks came to a multiprocessor, and took
  // 6.9 us where the others took 2.7. Half as many blocks with twice as many teams have room, and
  // took 5.1. With more rows, and with weights that need no unpacking, they are slower by 1 % of a
  // step. With FP8 weights, a step of 1 to 16 rows is 0 to 0.6 % shorter.
  //
  // In place of clusters of two, twice as many teams have more weights in flight: 4096 x 14336 with
  // 4 rows took 14.1 us instead of 17.9. With FP8 weights, a step of Llama-3.1-8B that is cut like
  // FP4 is 2 to 3 % longer.
  const int64_t most = few_fp4 ? 1 : 2;
  if (few && weight_bits < 16 && ranks > most && 2 * tiles * ranks > count && steps >= 8) {
    return {4, 2};
  }
  return {2, static_cast<int32_t>(ranks)};
}

bool FitsDenseSm90(const DenseFewCall& call) {
  const int64_t count = MultiprocessorCount();
  const bool has_form = call.weight_type == call.type || call.weight_type == DataType::kE4M3;
  return has_form && call.n >= 8 * kTileM && CeilDiv(call.n, kTileM) <= 4 * count;
}

cudaError_t LaunchLinearSm90(cudaStream_t stream, const ExpertGemm& gemm, int64_t rows) {
  return CallWithHalf(gemm.type, [&](auto type) {
    using T = decltype(type);
    const PackedLayer<T> layer = {gemm, MakeTileConstants<T>()};
    return LaunchLayer<T>(stream, layer, rows, gemm.columns, gemm.k);
  });
}

cudaError_t LaunchDenseSm90(cudaStream_t stream, const DenseFewCall& call,
                            const DenseFewBuffers& buffers) {
  return CallWithHalf(call.type, [&](auto type) {
    using T = decltype(type);
    const auto with = [&](auto layer) {
      layer.buffers = buffers;
      layer.columns = static_cast<int32_t>(call.n);
      layer.length = static_cast<int32_t>(call.k);
      layer.rounds = call.output_type != DataType::kF32;
      layer.bias_size = static_cast<int32_t>(call.bias_size);
      layer.unchanged = call.weight_is_unchanged;
      if constexpr (layer.kIsFp8) {
        layer.row_scales = static_cast<int32_t>(call.row_scales);
        layer.groups = static_cast<int32_t>(call.scale_groups);
      }
      return LaunchLayer<T>(stream, layer, call.rows, call.n, call.k);
    };
    if (call.weight_type == call.type) return with(DenseLayer<T>());
    return call.scale_groups > 0 ? with(Fp8Layer<T, true>()) : with(Fp8Layer<T, false>());
  });
}

}  // namespace nvfp4
