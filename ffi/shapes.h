// Sizes and options of the ops, as plain data. The bindings fill these structures from an FFI call,
// and the kernels read them. This file uses neither XLA nor CUDA.
//
// The letters are those of the Python side: t tokens, k reduction dimension of a GEMM, e experts, h
// hidden size, i intermediate size, m rows, n outputs. Where k stands beside t, as in expert_ids
// [t, k], it is the number of experts of a token.
#pragma once

#include <cstdint>
#include <string_view>

namespace nvfp4 {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class DataType { kBF16, kF16, kF32, kE4M3 };

// Returns a type of activations with elements of so many bytes. Both with 16 bits need the same
// memory.
constexpr DataType TypeOfSize(int64_t itemsize) {
  return itemsize == 4 ? DataType::kF32 : DataType::kBF16;
}

constexpr int64_t Bytes(DataType type) { return type == DataType::kF32 ? 4 : 2; }

// How a GEMM treats its activations: W4A16, or one of the two forms of W4A4.
enum class ActivationScale {
  kNone,    // not quantized
  kStatic,  // quantized to NVFP4 under input_scale[expert]
  kToken,   // quantized to NVFP4 under amax(row) / 2688
};

enum class Activation { kSilu, kGelu, kGeluTanh, kSwigluOai, kRelu2 };

// A value of the attribute `activation`. A gated activation computes act(gate) * up, and gate_up
// has 2i rows. If the activation is interleaved, gate rows and up rows alternate; otherwise all
// gate rows come first. If it bounds its result, `limit` is the largest act(gate) and not the
// largest gate.
struct ActivationRecord {
  std::string_view name;
  Activation kind;
  bool gated;
  bool interleaved;
  bool bounds_result = false;
};

constexpr ActivationRecord kActivations[] = {
    {"silu", Activation::kSilu, true, false},
    {"gelu", Activation::kGelu, true, false},
    {"gelu_tanh", Activation::kGeluTanh, true, false},
    {"swigluoai", Activation::kSwigluOai, true, true},
    {"swigluoai_uninterleave", Activation::kSwigluOai, true, false},
    {"swiglustep", Activation::kSilu, true, false, /*bounds_result=*/true},
    {"relu2", Activation::kRelu2, false, false},
    {"silu_no_mul", Activation::kSilu, false, false},
    {"gelu_no_mul", Activation::kGelu, false, false},
    {"gelu_tanh_no_mul", Activation::kGeluTanh, false, false},
};

struct ActivationScaleRecord {
  std::string_view name;
  ActivationScale kind;
};

constexpr ActivationScaleRecord kActivationScales[] = {
    {"none", ActivationScale::kNone},
    {"static", ActivationScale::kStatic},
    {"token", ActivationScale::kToken},
};

// The activation act(g, u), applied after g = min(g, gate_limit) and u = clip(u, -up_limit,
// up_limit):
//   silu       g sigmoid(g) u; gelu and gelu_tanh have the same form
//   swigluoai  g sigmoid(alpha g) (u + beta)
//   relu2      max(g, 0)^2
// An activation that is not gated has no factor u. A limit of +inf clamps nothing, and either both
// limits are infinite or none.
struct ActivationParameters {
  Activation kind;
  bool gated;
  bool interleaved;
  float alpha;
  float beta;
  float gate_limit;
  float up_limit;
};

// y[t] = sum_j weight[t, j] * down(act(gate_up(x[t]))) over the experts of token t.
struct MoEShape {
  int64_t t;      // number of tokens
  int64_t top_k;  // number of experts of each token
  int64_t e;      // number of experts
  int64_t h;      // hidden size
  int64_t i;      // intermediate size
  int64_t n1;     // rows of gate_up: 2i if gated, otherwise i

  int64_t slots() const { return t * top_k; }
};

// y[r] = W[e(r)] @ x[r], where e(r) is the expert of row r. Rows are sorted by expert.
struct GroupedGemmShape {
  int64_t m;      // rows
  int64_t n;      // outputs
  int64_t n_pad;  // rows that the weight layout stores: n, rounded up to whole tiles
  int64_t k;      // reduction dimension
  int64_t e;      // number of experts
  // The number of global scales of an expert: 1, 2 for the halves of its outputs, or n. Output j
  // uses number j * parts / n.
  int64_t parts;
};

// y[h] = softmax(scale * q[h] @ k[h / g].T) @ v[h / g], where g = n / m query heads share a key
// head.
struct AttentionShape {
  int64_t b;   // rows of the batch
  int64_t t;   // queries of a row
  int64_t n;   // query heads
  int64_t m;   // key heads
  int64_t s;   // keys of a row
  int64_t d;   // width of a key
  int64_t dv;  // width of a value

  int64_t group() const { return n / m; }
};

constexpr int64_t kMaxPreparedWidth = 256;  // of a head

// The heads that `prepare_heads` normalizes, rotates, and writes into a cache.
struct HeadsShape {
  int64_t b;     // rows of the batch
  int64_t t;     // new tokens of a row
  int64_t s;     // tokens that the cache has room for
  int64_t n;     // query heads
  int64_t m;     // key heads
  int64_t d;     // width of a head
  int64_t half;  // half of the channels that rotate; 0 for none
};

}  // namespace nvfp4
