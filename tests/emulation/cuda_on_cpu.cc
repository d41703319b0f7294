// Runs the threads of a block as fibers; see cuda_on_cpu.h.
#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <vector>

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int kIdleRounds = 1000;  // so many rounds without progress are a deadlock

enum class State { kReady, kAtClusterBarrier, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  ucontext_t context;  // where it starts
  jmp_buf place;       // where it goes on; unlike swapcontext, jumps make no system call
  bool started;        // whether `place` is set
  State state;
};

jmp_buf scheduler;
std::vector<Fiber> fibers;
std::vector<char> stacks;
const std::function<void()>* kernel;

[[gnu::noinline]] void Switch(State state) {
  Fiber& self = fibers[rank * block_threads + thread];
  self.state = state;
  if (_setjmp(self.place) == 0) _longjmp(scheduler, 1);
}

[[gnu::noinline]] void Resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// A fiber runs one thread of each block. Making it anew would cost two system calls.
void Enter() {
  while (true) {
    (*kernel)();
    ++progress;
    Switch(State::kDone);
  }
}

// Makes fibers for so many threads, with new stacks.
void MakeFibers(size_t threads) {
  fibers.resize(threads);
  stacks.resize(threads * kStackBytes);
  for (size_t i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + i * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, Enter, 0);
  }
}

// Opens the barrier `state` for the threads in [begin, end) if all that still run have reached it.
void Open(State state, int begin, int end) {
  for (int i = begin; i < end; ++i) {
    if (fibers[i].state != state && fibers[i].state != State::kDone) return;
  }
  for (int i = begin; i < end; ++i) {
    if (fibers[i].state == state) fibers[i].state = State::kReady;
  }
}

// Runs the blocks of a cluster, of which `first` is the first.
void RunCluster(unsigned first, int cluster, bool backwards) {
  const int block_size = static_cast<int>(block_threads), threads = cluster * block_size;
  for (int i = 0; i < threads; ++i) fibers[i].state = State::kReady;
  int idle = 0;
  for (int done = 0; done < threads;) {
    const long before = progress;
    for (int i = 0; i < threads; ++i) {
      const int fiber = backwards ? threads - 1 - i : i;
      rank = fiber / block_size;
      thread = fiber % block_size;
      block = first + rank;
      if (fibers[fiber].state == State::kReady) Resume(fibers[fiber]);
    }
    for (int warp = 0; warp < threads; warp += kWarp) {
      Open(State::kAtWarpBarrier, warp, std::min(warp + kWarp, threads));
    }
    for (int begin = 0; begin < threads; begin += block_size) {
      Open(State::kAtBlockBarrier, begin, begin + block_size);
    }
    Open(State::kAtClusterBarrier, 0, threads);
    done = 0;
    for (int i = 0; i < threads; ++i) done += fibers[i].state == State::kDone;
    idle = progress == before ? idle + 1 : 0;
    if (idle > kIdleRounds) Fail("deadlock");
  }
}

}  // namespace

unsigned thread, block, rank;
unsigned block_threads;
dim3 grid;
uint64_t words[kMaxWarps][kWarp][kWords];
Fragments fragments[kMaxWarps];
long progress;
bool has_waited[kMaxCluster];
int missed_waits;
uint8_t dynamic_of_all[kMaxCluster * kDynamicRoom] __attribute__((aligned(1024)));
int dynamic_bytes;
bool backwards;

void SyncCluster() {
  ++progress;
  Switch(State::kAtClusterBarrier);
}
void SyncBlock() {
  ++progress;
  Switch(State::kAtBlockBarrier);
}
void SyncWarp() {
  ++progress;
  Switch(State::kAtWarpBarrier);
}
void Yield() { Switch(State::kReady); }

void Run(dim3 blocks, int threads, bool overlaps, const std::function<void()>& body, int cluster) {
  if (blocks.x % cluster != 0) Fail("a grid that is not a multiple of the cluster");
  const unsigned rounding = _mm_getcsr();
  _mm_setcsr(rounding & ~0x8040u);  // keeps subnormals, as a device does
  kernel = &body;
  missed_waits = 0;
  grid = blocks;
  block_threads = threads;
  const size_t needed = static_cast<size_t>(cluster) * threads;
  if (fibers.size() < needed) MakeFibers(needed);
  for (unsigned first = blocks.x; first > 0;) {
    first -= cluster;
    std::fill(has_waited, has_waited + cluster, !overlaps);
    RunCluster(first, cluster, backwards);
    missed_waits += static_cast<int>(std::count(has_waited, has_waited + cluster, false));
  }
  _mm_setcsr(rounding);
}

}  // namespace emulation
