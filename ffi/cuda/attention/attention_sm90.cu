// Computes attention for prefills on Hopper, with wgmma, in bf16 and f16.
//
// A tile has 128 rows: so many queries of one head or, if there are fewer queries, the queries of a
// few heads of one group. A thread block visits the tiles of keys that these rows see, from the
// last one to the first one, with a running maximum and sum of the softmax. There is one block for
// each multiprocessor. It computes several tiles of rows, and copies what the next one needs while
// it finishes a tile.
//
// Bottleneck: tensor cores. Two consumer warpgroups have 64 rows each:
//   producer            one thread copies the queries, and tiles of keys and values, by tensor maps
//   consumers           scores of the next tile, then values of this tile, while the other one
//                       computes its softmax
// Named barriers let the consumers take turns: one starts its MMAs when the other has started all
// of its own. In a warpgroup, the softmax of a tile also runs beside the MMAs of the values of the
// tile before. Source: arXiv:2407.08608.
//
// Needs: sm_90a. Tests: tests/emulation/test_emulation_attention_sm90.py, tests/gpu/test_sass.py.
#include <cfloat>

#include "cuda/attention/attention.cuh"
#include "cuda/epilogues/finish.cuh"
#include "cuda/instructions/ampere.cuh"
#include "cuda/instructions/hopper.cuh"
#include "cuda/instructions/tensor_map.cuh"
#include "cuda/scheduling/stage_ring.cuh"

