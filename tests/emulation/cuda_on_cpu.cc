// Fibers for the threads of a block; see cuda_on_cpu.h.
#include "cuda_on_cpu.h"

#include <ucontext.h>
#include <xmmintrin.h>

#include <vector>

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int kIdleRounds = 1000;  // without progress: a deadlock

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  ucontext_t context;
  State state;
};

ucontext_t scheduler;
std::vector<Fiber> fibers;
std::vector<char> stacks;
const std::function<void()>* kernel;
unsigned thread, block;
dim3 grid;
uint64_t words[kMaxWarps][kWarp][kWords];

void Switch(State state) {
  const unsigned self = thread;
  fibers[self].state = state;
  swapcontext(&fibers[self].context, &scheduler);
}

void Enter() {
  (*kernel)();
  ++progress;
  Switch(State::kDone);
}

void Start(int threads) {
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.state = State::kReady;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + i * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, Enter, 0);
  }
}

// Opens the barrier `state` for threads begin to end if all that still run are at it.
void Open(State state, int begin, int end) {
  for (int i = begin; i < end; ++i) {
    if (fibers[i].state != state && fibers[i].state != State::kDone) return;
  }
  for (int i = begin; i < end; ++i) {
    if (fibers[i].state == state) fibers[i].state = State::kReady;
  }
}

void RunBlock(int threads, bool backwards) {
  Start(threads);
  int idle = 0;
  for (int done = 0; done < threads;) {
    const long before = progress;
    for (int i = 0; i < threads; ++i) {
      thread = backwards ? threads - 1 - i : i;
      if (fibers[thread].state == State::kReady) swapcontext(&scheduler, &fibers[thread].context);
    }
    for (int warp = 0; warp < threads; warp += kWarp) {
      Open(State::kAtWarpBarrier, warp, std::min(warp + kWarp, threads));
    }
    Open(State::kAtBlockBarrier, 0, threads);
    done = 0;
    for (int i = 0; i < threads; ++i) done += fibers[i].state == State::kDone;
    idle = progress == before ? idle + 1 : 0;
    if (idle > kIdleRounds) Fail("deadlock");
  }
}

}  // namespace

long progress;
uint8_t dynamic[1 << 18] __attribute__((aligned(1024)));
int dynamic_bytes;
bool backwards;

unsigned Thread() { return thread; }
unsigned Block() { return block; }
unsigned Blocks() { return grid.x; }
uint64_t* WordsOf(unsigned warp, unsigned lane) { return words[warp][lane]; }

void SyncBlock() {
  ++progress;
  Switch(State::kAtBlockBarrier);
}
void SyncWarp() {
  ++progress;
  Switch(State::kAtWarpBarrier);
}
void Yield() { Switch(State::kReady); }

void Run(dim3 blocks, int threads, const std::function<void()>& body) {
  const unsigned rounding = _mm_getcsr();
  _mm_setcsr(rounding & ~0x8040u);  // subnormals, as on a device
  kernel = &body;
  grid = blocks;
  if (fibers.size() < static_cast<size_t>(threads)) {
    fibers.resize(threads);
    stacks.resize(threads * kStackBytes);
  }
  for (block = blocks.x; block-- > 0;) RunBlock(threads, backwards);
  _mm_setcsr(rounding);
}

}  // namespace emulation
