// Sizes and options of the ops, as plain data: what a binding decodes and a kernel reads.
//
// Letters are those of the Python side: t tokens, k the reduction of a product, e experts,
// h hidden, i intermediate, m rows, n outputs. No XLA and no CUDA here.
#pragma once

#include <cstdint>
#include <string_view>

namespace nvfp4 {

enum class DataType { kBF16, kF16, kF32 };

constexpr int64_t Bytes(DataType type) { return type == DataType::kF32 ? 4 : 2; }

// What happens to a product's left operand: W4A16, or one of the two forms of W4A4.
enum class ActivationScale {
  kNone,    // used as it is
  kStatic,  // quantized to NVFP4 under input_scale[expert]
  kToken,   // quantized to NVFP4 under amax(row) / 2688
};

enum class Activation { kSilu, kGelu, kGeluTanh, kSwigluOai, kRelu2 };

// A name that the attribute `activation` may have. Gated: act(gate) * up, with 2i rows in
// gate_up; interleaved: these rows alternate gate, up.
struct ActivationRecord {
  std::string_view name;
  Activation kind;
  bool gated;
  bool interleaved;
};

constexpr ActivationRecord kActivations[] = {
    {"silu", Activation::kSilu, true, false},
    {"gelu", Activation::kGelu, true, false},
    {"gelu_tanh", Activation::kGeluTanh, true, false},
    {"swigluoai", Activation::kSwigluOai, true, true},
    {"swigluoai_uninterleave", Activation::kSwigluOai, true, false},
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

// act(g, u), after g = min(g, limit), u = clip(u, -limit, limit):
//   silu g sigmoid(g) u;  gelu, gelu_tanh likewise;  swigluoai g sigmoid(alpha g) (u + beta);
//   relu2 max(g, 0)^2;  not gated: without u.  limit = +inf clamps nothing.
struct ActivationParameters {
  Activation kind;
  bool gated;
  bool interleaved;
  float alpha;
  float beta;
  float limit;
};

// y[t] = sum_j weight[t, j] * down(act(gate_up(x[t]))) over the experts of token t.
struct MoEShape {
  int64_t t;      // tokens
  int64_t top_k;  // experts of a token
  int64_t e;      // experts
  int64_t h;      // hidden
  int64_t i;      // intermediate
  int64_t n1;     // rows of gate_up: 2i gated, i not

  int64_t slots() const { return t * top_k; }
};

// y[r] = W[expert of r] @ x[r], rows sorted by expert.
struct GroupedGemmShape {
  int64_t m;      // rows
  int64_t n;      // outputs
  int64_t n_pad;  // rows that the weight layout stores, n rounded up
  int64_t k;      // reduction
  int64_t e;      // experts
  int64_t parts;  // global scales of an expert: row r uses part r * parts / n
};

}  // namespace nvfp4
