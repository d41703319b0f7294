// The registers of AMX: tiles of 16 rows by 64 bytes, as products of bfloat16 use them.
//
// gemm_amx.cc and attention_amx.cc include this file below their target pragma; see elementwise.h.
//
// Tiles 0 to 3 are C, and tiles 4 and 5 are A: 2 x 2 tiles of sums, of which the lower two are used
// if there are more than 16 rows. Tiles 6 and 7 are B: 32 columns.
namespace nvfp4::cpu {
namespace {

constexpr int64_t kTile = 16;         // rows of a tile
constexpr int64_t kTileBytes = 1024;  // 16 rows of 64 bytes
constexpr int64_t kTileK = 32;        // k of a tile product

// Tiles of A and C have `height` rows. Tiles of B have 16 rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit TileConfig(int64_t height) {
    for (int tile = 0; tile < 6; ++tile) rows[tile] = static_cast<uint8_t>(height);
  }
};
static_assert(sizeof(TileConfig) == 64, "ldtilecfg reads 64 bytes");

inline void ConfigureTiles(int64_t height) {
  const TileConfig config(height);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// The tile intrinsics of GCC 12 do not say that they read memory. Without this barrier, the
// compiler could move a store behind the load of the tile that needs it, or drop the store.
inline void SettleMemory() { __asm__ volatile("" ::: "memory"); }

template <bool kTwoTiles>
inline void ZeroTiles() {
  _tile_zero(0);
  _tile_zero(1);
  if (kTwoTiles) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Loads C from `out`, whose rows are `stride` floats apart.
template <bool kTwoTiles>
inline void LoadTiles(const float* out, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  _tile_loadd(0, out, bytes);
  _tile_loadd(1, out + kGroup, bytes);
  if (kTwoTiles) {
    _tile_loadd(2, out + kTile * stride, bytes);
    _tile_loadd(3, out + kTile * stride + kGroup, bytes);
  }
}

template <bool kTwoTiles>
inline void StoreTiles(float* out, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, out, bytes);
  _tile_stored(1, out + kGroup, bytes);
  if (kTwoTiles) {
    _tile_stored(2, out + kTile * stride, bytes);
    _tile_stored(3, out + kTile * stride + kGroup, bytes);
  }
}

}  // namespace
}  // namespace nvfp4::cpu
