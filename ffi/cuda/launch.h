// What cuda_bindings.cc may ask of the CUDA files: plain pointers in, an error code out.
//
// Every function only launches kernels and fills on `stream`: no allocation, no copy to the host,
// no synchronisation, so all of them can be captured in a CUDA graph. Pointers are device pointers,
// row-major, aligned to 16 bytes. Nothing here depends on values that live on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "shapes.h"

namespace nvfp4 {

// More experts than any known model; sort_by_expert.cu keeps 16 counters of each in shared memory.
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 32;
// Rows and tiles are counted, and k and n indexed, in 32 bits; n is also cut into 65535 tiles.
constexpr int64_t kMaxRows = 1 << 30;
constexpr int64_t kMaxExtent = 1 << 22;

// Packed weights of all experts in the engine's layout, "fp4_64x64" for kSm120 and "mma_64x64" for
// the others; gate_up in that for two halves, "..._gated", where gated.
struct ExpertWeights {
  const uint8_t* packed;       // [e, rows, k/2]
  const uint8_t* block_scale;  // [e, rows, k/16] E4M3
  const float* global_scale;   // [e, parts]
  const float* input_scale;    // [e], read where activations are quantized under kStatic
  const float* bias;           // [e, rows] or null
};

struct MoEBuffers {
  const void* x;  // [t, h]
  ExpertWeights gate_up;
  ExpertWeights down;
  const int32_t* expert_ids;    // [t, top_k], any value
  const float* expert_weights;  // [t, top_k]
  void* y;                      // [t, h]
  void* workspace;              // MoEWorkspaceBytes
};

// Of the products in expert_gemm_sm*.cu and fp4_gemm_sm100.cu. For what the first two do not do
// there are the plain kernels (plain_gemm.cu), which read the same layouts.
enum class EngineKind { kSm80, kSm90, kSm100, kSm120 };

struct MoECall {
  MoEShape shape;
  DataType type;  // of x and y
  ActivationParameters activation;
  ActivationScale activation_scale;
  bool weight_on_input;
  EngineKind engine;

