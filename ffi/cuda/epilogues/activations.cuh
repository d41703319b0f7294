// The activations of experts in float32. shapes.h has their names and clamps.
//
// The clamps are comparisons and not fminf and fmaxf, which drop a NaN: a NaN must reach the
// output.
#pragma once

#include <cmath>

#include "nvfp4.h"
#include "shapes.h"

namespace nvfp4 {

// On a device, the quotient has an error of up to 2 ulp. IEEE division would triple the code of an
// epilogue.
NVFP4_HOST_DEVICE float Sigmoid(float z) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, 1.0f + expf(-z));
#else
  return 1.0f / (1.0f + expf(-z));
#endif
}

NVFP4_HOST_DEVICE float AtMost(float value, float limit) { return value > limit ? limit : value; }
NVFP4_HOST_DEVICE float AtLeast(float value, float limit) { return value < limit ? limit : value; }

// Returns act(gate) without the factor `up`.
NVFP4_HOST_DEVICE float ActivateGate(const ActivationParameters& p, float gate) {
  const float g = AtMost(gate, p.gate_limit);
  switch (p.kind) {
    case Activation::kSilu:
      return g * Sigmoid(g);
    case Activation::kSwigluOai:
      return g * Sigmoid(p.alpha * g);
    // erfc keeps the relative accuracy of the negative tail; 1 + erf does not.
    case Activation::kGelu:
      return 0.5f * g * erfcf(-0.70710678118654752f * g);
    // (1 + tanh z) / 2 = sigmoid(2 z)
    case Activation::kGeluTanh:
      return g * Sigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g));
    case Activation::kRelu2:
      return g < 0.0f ? 0.0f : g * g;
  }
  return g;
}

NVFP4_HOST_DEVICE float ActivateGated(const ActivationParameters& p, float gate, float up) {
  // The gate comes first: in the other order, ptxas spills a register of expert_gemm_sm80.cu.
  const float act = ActivateGate(p, gate);
  const float u = AtLeast(AtMost(up, p.up_limit), -p.up_limit);
  return act * (p.kind == Activation::kSwigluOai ? u + p.beta : u);
}

}  // namespace nvfp4