namespace nvfp4 {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kGroups = 2;          // consumer warpgroups
constexpr int kGroupThreads = 128;  // threads of a warpgroup
constexpr int kGroupRows = 64;      // rows of a consumer warpgroup
constexpr int kRows = kGroups * kGroupRows;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kPartBytes = 2 * kTileWidth;  // bytes of a row in one part of a tile

// setmaxnreg moves registers from the producer to the consumers.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters =
    ((kGroups + 1) * kLaunchRegisters - kProducerRegisters) / kGroups / 8 * 8;

// kDim, kValueDim: the widest key and value. kKeys: keys of a tile. kStages: tiles of keys and
// tiles of values in shared memory. A tile of keys, values or queries consists of parts of 64
// columns, and a part of rows of 128 bytes.
template <int kDim_, int kValueDim_, int kKeys_, int kStages_>
struct Config {
  static constexpr int kDim = kDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kStages = kStages_;
  static constexpr int kSumWidth = std::min(kValueDim, 128);  // columns of one MMA
  static constexpr int kSums = kValueDim / kSumWidth;
  static constexpr int kQueryBytes = 2 * kRows * kDim;
  static constexpr int kKeyBytes = 2 * kKeys * kDim;
  static constexpr int kValueBytes = 2 * kKeys * kValueDim;
  static constexpr int kAlignment = 1024;  // that the swizzle needs
  static constexpr int kSharedBytes =
      kQueryBytes + kStages * (kKeyBytes + kValueBytes) + kAlignment;
  static_assert(kSharedBytes + 1024 <= 227 * 1024, "shared memory of a block");
};

// The arguments of the kernel.
struct Attention {
  TensorMap queries, keys, values;
  int32_t t, n, group, s, dv;  // as in AttentionShape
  const int32_t* positions;
  const float* sinks;
  void* y;
  float factor;  // of the scores, in units of log2(e)
  int32_t window, chunk;
  int32_t head_bits;  // a tile has 2^head_bits heads of a group
  int32_t heads;      // tiles along the heads
  int32_t lists;      // tiles along the heads of all rows of the batch
  int32_t tiles;      // all tiles
};

// The rows of a tile: heads first, queries second. Row r is query `query` + r / heads, head `head`
// + r % heads.
struct Rows {
  int batch, head, query;
};

// Finds the rows of the tile that this block computes after `round` others. Returns whether there
// is one.
//
// The last queries see the most keys. Their tiles come first, so that short ones fill the time at
// the end. Every other round runs through the blocks backwards, so that no block has the longest
// tile of each round.
__device__ __forceinline__ bool FindRows(const Attention& p, int round, Rows* rows) {
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int tile = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  if (tile >= p.tiles) return false;
  const int from_end = p.tiles - 1 - tile, list = from_end % p.lists;
  const int query = from_end / p.lists * (kRows >> p.head_bits);
  *rows = {list / p.heads, list % p.heads << p.head_bits, query};
  return true;
}

__device__ __forceinline__ int PositionOf(const Attention& p, const Rows& rows, int query) {
  if (query >= p.t) return kPadding;
  return p.positions[rows.batch * p.t + query];
}

// The keys that any row of a tile sees, and the keys that all its rows see, without padding.
struct TileKeys {
  KeyRange any, all;
};

// All lanes of a warp must call it, and get the same result.
__device__ __forceinline__ TileKeys FindKeys(const Attention& p, const Rows& rows) {
  TileKeys keys = {{p.s, 0}, {0, p.s}};
  int positions[kRows / 32];  // all loads start before the first one is used
#pragma unroll
  for (int i = 0; i < kRows / 32; ++i) {
    const int query = static_cast<int>(threadIdx.x % 32) + 32 * i;
    const bool exists = query < kRows >> p.head_bits;
    positions[i] = exists ? PositionOf(p, rows, rows.query + query) : kPadding;
  }
#pragma unroll
  for (const int position : positions) {
    if (position >= kPadding) continue;
    const KeyRange seen = VisibleKeys(position, p.s, p.window, p.chunk);
    keys.all.begin = max(keys.all.begin, seen.begin);
    keys.all.end = min(keys.all.end, seen.end);
    if (seen.begin >= seen.end) continue;
    keys.any.begin = min(keys.any.begin, seen.begin);
    keys.any.end = max(keys.any.end, seen.end);
  }
  return {
      {__reduce_min_sync(kAllLanes, keys.any.begin), __reduce_max_sync(kAllLanes, keys.any.end)},
      {__reduce_max_sync(kAllLanes, keys.all.begin), __reduce_min_sync(kAllLanes, keys.all.end)}};
}

// The tiles of keys that a tile of rows visits, from `last` down to `first`; none if last < first.
struct Visited {
  int first, last;
  __device__ __forceinline__ bool IsEmpty() const { return last < first; }
};
template <typename C>
__device__ __forceinline__ Visited VisitedTiles(const TileKeys& keys) {
  return {keys.any.begin / C::kKeys, (keys.any.end + C::kKeys - 1) / C::kKeys - 1};
}

template <typename C>
struct Shared {
  uint32_t queries;  // [parts][kRows][128 bytes]
  uint32_t keys;     // [kStages][parts][kKeys][128 bytes]
  uint32_t values;   // [kStages][parts][kKeys][128 bytes]
  uint32_t barriers;

