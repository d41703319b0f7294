// Prepares the heads of new tokens for attention. It normalizes query heads and key heads, rotates
// them, and writes keys and values into the cache, which is changed in place.
//
//   qkv [b, t, (n + 2m) d] -> q [b, t, n, d], keys and values [b, m, s, d]
//
// With gates, qkv is [b, t, (2n + 2m) d], and the gate of each query head follows it. Each step
// rounds to the type of the heads, as the jnp expressions of ops/heads.py do. For a cache in
// E4M3, keys and values are rounded once more, as round_fp8 of numerics/fp8.py does. Tokens at
// positions outside of the cache are not written.
//
// A work item is one token. All of its heads share the sines of its position, which XLA computes
// again for each head. The arithmetic is PrepareHead in elementwise.h.
//
// Test: tests/ops/test_heads.py. Reference: ops/heads.py.
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
    if (p_.k_scale != nullptr) return WriteE4M3(source, first);
    for (int64_t head = 0; head < shape.m; ++head, source += bytes) {
      const int64_t at = (first + head * shape.s) * bytes;
      Prepare(source, p_.k_weight, static_cast<uint8_t*>(p_.keys) + at);
      std::memcpy(static_cast<uint8_t*>(p_.values) + at, source + shape.m * bytes, bytes);
    }
  }

 private:
  // Writes the keys and values of a cache in E4M3, of which those of head 0 are at `first`.
  void WriteE4M3(const uint8_t* source, int64_t first) const {
    const HeadsShape& shape = p_.shape;
    const int64_t bytes = 2 * shape.d;
    for (int64_t head = 0; head < shape.m; ++head, source += bytes) {
      const int64_t at = (first + head * shape.s) * shape.d;
      const E4M3Rounding key = RoundingOf(p_.k_scale[head]);
      const E4M3Rounding value = RoundingOf(p_.v_scale[head]);
      Prepare(source, p_.k_weight, static_cast<uint8_t*>(p_.keys) + at, &key);
      kernels_.prepare_head({source + shape.m * bytes, p_.type, nullptr, p_.weight_type, shape.d, 0,
                             nullptr, nullptr, p_.eps, p_.rotates_first, &value},
                            static_cast<uint8_t*>(p_.values) + at);
    }
  }

  E4M3Rounding RoundingOf(float scale) const {
    return MakeE4M3Rounding(E4M3Factor(scale, p_.multiply_by_reciprocal),
                            p_.multiply_by_reciprocal);
  }

  void Prepare(const uint8_t* source, const void* weight, uint8_t* target,
               const E4M3Rounding* rounding = nullptr) const {
    kernels_.prepare_head({source, p_.type, weight, p_.weight_type, p_.shape.d, p_.shape.half,
                           cosine_, sine_, p_.eps, p_.rotates_first, rounding},
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
