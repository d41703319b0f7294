// Computes causal attention of new tokens to keys and values of all positions so far:
//   y[h] = softmax(scale * q[h] @ k[h / g].T) @ v[h / g], g = n / m
//
//   q          [b, t, n, d]            bf16
//   k          [b, m, s, d]            bf16
//   v          [b, m, s, dv or more]   bf16
//   positions  [b, t]                  int32
//   sinks      [n]                     float32; null for none
//   y          [b, t, n, dv]           bf16
//
// Sums and the softmax are float32. The query at position p sees keys up to p. A sink is a further
// score of its head, whose value is zero.
//
// A work item is a block of queries of one row and key head (attention.h). Large blocks share the
// panels that they pack. Smaller ones let all threads work. If there are few tokens, a block has
// few queries. Their keys are then cut into parts of a fixed size, so that all threads have work in
// a long context. A second phase merges the parts, in order.
//
// Test: tests/ops/test_attention_cpu.py. Reference: ops/causal_attention/meaning.py.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "experts.h"
#include "ops.h"

namespace nvfp4::cpu {
namespace {

constexpr int64_t kFewestRows = 128;   // most queries of a block, if there are many threads
constexpr int64_t kFewTokens = 8;      // tokens of a row up to which keys are cut into parts
constexpr int64_t kPartKeys = 1024;    // keys of a part
constexpr int64_t kPadding = 1 << 30;  // a token at this position or a later one is padding

class CausalAttention {
 public:
  CausalAttention(const AttentionArguments& arguments, const AttentionKernels& kernels,
                  int64_t threads)
      : p_(arguments), kernels_(kernels) {
    group_ = p_.n / p_.m;
    Cut(kAttentionRows);
    for (int64_t rows = kAttentionRows; rows > kFewestRows && blocks_ < 4 * threads; Cut(rows))
      rows /= 2;
    parts_ = p_.t <= kFewTokens ? std::max<int64_t>(1, CeilDivide(Filled(), kPartKeys)) : 1;
    rows_ = RoundUp(heads_ * tokens_, 16);
    part_floats_ = rows_ * (AttentionColumns(p_.dv) + 2);
  }

  void Run(ThreadPool& pool) {
    if (parts_ > 1) {
      partial_.reset(new float[blocks_ * parts_ * part_floats_]);  // not initialized
    }
    RunPhases(
        pool, parts_ > 1 ? 2 : 1,
        [this](int64_t phase) { return phase == 0 ? blocks_ * parts_ : blocks_; },
        [this](int64_t phase, int64_t item) { phase == 0 ? Compute(item) : Merge(item); });
  }

 private:
  struct Place {
    int64_t row, key_head, first_head, heads, first_token, tokens;
  };

  // Cuts the queries into blocks of at most `rows`.
  void Cut(int64_t rows) {
    heads_ = std::min(group_, rows);
    tokens_ = std::min(p_.t, rows / heads_);
    head_blocks_ = CeilDivide(group_, heads_);
    token_blocks_ = CeilDivide(p_.t, tokens_);
    blocks_ = p_.b * p_.m * head_blocks_ * token_blocks_;
  }

  // Returns the number of keys up to the last one that any query sees. A cache has room for more.
  int64_t Filled() const {
    int64_t filled = 0;
    for (int64_t i = 0; i < p_.b * p_.t; ++i) {
      const int64_t position = p_.positions[i];
      if (position < kPadding) filled = std::max(filled, std::min(p_.s, position + 1));
    }
    return filled;
  }

  // Late tokens see the most keys. They come first, so that threads end at about the same time.
  Place Find(int64_t block) const {
    const int64_t token = (token_blocks_ - 1 - block / (blocks_ / token_blocks_)) * tokens_;
    const int64_t rest = block % (blocks_ / token_blocks_);
    const int64_t head = rest % head_blocks_ * heads_;
    return {rest / head_blocks_ / p_.m,
            rest / head_blocks_ % p_.m,
            head,
            std::min(heads_, group_ - head),
            token,
            std::min(tokens_, p_.t - token)};
  }

