// Chooses the template of a kernel that computes in the type of a call.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "shapes.h"

namespace nvfp4 {

// Returns function(T()), where T is bf16 or f16. Other types are an error.
template <typename Function>
cudaError_t CallWithHalf(DataType type, const Function& function) {
  if (type == DataType::kBF16) return function(__nv_bfloat16());
  if (type == DataType::kF16) return function(__half());
  return cudaErrorInvalidValue;
}

// As CallWithHalf, and T may be f32.
template <typename Function>
cudaError_t CallWithType(DataType type, const Function& function) {
  return type == DataType::kF32 ? function(float()) : CallWithHalf(type, function);
}

}  // namespace nvfp4
