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

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  ucontext_t context;  // where it starts
  jmp_buf place;       // where it goes on; unlike swapcontext, jumps make no system call
  bool started;
  State state;
};

jmp_buf scheduler;
std::vector<Fiber> fibers;
std::vector<char> stacks;
const std::function<void()>* kernel;

[[gnu::noinline]] void Switch(State state) {
  Fiber& self = fibers[thread];
  self.state = state;
  if (_setjmp(self.place) == 0) _longjmp(scheduler, 1);
}

[[gnu::noinline]] void Resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
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

void RunBlock(int threads, bool backwards) {
  Start(threads);
  int idle = 0;
  for (int done = 0; done < threads;) {
    const long before = progress;
    for (int i = 0; i < threads; ++i) {
      thread = backwards ? threads - 1 - i : i;
      if (fibers[thread].state == State::kReady) Resume(fibers[thread]);
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

unsigned thread, block;
dim3 grid;
uint64_t words[kMaxWarps][kWarp][kWords];
Fragments fragments[kMaxWarps];
long progress;
uint8_t dynamic[1 << 18] __attribute__((aligned(1024)));
int dynamic_bytes;
bool backwards;

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
  _mm_setcsr(rounding & ~0x8040u);  // keeps subnormals, as a device does
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
