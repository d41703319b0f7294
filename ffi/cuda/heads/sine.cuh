// Sine and cosine of an angle, without the table in local memory that CUDA's own functions need
// for large angles.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "nvfp4.h"

namespace nvfp4 {

struct SineCosine {
  float sine, cosine;
};

// Returns both with an error of about 1e-7, for angles of up to 2^20 in magnitude. For larger
// angles the results have no meaning, and stay in [-1, 1].
//
// pi / 2 is the sum of three numbers. The product with the first one is exact inside the fused
// multiply-add, and so is the difference, because both are multiples of 2^-23 and the difference is
// below 1. The polynomials are those of Cephes (S. Moshier, netlib.org/cephes, sinf.c).
NVFP4_HOST_DEVICE SineCosine SineAndCosine(float angle) {
  const float quarters = rintf(angle * 0.636619772f);  // angle / (pi / 2)
  float rest = fmaf(quarters, -1.57079637f, angle);
  rest = fmaf(quarters, 4.37113883e-8f, rest);
  rest = fmaf(quarters, 1.71512451e-15f, rest);
  rest = fminf(fmaxf(rest, -1.0f), 1.0f);
  const float square = rest * rest;
  float sine = fmaf(square, -1.9515295891e-4f, 8.3321608736e-3f);
  sine = fmaf(square, sine, -1.6666654611e-1f);
  sine = fmaf(rest * square, sine, rest);
  float cosine = fmaf(square, 2.443315711809948e-5f, -1.388731625493765e-3f);
  cosine = fmaf(square, cosine, 4.166664568298827e-2f);
  cosine = fmaf(square * square, cosine, fmaf(square, -0.5f, 1.0f));
  // The largest float below 2^31: larger numbers have no integer.
  const int quarter = static_cast<int>(fminf(fmaxf(quarters, -2147483520.0f), 2147483520.0f));
  const bool swapped = (quarter & 1) != 0;
  const float s = swapped ? cosine : sine, c = swapped ? sine : cosine;
  return {(quarter & 2) != 0 ? -s : s, ((quarter + 1) & 2) != 0 ? -c : c};
}

}  // namespace nvfp4