  AttentionSums Sums(float* memory) const { return {memory, memory + rows_, memory + 2 * rows_}; }

  void Compute(int64_t item) const {
    const Place at = Find(item / parts_);
    const int64_t part = item % parts_, first = part * kPartKeys;
    const int64_t end = parts_ > 1 ? std::min(p_.s, first + kPartKeys) : p_.s;
    AttentionBlock block;
    block.rows = at.heads * at.tokens;
    block.d = p_.d;
    block.dv = p_.dv;
    block.k_stride = p_.d;
    block.v_stride = p_.v_stride;
    block.k = p_.k + (at.row * p_.m + at.key_head) * p_.s * p_.d;
    block.v = p_.v + (at.row * p_.m + at.key_head) * p_.s * p_.v_stride;
    block.scale = p_.scale;
    for (int64_t token = 0; token < at.tokens; ++token) {
      const int64_t query = at.row * p_.t + at.first_token + token, position = p_.positions[query];
      int64_t low = first, high = position < kPadding ? std::min(end, position + 1) : first;
      if (p_.window) low = std::max(low, position - p_.window + 1);
      if (p_.chunk) low = std::max(low, position / p_.chunk * p_.chunk);
      for (int64_t head = 0; head < at.heads; ++head) {
        const int64_t r = head * at.tokens + token;
        block.q[r] = p_.q + (query * p_.n + at.key_head * group_ + at.first_head + head) * p_.d;
        block.low[r] = low;
        block.high[r] = high;
      }
    }
    // Each thread keeps its memory for the next blocks and calls: less than a megabyte at
    // 128 channels.
    thread_local std::vector<uint8_t> memory;
    const int64_t scratch = kernels_.scratch_bytes(p_.d, p_.dv);
    const int64_t bytes = scratch + part_floats_ * static_cast<int64_t>(sizeof(float));
    if (static_cast<int64_t>(memory.size()) < bytes + kCacheLine) memory.resize(bytes + kCacheLine);
    uint8_t* aligned =
        memory.data() +
        (kCacheLine - reinterpret_cast<uintptr_t>(memory.data()) % kCacheLine) % kCacheLine;
    if (parts_ > 1) return kernels_.attend(block, Sums(Partial(item)), aligned);
    const AttentionSums sums = Sums(reinterpret_cast<float*>(aligned + RoundUp(scratch, 64)));
    kernels_.attend(block, sums, aligned);
    Store(at, sums);
  }

  void Merge(int64_t block) const { Store(Find(block), Sums(Partial(block * parts_))); }

  float* Partial(int64_t item) const { return partial_.get() + item * part_floats_; }

  void Store(const Place& at, const AttentionSums& sums) const {
    for (int64_t head = 0; head < at.heads; ++head) {
      const int64_t own = at.key_head * group_ + at.first_head + head;
      const float sink = p_.sinks ? p_.sinks[own] : -std::numeric_limits<float>::infinity();
      for (int64_t token = 0; token < at.tokens; ++token) {
        const int64_t query = at.row * p_.t + at.first_token + token;
        kernels_.merge_sums(sums, parts_, part_floats_, head * at.tokens + token, sink, p_.dv,
                            p_.y + (query * p_.n + own) * p_.dv);
      }
    }
  }

  const AttentionArguments& p_;
  const AttentionKernels& kernels_;
  int64_t group_, heads_, tokens_, head_blocks_, token_blocks_, parts_, blocks_;
  int64_t rows_, part_floats_;        // of AttentionSums
  std::unique_ptr<float[]> partial_;  // [blocks, parts, part_floats]
};

}  // namespace

void RunAttentionCpu(const AttentionArguments& arguments, const AttentionKernels& kernels,
                     ThreadPool& pool) {
  if (arguments.b * arguments.t * arguments.n * arguments.dv == 0) return;
  CausalAttention(arguments, kernels, pool.NumThreads()).Run(pool);
}

}  // namespace nvfp4::cpu
