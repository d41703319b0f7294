// Runs the kernel of sums over GPUs (cuda/collectives/all_reduce.cuh) on threads of a CPU.
//   peer_threads GPUS SUMS SEED [late|other|short]
// Each GPU has two blocks of eight threads. The sizes of the sums and the moments at which threads
// lose their turn are random. Prints "equal" if all results are the sums in the order of the ranks,
// with the same bits on all GPUs. With "late", the last GPU stops after half of the sums, and with
// "other", its sums then have another size. The kernel must then end with an error, which is
// printed. It waits for a minute at most, with "late" and "short" for a second.
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/collectives/all_reduce.cuh"

namespace threads {

thread_local Index thread, block;
thread_local pthread_barrier_t* block_barrier;
thread_local std::minstd_rand random_turns;

void MayWait() {
  const unsigned chance = random_turns() % 256;
  if (chance < 64) sched_yield();
  if (chance == 255) usleep(random_turns() % 200);
}

}  // namespace threads

namespace {

using namespace nvfp4;

constexpr int kBlocks = 2, kThreads = 8;  // a block has a thread for each GPU
constexpr int64_t kRoom = (kPeerThreads * (kBlocks - 1) + kThreads) * kPieceBytes;

struct Gpu {
  AllReduceCall call = {};
  PeerFailure failure = {};
  std::vector<uint4> x, y;
  pthread_barrier_t stream, blocks[kBlocks];
};
std::vector<Gpu> gpus;

// Element `at` of the array of GPU `rank` in sum `sum`. Sums of such numbers depend on their order.
float ElementOf(int rank, int sum, int at) {
  std::minstd_rand random(1 + rank + 8 * sum + 8191 * at);
  return static_cast<float>(random() % 20000) * 1.0e-3f + (random() % 7 == 0 ? 1.0e5f : 0.0f);
}

// The number of pieces in sum `sum`: in one block, or in two.
int PiecesOf(int sum, int seed) {
  std::minstd_rand random(1 + seed + 31 * sum);
  random.discard(3);
  const int blocks = 1 + static_cast<int>(random() % kBlocks);
  return (blocks - 1) * kPeerThreads + 1 + static_cast<int>(random() % kThreads);
}

template <typename T>
void FillPiece(Gpu& gpu, int sum, int piece) {
  T values[kPieceBytes / sizeof(T)];
  int at = piece * static_cast<int>(std::size(values));
  for (T& value : values) value = FromFloat<T>(ElementOf(gpu.call.group.rank, sum, at++));
  std::memcpy(&gpu.x[piece], values, sizeof(values));
}

template <typename T>
bool IsSum(const Gpu& gpu, int sum, int piece) {
  T found[kPieceBytes / sizeof(T)];
  std::memcpy(found, &gpu.y[piece], sizeof(found));
  for (size_t i = 0; i < std::size(found); ++i) {
    const int at = piece * static_cast<int>(std::size(found)) + static_cast<int>(i);
    float expected = ToFloat(FromFloat<T>(ElementOf(0, sum, at)));
    for (size_t rank = 1; rank < gpus.size(); ++rank) {
      expected += ToFloat(FromFloat<T>(ElementOf(static_cast<int>(rank), sum, at)));
    }
    const T rounded = FromFloat<T>(expected);
    if (std::memcmp(&found[i], &rounded, sizeof(T)) != 0) return false;
  }
  return true;
}

// One thread of one GPU. Kernels of a GPU follow each other, as on a stream.
template <typename T>
void RunThread(Gpu& gpu, int block, int thread, int sums, int seed, const std::string& fault) {
  threads::block.x = static_cast<unsigned>(block);
  threads::thread.x = static_cast<unsigned>(thread);
  threads::block_barrier = &gpu.blocks[block];
  threads::random_turns.seed(1 + seed + thread + 16 * block + 64 * gpu.call.group.rank);
  const bool is_last = gpu.call.group.rank + 1 == gpu.call.group.count;
  const int piece = block * kPeerThreads + thread;
  for (int sum = 0; sum < sums; ++sum) {
    if (fault == "late" && is_last && 2 * sum >= sums) return;
    pthread_barrier_wait(&gpu.stream);
    int pieces = PiecesOf(sum, seed);
    if (fault == "other" && is_last && 2 * sum >= sums) pieces ^= 1;
    if (block == 0 && thread == 0) gpu.call.pieces = pieces;
    if (piece < pieces) FillPiece<T>(gpu, sum, piece);
    pthread_barrier_wait(&gpu.stream);
    if (block * kPeerThreads < pieces) AllReduce<T>(gpu.call);
    if (piece < pieces && !IsSum<T>(gpu, sum, piece)) {
      std::printf("sum %d of rank %d is wrong\n", sum, gpu.call.group.rank);
      std::fflush(stdout);
      std::_Exit(1);
    }
  }
}

template <typename T>
void Run(int count, int sums, int seed, const std::string& fault) {
  gpus = std::vector<Gpu>(count);
  std::vector<std::vector<uint4>> memory(count);
  for (auto& one : memory) one.resize(PeerMemoryBytes(count) / sizeof(uint4));
  for (int rank = 0; rank < count; ++rank) {
    Gpu& gpu = gpus[rank];
    gpu.x.resize(kRoom / sizeof(uint4));
    gpu.y.resize(kRoom / sizeof(uint4));
    gpu.call.x = gpu.x.data();
    gpu.call.y = gpu.y.data();
    gpu.call.group = {rank, count,
                      uint64_t{fault == "late" || fault == "short" ? 1u : 60u} * 1000000000};
    gpu.call.group.failure = &gpu.failure;
    for (int peer = 0; peer < count; ++peer) {
      gpu.call.group.memory[peer] = reinterpret_cast<char*>(memory[peer].data());
    }
    pthread_barrier_init(&gpu.stream, nullptr, kBlocks * kThreads);
    for (pthread_barrier_t& one : gpu.blocks) pthread_barrier_init(&one, nullptr, kThreads);
  }
  std::vector<std::thread> running;
  for (Gpu& gpu : gpus) {
    for (int i = 0; i < kBlocks * kThreads; ++i) {
      running.emplace_back([&gpu, i, sums, seed, &fault] {
        RunThread<T>(gpu, i / kThreads, i % kThreads, sums, seed, fault);
      });
    }
  }
  for (std::thread& one : running) one.join();
}

}  // namespace

// A kernel has ended with an error: prints what it has written for the host.
void threads::End() {
  for (const Gpu& gpu : gpus) {
    const uint32_t reason = gpu.failure.reason;
    if (reason == PeerFailure::kNone) continue;
    std::printf("rank %d and rank %u: %s\n", gpu.call.group.rank, gpu.failure.peer,
                reason == PeerFailure::kTimeout ? "timeout" : "mismatch");
    break;
  }
  std::fflush(stdout);
  std::_Exit(3);
}

int main(int count, char** arguments) {
  const int number = std::atoi(arguments[1]), sums = std::atoi(arguments[2]);
  const int seed = std::atoi(arguments[3]);
  const std::string fault = count > 4 ? arguments[4] : "";
  Run<float>(number, sums, seed, fault);
  Run<__nv_bfloat16>(number, sums, seed, fault);
  std::puts("equal");
}
