// The products of attention with AVX-512's instructions for bfloat16 (attention_block.h).
//
// Bottleneck: vdpbf16ps if a block has many queries, reading keys and values if it has few. Intel's
// CPUs multiply half as many numbers in a cycle by vdpbf16ps as by float32 instructions. Most of
// those that have it also have AMX.
//
// Test: tests/ops/test_attention_cpu.py.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "../nvfp4.h"
#include "attention.h"
#include "experts.h"
#include "kernels.h"

// GCC 12 warns inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")

#include "panel_avx512.h"

namespace nvfp4::cpu {
namespace {

struct Products {
  static constexpr int64_t kDepth = 2;

  explicit Products(int64_t) {}

  template <bool kAdd>
  void Multiply(const uint8_t* panel, int64_t k, const uint8_t* x, int64_t stride, int64_t count,
                float* out, int64_t out_stride) const {
    MultiplyRows<BFloat16Panel, kAdd>(panel, k, x, stride, count, out, out_stride);
  }
};

}  // namespace
}  // namespace nvfp4::cpu

#include "attention_block.h"  // after Products, which it needs

#pragma GCC reset_options

namespace nvfp4::cpu {

const AttentionKernels kAttentionAvx512 = {kAvx512Kernels.supported, ScratchBytes, Attend,
                                           MergeSums};

}  // namespace nvfp4::cpu

#endif  // defined(__x86_64__)
