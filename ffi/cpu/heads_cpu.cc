// Prepares the heads of new tokens for attention. It normalizes query heads and key heads, rotates
// them, and writes keys and values into the cache, which is changed in place.
//
//   qkv [b, t, (n + 2m) d] -> q [b, t, n, d], keys and values [b, m, s, d]
//
// With gates, qkv is [b, t, (2n + 2m) d], and the gate of each query head follows it. Each step
// rounds to the type of the heads, as the jnp expressions of backends/heads.py do. Tokens at
// positions outside of the cache are not written.
//
// A work item is one token. All of its heads share the sines of its position, which XLA computes
// again for each head. The arithmetic is PrepareHead in elementwise.h.
//
// Test: tests/ops/test_heads.py. Reference: backends/heads.py.
#include <cmath>
#include <cstring>

#include "experts.h"
#include "ops.h"

namespace nvfp4::cpu {
namespace {

class TokenHeads {
 public:
  TokenHeads(const HeadsArguments& arguments, const Kernels& kernels, int64_t token)
      : p_(arguments), kernels_(kernels), token_(token), position_(p_.positions[token]) {
    for (int64_t i = 0; i < p_.shape.half; ++i) {
      const float angle = static_cast<float>(position_) * p_.frequencies[i];
      cosine_[i] = std::cos(angle) * p_.rotation_scale;
      sine_[i] = std::sin(angle) * p_.rotation_scale;
    }
  }

  void Run() const {
    const HeadsShape& shape = p_.shape;
    const int64_t step = p_.gated ? 2 : 1, bytes = 2 * shape.d;
    const auto* source =
        static_cast<const uint8_t*>(p_.qkv) + token_ * (step * shape.n + 2 * shape.m) * bytes;
    auto* q = static_cast<uint8_t*>(p_.q) + token_ * shape.n * bytes;
    for (int64_t head = 0; head < shape.n; ++head, source += step * bytes, q += bytes) {
      Prepare(source, p_.q_weight, q);
    }
    if (position_ < 0 || position_ >= shape.s) return;
    const int64_t first = token_ / shape.t * shape.m * shape.s + position_;
    for (int64_t head = 0; head < shape.m; ++head, source += bytes) {
      const int64_t at = (first + head * shape.s) * bytes;
      Prepare(source, p_.k_weight, static_cast<uint8_t*>(p_.keys) + at);
      std::memcpy(static_cast<uint8_t*>(p_.values) + at, source + shape.m * bytes, bytes);
    }
  }

 private:
  void Prepare(const uint8_t* source, const void* weight, uint8_t* target) const {
    kernels_.prepare_head({source, p_.type, weight, p_.weight_type, p_.shape.d, p_.shape.half,
                           cosine_, sine_, p_.eps, p_.rotates_first},
                          target);
  }

  const HeadsArguments& p_;
  const Kernels& kernels_;
  int64_t token_, position_;
  float cosine_[kMaxPreparedWidth / 2], sine_[kMaxPreparedWidth / 2];
};

}  // namespace

void RunHeadsCpu(const HeadsArguments& p, const Kernels& kernels, ThreadPool& pool) {
  RunPhases(
      pool, 1, [&](int64_t) { return p.shape.b * p.shape.t; },
      [&](int64_t, int64_t token) { TokenHeads(p, kernels, token).Run(); });
}

}  // namespace nvfp4::cpu