  // mbarriers
  __device__ __forceinline__ uint32_t FullQueries() const { return barriers; }
  __device__ __forceinline__ uint32_t EmptyQueries() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t FullKeys(int stage) const {
    return barriers + 16 + 8 * stage;
  }
  __device__ __forceinline__ uint32_t EmptyKeys(int stage) const {
    return FullKeys(C::kStages + stage);
  }
  __device__ __forceinline__ uint32_t FullValues(int stage) const {
    return FullKeys(2 * C::kStages + stage);
  }
  __device__ __forceinline__ uint32_t EmptyValues(int stage) const {
    return FullKeys(3 * C::kStages + stage);
  }
  static constexpr int kBarriers = 2 + 4 * C::kStages;
};

// Copies the parts of one tile of keys or values. One thread calls it.
template <int kWidth, int kTileRows>
__device__ __forceinline__ void CopyKeys(uint32_t target, const TensorMap& map, int key, int head,
                                         int batch, uint32_t barrier) {
  ArriveExpect(barrier, 2 * kWidth * kTileRows);
#pragma unroll
  for (int part = 0; part < kWidth / static_cast<int>(kTileWidth); ++part) {
    CopyTile(target + part * kTileRows * kPartBytes, map, part * kTileWidth, key, head, batch,
             barrier);
  }
}

// Copies the queries of a tile of rows. One thread calls it.
template <typename C>
__device__ __forceinline__ void CopyQueries(const Attention& p, const Shared<C>& shared,
                                            const Rows& rows) {
  ArriveExpect(shared.FullQueries(), C::kQueryBytes);
#pragma unroll
  for (int part = 0; part < C::kDim / static_cast<int>(kTileWidth); ++part) {
    CopyTile(shared.queries + part * kRows * kPartBytes, p.queries, part * kTileWidth, rows.head,
             rows.query, rows.batch, shared.FullQueries());
  }
}

// A warp copies queries, and tiles of keys and values, in the order of their use. The elected lane
// starts the copies.
template <typename C>
__device__ __forceinline__ void Produce(const Attention& p, const Shared<C>& shared, bool elected) {
  StageRing<C::kStages> ring;
  uint32_t query_phase = 0;
  Rows rows;
  for (int round = 0; FindRows(p, round, &rows); ++round) {
    const Visited visited = VisitedTiles<C>(FindKeys(p, rows));
    const int head = rows.head / p.group;
    for (int tile = visited.last; tile >= visited.first; --tile) {
      WaitBarrier(shared.EmptyKeys(ring.stage), ring.phase ^ 1);
      if (elected) {
        CopyKeys<C::kDim, C::kKeys>(shared.keys + ring.stage * C::kKeyBytes, p.keys,
                                    tile * C::kKeys, head, rows.batch, shared.FullKeys(ring.stage));
      }
      if (tile == visited.last) {
        WaitBarrier(shared.EmptyQueries(), query_phase ^ 1);
        if (elected) CopyQueries<C>(p, shared, rows);
        query_phase ^= 1;
      }
      WaitBarrier(shared.EmptyValues(ring.stage), ring.phase ^ 1);
      if (elected) {
        CopyKeys<C::kValueDim, C::kKeys>(shared.values + ring.stage * C::kValueBytes, p.values,
                                         tile * C::kKeys, head, rows.batch,
                                         shared.FullValues(ring.stage));
      }
      ring.Next();
    }
  }
}

// A tile of rows, as a lane of a consumer sees it.
struct Task {
  bool exists;
  Rows rows;
  TileKeys keys;
  KeyRange seen[2];  // keys that rows 0 and 1 of the lane see
};

// A warpgroup that has 64 rows. Lane 4 g + q of warp w has rows 16 w + g and 16 w + g + 8 of them,
// which are its rows 0 and 1.
template <typename T, typename C>
struct Consumer {
  const Attention& p;
  const Shared<C>& shared;
  const int group;
  StageRing<C::kStages> ring;
  uint32_t query_phase;
  Task task;
  float largest[2], total[2];  // of the scores so far, and of their exponentials
  float sums[C::kSums][C::kSumWidth / 2];

  __device__ __forceinline__ int Lane() const { return static_cast<int>(threadIdx.x % 32); }
  // Returns the row of the tile that is row `row` of this lane.
  __device__ __forceinline__ int TileRow(int row) const {
    return static_cast<int>(threadIdx.x / 32) * 16 + Lane() / 4 + 8 * row;
  }

  __device__ __forceinline__ void Release(uint32_t barrier) const {
    if (Lane() == 0) Arrive(barrier);
  }

  // Starts scores = queries @ keys.
  __device__ __forceinline__ void StartScores(int stage, float (&scores)[C::kKeys / 2]) const {
    const uint32_t a = DescriptorAddress(shared.queries + group * kGroupRows * kPartBytes);
    const uint32_t b = DescriptorAddress(shared.keys + stage * C::kKeyBytes);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < C::kDim / 16; ++j) {
      WgmmaShared<T, C::kKeys>::Run(
          scores, TileDescriptor(a + j / 4 * (kRows * kPartBytes / 16) + j % 4 * 2),
          TileDescriptor(b + j / 4 * (C::kKeys * kPartBytes / 16) + j % 4 * 2), j > 0);
    }
    WgmmaCommit();
  }

