// Chooses the kernels of an attention call.
#include "cuda/attention/attention.cuh"

namespace nvfp4 {

namespace {

// Whether the kernel for few rows can prepare the heads, too.
bool PreparesHeads(const AttentionShape& shape, const AttentionBuffers& buffers) {
  return shape.t == 1 && shape.group() <= 16 && shape.d == shape.dv && buffers.k_scale == nullptr;
}

}  // namespace

cudaError_t LaunchAttention(cudaStream_t stream, const AttentionCall& call,
                            const AttentionBuffers& buffers) {
  if (buffers.heads != nullptr && (call.is_empty() || !PreparesHeads(call.shape, buffers))) {
    NVFP4_RETURN_IF_CUDA_ERROR(
        LaunchPrepareHeads(stream, buffers.heads->call, buffers.heads->buffers));
    AttentionBuffers rest = buffers;
    rest.heads = nullptr;
    return LaunchAttention(stream, call, rest);
  }
  if (call.is_empty()) return cudaSuccess;
  if (buffers.k_scale != nullptr) return LaunchAttentionFp8(stream, call, buffers);
  if (buffers.heads == nullptr && ComputeCapabilityMajor() == 9 && FillsSm90(call.shape)) {
    return LaunchAttentionSm90(stream, call, buffers);
  }
  return LaunchAttentionSm80(stream, call, buffers);
}

}  // namespace nvfp4