  // Without choices or without experts the layer's output is zeros, and no kernel runs: most of
  // them divide by top_k, or search the rows of experts.
  bool is_empty() const { return shape.slots() == 0 || shape.e == 0; }
  int64_t output_bytes() const { return shape.t * shape.h * Bytes(type); }
};

// Same formula as backends/cuda.py; a test compares the two.
int64_t MoEWorkspaceBytes(const MoEShape& shape, DataType type);
cudaError_t LaunchMoE(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

// The same on call.engine; call.type is bf16 or f16, activations are not quantized, and h and i are
// at most kMaxEngineExtent: a row of a chunk is found by 32 bits, in units of 16 bytes.
constexpr int64_t kMaxEngineExtent = 1 << 18;
int64_t MoEW4A16WorkspaceBytes(const MoEShape& shape);
cudaError_t LaunchMoEW4A16(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

// The same on FP4 tensor cores, call.engine kSm120: activations are quantized. Needs HasSm120.
int64_t MoEW4A4WorkspaceBytes(const MoEShape& shape);
cudaError_t LaunchMoEW4A4(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

// Whether this build has code of that engine for the current device.
bool HasSm120();

// Bytes of shared memory that a block needs. The first three are those of the largest kernel of an
// engine. The last is that of the kernel for few slots, which takes a layer only where the device
// has that much (expert_gemm_few.cuh). backends/cuda.py has the same numbers; tests compare them.
int64_t MaxSharedBytesSm80();
int64_t MaxSharedBytesSm90();
int64_t MaxSharedBytesSm120();
int64_t FewSlotsSharedBytes(int64_t slots, int64_t slots_per_row, int64_t k, bool rounds);

// The same in W4A4 by FP4 tensor cores of compute capability 10.x. Weights are in the layout
// "fp4_128x64", call.type is bf16 and activations are quantized.
constexpr int64_t kMaxChunkSlots = 65536;  // that go through at once
int64_t MoEW4A4Sm100WorkspaceBytes(const MoEShape& shape);
cudaError_t LaunchMoEW4A4Sm100(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

struct GroupedGemmBuffers {
  const void* x;  // [m, k], rows sorted by expert
  ExpertWeights weight;
  const int32_t* group_sizes;  // [e], any value: negative is 0, the sum is clipped to m
  void* y;                     // [m, n], rows past the sum become zeros
  void* workspace;             // GroupedGemmWorkspaceBytes
};

struct GroupedGemmCall {
  GroupedGemmShape shape;
  DataType type;  // of x and y
  ActivationScale activation_scale;
  EngineKind engine;

  // Without experts no row has an owner, so that the output is zeros and no kernel runs.
  bool is_empty() const { return shape.m == 0 || shape.n == 0 || shape.e == 0; }
  int64_t output_bytes() const { return shape.m * shape.n * Bytes(type); }
};

int64_t GroupedGemmWorkspaceBytes(const GroupedGemmShape& shape);
cudaError_t LaunchGroupedGemm(cudaStream_t stream, const GroupedGemmCall& call,
                              const GroupedGemmBuffers& buffers);

// Rows that go through an engine at once, which bounds its workspace. The tile scheduler counts the
// cost of up to 2^18 rows, and the engines find a row by 32 bits, in units of 16 bytes.
inline int64_t EngineChunkRows(const GroupedGemmShape& shape) {
  constexpr int64_t kMaxRowsAtOnce = 1 << 18, kUnits = (int64_t{1} << 32) - 1;
  return std::min({shape.m, kMaxRowsAtOnce, kUnits / (shape.k / 8)});
}

// The same on call.engine; call.type is bf16 or f16, and n, k and parts are at most
// kMaxEngineExtent. m * k may be any.
int64_t GroupedGemmW4A16WorkspaceBytes(const GroupedGemmShape& shape);
cudaError_t LaunchGroupedGemmW4A16(cudaStream_t stream, const GroupedGemmCall& call,
                                   const GroupedGemmBuffers& buffers);

// The same on FP4 tensor cores; activations are quantized, m * k may be any.
int64_t GroupedGemmW4A4WorkspaceBytes(const GroupedGemmShape& shape);
cudaError_t LaunchGroupedGemmW4A4(cudaStream_t stream, const GroupedGemmCall& call,
                                  const GroupedGemmBuffers& buffers);

// The same as LaunchMoEW4A4Sm100 is of a layer; m * k and n * k are below 2^35.
int64_t GroupedGemmW4A4Sm100WorkspaceBytes(const GroupedGemmShape& shape);
cudaError_t LaunchGroupedGemmW4A4Sm100(cudaStream_t stream, const GroupedGemmCall& call,
                                       const GroupedGemmBuffers& buffers);

constexpr int kAmaxPartials = 256;

struct QuantizeCall {
  int64_t m, k;
  DataType type;       // of x
  bool swizzle_128x4;  // scales in tiles, padded with zeros; else [m, k/16]
};

struct QuantizeBuffers {
  const void* x;              // [m, k]
  const float* global_scale;  // [], or null: amax(x) / 2688
  uint8_t* packed;            // [m, k/2]
  uint8_t* block_scale;       // [m, k/16], or padded and swizzled
  float* used_scale;          // [], the global scale
  uint32_t* partials;         // [kAmaxPartials], scratch where global_scale is null
};

cudaError_t LaunchQuantize(cudaStream_t stream, const QuantizeCall& call,
                           const QuantizeBuffers& buffers);

enum class RouterScore { kSoftmax, kSigmoid, kSqrtSoftplus };

// What a `Router` of routing.py asks of its logits.
struct RouterCall {
  int64_t t;
  int32_t e, top_k, num_groups, groups_kept;
  RouterScore score;
  bool select_logits;  // choose by logit, and score only the chosen ones
  bool renormalize;
  float scaling;
};

struct RouterBuffers {
  const float* logits;    // [t, e]
  const float* bias;      // [e] or null
  int32_t* expert_ids;    // [t, top_k], best first
  float* expert_weights;  // [t, top_k]
};

cudaError_t LaunchRoute(cudaStream_t stream, const RouterCall& call, const RouterBuffers& buffers);

}  // namespace nvfp4