  // Starts sums += weights @ values.
  __device__ __forceinline__ void StartSums(int stage,
                                            const uint32_t (&weights)[C::kKeys / 16][4]) {
    constexpr uint32_t kBytes = C::kKeys * kPartBytes;
    const uint32_t b = TransposedAddress(shared.values + stage * C::kValueBytes, kBytes);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < C::kKeys / 16; ++j) {
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) {
        Wgmma<T, C::kSumWidth>::RunTransposed(
            sums[i], weights[j],
            TileDescriptor(b + i * (C::kSumWidth / kTileWidth) * (kBytes / 16) + j * 128));
      }
    }
    WgmmaCommit();
  }

  // Waits until no more than kInFlight groups of MMAs run. Before that, the compiler must not read
  // what the MMAs write.
  template <int kInFlight>
  __device__ __forceinline__ void AwaitScores(float (&scores)[C::kKeys / 2]) const {
    WgmmaWait<kInFlight>();
    FenceSums(scores);
  }
  __device__ __forceinline__ void AwaitSums() {
    WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) FenceSums(sums[i]);
  }

  // Replaces scores by -infinity where a row does not see the key.
  __device__ __forceinline__ void Mask(int tile, float (&scores)[C::kKeys / 2]) const {
    const int first = tile * C::kKeys;
    if (first >= task.keys.all.begin && first + C::kKeys <= task.keys.all.end) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // The first key of this lane, counted from the first one that the row sees. Keys before that
      // have large numbers.
      const uint32_t key = static_cast<uint32_t>(first + Lane() % 4 * 2 - task.seen[row].begin);
      const uint32_t count =
          static_cast<uint32_t>(max(task.seen[row].end - task.seen[row].begin, 0));
#pragma unroll
      for (int i = 0; i < C::kKeys / 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * row + i % 2];
        if (key + i / 2 * 8 + i % 2 >= count) score = -INFINITY;
      }
    }
  }

  // Returns what is subtracted from the scores of a row before exp2; 0 if it has seen no key.
  __device__ __forceinline__ float Shift(int row) const {
    return largest[row] == -INFINITY ? 0.0f : largest[row] * p.factor;
  }

  // Replaces the scores by their exponentials. Updates the maximum and the sum, and gets the factor
  // by which sums over previous keys shrink.
  __device__ __forceinline__ void Exponentiate(float (&scores)[C::kKeys / 2], float (&shrink)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most = largest[row];
#pragma unroll
      for (int i = 0; i < C::kKeys / 4; ++i) {
        most = fmaxf(most, scores[i / 2 * 4 + 2 * row + i % 2]);
      }
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      const float before = largest[row] * p.factor;
      largest[row] = most;
      const float shift = Shift(row);
      shrink[row] = FastExp2(before - shift);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < C::kKeys / 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * row + i % 2];
        score = FastExp2(score * p.factor - shift);
        sum += score;
      }
      total[row] = total[row] * shrink[row] + sum;
    }
  }

  // Rounds exponentials to fragments of wgmma.
  __device__ __forceinline__ void Round(const float (&scores)[C::kKeys / 2],
                                        uint32_t (&weights)[C::kKeys / 16][4]) const {
#pragma unroll
    for (int i = 0; i < C::kKeys / 4; ++i) {
      weights[i / 4][i % 4] = MakePair<T>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void Shrink(const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) {
#pragma unroll
      for (int j = 0; j < C::kSumWidth / 2; ++j) sums[i][j] *= shrink[j / 2 % 2];
    }
  }

  // The consumers take turns to start MMAs. Group 0 is the first.
  __device__ __forceinline__ void AwaitTurn() const {
    SyncGroup(1 + group, kGroups * kGroupThreads);
  }
  __device__ __forceinline__ void PassTurn() const {
    ArriveGroup(1 + (group ^ 1), kGroups * kGroupThreads);
  }

  __device__ __forceinline__ Task FindTask(int round) const {
    Task found;
    found.exists = FindRows(p, round, &found.rows);
    if (!found.exists) return found;
    found.keys = FindKeys(p, found.rows);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int query = found.rows.query + (TileRow(row) >> p.head_bits);
      found.seen[row] = VisibleKeys(PositionOf(p, found.rows, query), p.s, p.window, p.chunk);
    }
    return found;
  }

  // Visits all tiles of keys. The MMAs of the scores run one tile ahead of those of the values.
  // Returns the task of the next round. Its positions are read while the last MMAs run.
  __device__ __forceinline__ Task Accumulate(const Visited& visited, int next_round) {
    float shrink[2];
    uint32_t weights[C::kKeys / 16][4];
    WaitBarrier(shared.FullQueries(), query_phase);
    {
      float scores[C::kKeys / 2];
      WaitBarrier(shared.FullKeys(ring.stage), ring.phase);
      StartScores(ring.stage, scores);
      AwaitScores<0>(scores);
      Release(shared.EmptyKeys(ring.stage));
      Mask(visited.last, scores);
      Exponentiate(scores, shrink);
      Round(scores, weights);
    }
    if (group == 1 && visited.last > visited.first) PassTurn();
    for (int tile = visited.last - 1; tile >= visited.first; --tile) {
      const StageRing<C::kStages> before = ring;
      ring.Next();
      float scores[C::kKeys / 2];
      WaitBarrier(shared.FullKeys(ring.stage), ring.phase);
      AwaitTurn();
      StartScores(ring.stage, scores);
      WaitBarrier(shared.FullValues(before.stage), before.phase);
      StartSums(before.stage, weights);
      if (group == 0 || tile > visited.first) PassTurn();
      AwaitScores<1>(scores);
      Mask(tile, scores);
      Exponentiate(scores, shrink);
      // Totals are never negative. The condition only keeps the compiler from computing them, and
      // the exponentials in them, after the MMAs that they should run beside.
      if (!(total[0] + total[1] < 0.0f)) Release(shared.EmptyKeys(ring.stage));
      AwaitSums();
      Release(shared.EmptyValues(before.stage));
      Shrink(shrink);
      Round(scores, weights);
    }
    Release(shared.EmptyQueries());
    query_phase ^= 1;
    WaitBarrier(shared.FullValues(ring.stage), ring.phase);
    StartSums(ring.stage, weights);
    const Task next = FindTask(next_round);
    AwaitSums();
    Release(shared.EmptyValues(ring.stage));
    ring.Next();
    return next;
  }

  // Divides the sums of row `row` by the sum of all exponentials, and stores them. The four lanes
  // of a row exchange words, so that each one stores 16 bytes.
  __device__ __forceinline__ void Store(int row) {
    float sum = total[row];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int tile_row = TileRow(row);
    const int head = task.rows.head + tile_row % (1 << p.head_bits);
    if (p.sinks != nullptr) sum += FastExp2(p.sinks[head] * kLog2E - Shift(row));
    const float factor = 1.0f / fmaxf(sum, FLT_MIN);  // a row that sees no key gets zeros
    const int query = task.rows.query + (tile_row >> p.head_bits);
    const int64_t place = (int64_t{task.rows.batch} * p.t + query) * p.n + head;
    T* y = static_cast<T*>(p.y) + place * p.dv;
    const int q = Lane() % 4;
    const bool odd = q % 2 != 0, high = q / 2 != 0;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) {
#pragma unroll
      for (int j = 0; j < C::kSumWidth / 32; ++j) {
        uint32_t words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float* pair = &sums[i][16 * j + 4 * word + 2 * row];
          words[word] = MakePair<T>(pair[0] * factor, pair[1] * factor);
        }
        // Transposes the words of four lanes: first in blocks of 2 x 2, then the blocks.
#pragma unroll
        for (int word = 0; word < 4; word += 2) {
          Swap(words[word], words[word + 1], odd, 1);
        }
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          Swap(words[word], words[word + 2], high, 2);
        }
        const int column = i * C::kSumWidth + 32 * j + 8 * q;
        if (query < p.t && column < p.dv) {
          *reinterpret_cast<uint4*>(y + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // Exchanges `second` of a lower lane for `first` of the lane `distance` above it.
  static __device__ __forceinline__ void Swap(uint32_t& first, uint32_t& second, bool upper,
                                              int distance) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? first : second, distance);
    if (upper) {
      first = other;
    } else {
      second = other;
    }
  }

  __device__ __forceinline__ void Run() {
    task = FindTask(0);
    for (int round = 1; task.exists; ++round) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        largest[row] = -INFINITY;
        total[row] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) {
#pragma unroll
        for (int j = 0; j < C::kSumWidth / 2; ++j) sums[i][j] = 0.0f;
      }
      const Visited visited = VisitedTiles<C>(task.keys);
      const Task next = visited.IsEmpty() ? FindTask(round) : Accumulate(visited, round);
      Store(0);
      Store(1);
      task = next;
    }
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads, 1) AttentionSm90(const __grid_constant__ Attention p) {
  NVFP4_DYNAMIC_SHARED(dynamic);
  __shared__ __align__(8) uint64_t barriers[Shared<C>::kBarriers];
  Shared<C> shared;
  shared.queries = (SharedAddress(dynamic) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  shared.keys = shared.queries + C::kQueryBytes;
  shared.values = shared.keys + C::kStages * C::kKeyBytes;
  shared.barriers = SharedAddress(barriers);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroups * kGroupThreads / 32;
    InitBarrier(shared.FullQueries(), 1);
    InitBarrier(shared.EmptyQueries(), kWarps);
    for (int stage = 0; stage < C::kStages; ++stage) {
      InitBarrier(shared.FullKeys(stage), 1);
      InitBarrier(shared.EmptyKeys(stage), kWarps);
      InitBarrier(shared.FullValues(stage), 1);
      InitBarrier(shared.EmptyValues(stage), kWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();

  // The shuffle tells the compiler that all lanes have the same group.
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kGroupThreads), 0);
  if (group == kGroups) {
    ShrinkRegisters<kProducerRegisters>();
    const int thread = static_cast<int>(threadIdx.x % kGroupThreads);
    if (thread < 32) Produce<C>(p, shared, thread == 0);
  } else {
    GrowRegisters<kConsumerRegisters>();
    Consumer<T, C> consumer{p, shared, group, {}, 0, {}, {}, {}, {}};
    consumer.Run();
  }
}

// The arguments are kDim, kValueDim, kKeys and kStages. Keys and values of other sizes take the
// next larger ones; the copies write zeros for what is missing.
using Width64 = Config<64, 64, 128, 4>;
using Width128 = Config<128, 128, 128, 3>;
using Latent = Config<192, 128, 128, 2>;  // latent attention
using Width256 = Config<256, 256, 64, 2>;

// How many heads of a group a block has, as a power of two: as few as fill its rows. More than one
// only helps where the queries of one head do not.
int HeadBits(const AttentionShape& shape) {
  int bits = 0;
  while (shape.t << bits < kRows && shape.group() % (2 << bits) == 0 && 2 << bits <= kRows) ++bits;
  return bits;
}

int64_t CountTiles(const AttentionShape& shape) {
  const int bits = HeadBits(shape);
  return shape.b * (shape.n >> bits) * CeilDiv(shape.t << bits, kRows);
}

cudaError_t MakeMaps(const AttentionShape& shape, const AttentionBuffers& buffers, int keys,
                     Attention* p) {
  const auto unsign = [](int64_t size) { return static_cast<uint64_t>(size); };
  const uint64_t b = unsign(shape.b), t = unsign(shape.t), n = unsign(shape.n);
  const uint64_t m = unsign(shape.m), s = unsign(shape.s), d = unsign(shape.d);
  const uint64_t dv = unsign(shape.dv);
  const uint32_t heads = 1u << p->head_bits, rows = static_cast<uint32_t>(keys);
  NVFP4_RETURN_IF_CUDA_ERROR(MakeTensorMap(
      {buffers.q, {d, n, t, b}, {2 * d, 2 * n * d, 2 * t * n * d}, {heads, kRows / heads, 1}},
      &p->queries));
  NVFP4_RETURN_IF_CUDA_ERROR(MakeTensorMap(
      {buffers.k, {d, s, m, b}, {2 * d, 2 * s * d, 2 * m * s * d}, {rows, 1, 1}}, &p->keys));
  return MakeTensorMap(
      {buffers.v, {dv, s, m, b}, {2 * dv, 2 * s * dv, 2 * m * s * dv}, {rows, 1, 1}}, &p->values);
}

template <typename T, typename C>
cudaError_t LaunchType(cudaStream_t stream, const AttentionCall& call,
                       const AttentionBuffers& buffers) {
  const AttentionShape& shape = call.shape;
  Attention p = {};
  p.t = static_cast<int32_t>(shape.t);
  p.n = static_cast<int32_t>(shape.n);
  p.group = static_cast<int32_t>(shape.group());
  p.s = static_cast<int32_t>(shape.s);
  p.dv = static_cast<int32_t>(shape.dv);
  p.positions = buffers.positions;
  p.sinks = buffers.sinks;
  p.y = buffers.y;
  p.factor = call.scale * kLog2E;
  p.window = call.window;
  p.chunk = call.chunk;
  p.head_bits = HeadBits(shape);
  NVFP4_RETURN_IF_CUDA_ERROR(MakeMaps(shape, buffers, C::kKeys, &p));
  p.heads = p.n >> p.head_bits;
  p.lists = static_cast<int32_t>(p.heads * shape.b);
  p.tiles = static_cast<int32_t>(CountTiles(shape));
  const int blocks = std::min(p.tiles, MultiprocessorCount());
  return LaunchWide(stream, dim3(static_cast<unsigned>(blocks)), kThreads, C::kSharedBytes,
                    /*overlaps=*/false, AttentionSm90<T, C>, p);
}

template <typename C>
cudaError_t LaunchConfig(cudaStream_t stream, const AttentionCall& call,
                         const AttentionBuffers& buffers) {
  return call.type == DataType::kF16 ? LaunchType<__half, C>(stream, call, buffers)
                                     : LaunchType<__nv_bfloat16, C>(stream, call, buffers);
}

struct Variant {
  int64_t d, dv;  // the widest keys and values
  cudaError_t (*launch)(cudaStream_t stream, const AttentionCall& call,
                        const AttentionBuffers& buffers);
};

// The first one that is wide enough is used.
constexpr Variant kVariants[] = {{64, 64, LaunchConfig<Width64>},
                                 {128, 128, LaunchConfig<Width128>},
                                 {192, 128, LaunchConfig<Latent>},
                                 {256, 256, LaunchConfig<Width256>}};

}  // namespace

bool FillsSm90(const AttentionShape& shape) {
  constexpr int64_t kFewTiles = 66;  // for half of the multiprocessors of an H100 or H200
  return shape.s > 0 && shape.t << HeadBits(shape) >= kRows && CountTiles(shape) >= kFewTiles;
}

cudaError_t LaunchAttentionSm90(cudaStream_t stream, const AttentionCall& call,
                                const AttentionBuffers& buffers) {
  for (const Variant& variant : kVariants) {
    if (call.shape.d <= variant.d && call.shape.dv <= variant.dv) {
      return variant.launch(stream, call, buffers);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4
