// Measures the peaks of this machine: reading memory, and multiplying. Prints "name value" lines.
//
//   cpu_peaks THREADS MEGABYTES
//
//   read_gbps    reading MEGABYTES per thread in order, which must be more than any cache holds
//   fma256_gflops, fma512_gflops  float32 fused multiply-add in vectors of 256 and 512 bits
//   bf16_gflops  vdpbf16ps;  amx_gflops  tdpbf16ps   (left out if the CPU does not have them)
//
// Compile with -O3 -march=native -pthread, as benchmarks/cpu_moe.py does.
#include <immintrin.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t kLoops = 4000000;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the best time of `work`, which all threads run at once.
template <typename Work>
double Best(int threads, Work work) {
  double best = 1e30;
  for (int round = 0; round < 5; ++round) {
    const double start = Seconds();
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
    work(0);
    for (std::thread& thread : others) thread.join();
    const double spent = Seconds() - start;
    if (spent < best) best = spent;
  }
  return best;
}

void Read(const uint8_t* data, int64_t bytes) {
  __m256i sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 128) {
    for (int j = 0; j < 4; ++j)
      sum[j] = _mm256_add_epi8(sum[j], _mm256_load_si256((const __m256i*)(data + i + 32 * j)));
    _mm_prefetch((const char*)data + i + 4096, _MM_HINT_T0);
    _mm_prefetch((const char*)data + i + 4160, _MM_HINT_T0);
  }
  sum[0] = _mm256_add_epi8(_mm256_add_epi8(sum[0], sum[1]), _mm256_add_epi8(sum[2], sum[3]));
  asm volatile("" ::"x"(sum[0]));
}

#define CLOBBERED "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9"
#define TEN(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9)

#define FMA8(i) "vfmadd231ps %%ymm15, %%ymm14, %%ymm" #i "\n"
void Fma8(int) {
  for (int64_t i = 0; i < kLoops; ++i) asm volatile(TEN(FMA8)::: CLOBBERED);
}

#if defined(__AVX512F__)
#define FMA16(i) "vfmadd231ps %%zmm15, %%zmm14, %%zmm" #i "\n"
void Fma16(int) {
  for (int64_t i = 0; i < kLoops; ++i) asm volatile(TEN(FMA16)::: CLOBBERED);
}
#endif

#if defined(__AVX512BF16__)
#define DOT(i) "vdpbf16ps %%zmm31, %%zmm30, %%zmm" #i "\n"
void Dot(int) {
  for (int64_t i = 0; i < kLoops; ++i) asm volatile(TEN(DOT)::: CLOBBERED);
}
#endif

#if defined(__AMX_BF16__)
void Tiles(int) {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
  // The intrinsic of GCC 12 says that it reads 8 of the 64 bytes.
  asm volatile("ldtilecfg %0" ::"m"(config));
  for (int64_t i = 0; i < kLoops / 4; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#endif

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 1;
  const int threads = std::atoi(argv[1]);
  const int64_t bytes = std::atoll(argv[2]) << 20;
  std::vector<uint8_t*> data(threads);
  for (uint8_t*& buffer : data) {
    buffer = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
    std::memset(buffer, 1, bytes);
  }
  const double read = Best(threads, [&](int i) { Read(data[i], bytes); });
  const double giga = threads * 1e-9;
  std::printf("read_gbps %.2f\n", bytes * giga / read);
  std::printf("fma256_gflops %.1f\n", kLoops * 10 * 16 * giga / Best(threads, Fma8));
#if defined(__AVX512F__)
  std::printf("fma512_gflops %.1f\n", kLoops * 10 * 32 * giga / Best(threads, Fma16));
#endif
#if defined(__AVX512BF16__)
  std::printf("bf16_gflops %.1f\n", kLoops * 10 * 64 * giga / Best(threads, Dot));
#endif
#if defined(__AMX_BF16__)
  if (syscall(SYS_arch_prctl, 0x1023, 18) == 0)
    std::printf("amx_gflops %.1f\n", kLoops * 16384.0 * giga / Best(threads, Tiles));
#endif
  return 0;
}
