// The end of an expert layer: outputs of `down` to outputs of the layer; see combine.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "shapes.h"

namespace nvfp4 {

struct CombineRows {
  const void* down;             // [t, top_k, h]; slots that are not routed were never written
  const int32_t* expert_ids;    // [t, top_k]
  const float* expert_weights;  // [t, top_k]
  void* y;                      // [t, h]
  int64_t t;
  int32_t h, top_k, num_experts;
  bool weighted;
};

// y[t] = sum of weight * down[t, j] over j in order, in float32; weights of 1 where not `weighted`.
// Rows are bf16 or f16, h is a multiple of 16. May start before the kernel just before it ends,
// which must not be older than `down` and not newer than ids and weights.
cudaError_t LaunchCombine(cudaStream_t stream, DataType type, const CombineRows& rows);

}  // namespace nvfp4
