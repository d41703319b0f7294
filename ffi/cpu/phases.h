// Runs work in phases on a thread pool that belongs to XLA, without ever waiting for the pool.
//
//   RunPhases(pool, count, items, body)   calls body(phase, item) for item in [0, items(phase));
//                                         each phase ends before the next one begins
//
// The calling thread takes items as the threads of the pool do. It only waits for items that some
// thread has already begun. A call therefore ends even if the pool never runs one of its tasks.
// Many calls can share a pool whose threads are all inside such calls. A task that starts late
// finds that the work is done, and leaves without touching the memory of the caller.
//
// The result of an item must not depend on the thread that runs it; then results do not depend on
// the number of threads.
#pragma once

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nvfp4::cpu {

class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  virtual int64_t NumThreads() = 0;
  virtual void Schedule(std::function<void()> task) = 0;
};

// Sets the thread to round to nearest and to keep subnormals, and restores its settings at the end.
// XLA may have set FTZ and DAZ, which would flush subnormals to zero.
class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class PhaseState {
 public:
  using Items = std::function<int64_t(int64_t phase)>;
  using Body = std::function<void(int64_t phase, int64_t item)>;

  PhaseState(int64_t count, const Items* items, const Body* body)
      : count_(count), items_(items), body_(body) {
    Open(0);
  }

  // Takes items until the last phase has ended.
  void Work() {
    DefaultFloatEnvironment environment;
    int spins = 0;
    uint64_t now = taken_.load(std::memory_order_acquire);
    while (Phase(now) != kFinished) {
      if (Next(now) >= Count(now)) {  // all items are taken: wait until they are done
        ++spins < kSpins ? Pause() : std::this_thread::yield();
        now = taken_.load(std::memory_order_acquire);
      } else if (taken_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
        (*body_)(Phase(now), Next(now));
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == Count(now)) Open(Phase(now) + 1);
        spins = 0;
        now = taken_.load(std::memory_order_acquire);
      }
    }
  }

 private:
  // One word holds the phase, the number of items of the phase, and the next item. A thread that
  // was suspended during a change of phase cannot take an item of the wrong phase. The word has
  // changed, so that its compare-and-exchange fails.
  static constexpr int kBits = 24;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  static constexpr int64_t kFinished = 0xffff;
  static constexpr int kSpins = 4096;

  static int64_t Phase(uint64_t word) { return static_cast<int64_t>(word >> 2 * kBits); }
  static int64_t Count(uint64_t word) { return static_cast<int64_t>(word >> kBits & kMask); }
  static int64_t Next(uint64_t word) { return static_cast<int64_t>(word & kMask); }

  // Opens the next phase that has items. One thread calls it, when no item is taken.
  void Open(int64_t phase) {
    int64_t items = 0;
    while (phase < count_ && (items = (*items_)(phase)) == 0) ++phase;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t tag = static_cast<uint64_t>(phase < count_ ? phase : kFinished);
    taken_.store(tag << 2 * kBits | static_cast<uint64_t>(items) << kBits,
                 std::memory_order_release);
  }

  const int64_t count_;
  const Items* items_;  // both live in the caller of RunPhases until the last phase has ended
  const Body* body_;
  std::atomic<uint64_t> taken_{0};
  std::atomic<int64_t> done_{0};
};

// Takes at most 65534 phases of at most 16 M items each.
inline void RunPhases(ThreadPool& pool, int64_t count, const PhaseState::Items& items,
                      const PhaseState::Body& body) {
  auto state = std::make_shared<PhaseState>(count, &items, &body);
  const int64_t threads = pool.NumThreads();
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([state] { state->Work(); });
  state->Work();
}

}  // namespace nvfp4::cpu
