// Sets up the GEMMs of the engines: what expert layers and grouped GEMMs share.
#pragma once

#include <algorithm>

#include "cuda/epilogues/combine.cuh"
#include "cuda/gemm/expert_gemm.cuh"
#include "cuda/launch.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/quantizers/elements.cuh"
#include "cuda/routing/group_rows.cuh"
#include "cuda/routing/sort_by_expert.cuh"
#include "cuda/workspace.h"

namespace nvfp4 {

// The chunk of tokens that begins at `first`.
struct TokenChunk {
  const void* x;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* y;
  int64_t tokens;
  int64_t slots;
};

inline TokenChunk MakeTokenChunk(const MoECall& call, const MoEBuffers& buffers, int64_t first) {
  const MoEShape& shape = call.shape;
  const int64_t tokens = std::min(ChunkTokens(shape), shape.t - first);
  const int64_t bytes = first * shape.h * Bytes(call.type);
  return {static_cast<const uint8_t*>(buffers.x) + bytes,
          buffers.expert_ids + first * shape.top_k,
          buffers.expert_weights + first * shape.top_k,
          static_cast<uint8_t*>(buffers.y) + bytes,
          tokens,
          tokens * shape.top_k};
}

struct LayerProducts {
  ExpertGemm up;
  ExpertGemm down;
};

// GEMM 1 gathers x and writes `activated` [slots, i] in sorted order. GEMM 2 writes `outputs`
// [slots, h] at their slots. Both have call.type, of 16 bits. GEMM 2 may read the schedule and its
// weights before GEMM 1 ends: GEMM 1 waits for the sort before it lets GEMM 2 start.
inline LayerProducts MakeLayerProducts(const MoECall& call, const MoEBuffers& buffers,
                                       const TokenChunk& chunk, const ProductTables& tables,
                                       const GemmKernel& kernel, void* activated, void* outputs) {
  const MoEShape& shape = call.shape;
  ExpertGemm up = {};
  up.rows = tables.rows;
  up.rule = kernel.rule;
  up.partial_sums = tables.partial_sums;
  up.type = call.type;
  up.left = {chunk.x,
             tables.rows.slots,
             static_cast<int32_t>(shape.top_k),
             static_cast<int32_t>(chunk.tokens),
             nullptr,
             nullptr};
  up.weight = buffers.gate_up;
  up.bias_rows = static_cast<int32_t>(shape.n1);
  up.parts = call.activation.gated ? 2 : 1;
  up.k = static_cast<int32_t>(shape.h);
  up.columns = static_cast<int32_t>(shape.i);
  up.activate = true;
  up.activation = call.activation;
  up.output = {activated, call.type, nullptr};
  up.schedule = MakeTileSchedule(kernel, up, tables.starts[0], tables.ready[0]);

  ExpertGemm down = up;
  down.schedule_is_unchanged = true;
  down.left = {activated, nullptr, 1, static_cast<int32_t>(chunk.slots), nullptr, nullptr};
  down.weight = buffers.down;
  down.bias_rows = up.k;
  down.parts = 1;
  down.k = up.columns;
  down.columns = up.k;
  down.activate = false;
  down.output = {outputs, call.type, tables.rows.slots};
  down.schedule = MakeTileSchedule(kernel, down, tables.starts[1], tables.ready[1]);
  return {up, down};
}

inline cudaError_t LaunchSort(cudaStream_t stream, const MoECall& call, const TokenChunk& chunk,
                              const LayerProducts& products) {
  return LaunchSortByExpert(stream, chunk.expert_ids, chunk.slots, call.shape.e, products.up.rows,
                            products.up.rule,
                            TileSchedules{2, {products.up.schedule, products.down.schedule}});
}

// Returns what combining a chunk needs besides the outputs of GEMM 2.
inline CombineTokens MakeCombineTokens(const MoECall& call, const TokenChunk& chunk) {
  const MoEShape& shape = call.shape;
  return {chunk.expert_ids,
          call.weight_on_input ? nullptr : chunk.expert_weights,
          chunk.y,
          chunk.tokens,
          static_cast<int32_t>(shape.h),
          static_cast<int32_t>(shape.top_k),
          static_cast<int32_t>(shape.e)};
}

// Combines the outputs of GEMM 2 into y, for one chunk.
inline cudaError_t LaunchCombineChunk(cudaStream_t stream, const MoECall& call,
                                      const TokenChunk& chunk, const void* outputs) {
  return LaunchCombineOutputs(stream, call.type, MakeCombineTokens(call, chunk), outputs);
}

// The chunk of rows of a grouped GEMM that begins at `first`.
struct RowChunk {
  const uint8_t* x;
  uint8_t* y;
  int64_t first;
  int64_t rows;
};

// Calls launch(chunk) for each chunk of rows in order, until one fails.
template <typename Function>
cudaError_t ForRowChunks(const GroupedGemmCall& call, const GroupedGemmBuffers& buffers,
                         const Function& launch) {
  const GroupedGemmShape& shape = call.shape;
  const int64_t step = EngineChunkRows(shape), bytes = Bytes(call.type);
  for (int64_t first = 0; first < shape.m; first += step) {
    const RowChunk chunk = {static_cast<const uint8_t*>(buffers.x) + first * shape.k * bytes,
                            static_cast<uint8_t*>(buffers.y) + first * shape.n * bytes, first,
                            std::min(step, shape.m - first)};
    NVFP4_RETURN_IF_CUDA_ERROR(launch(chunk));
  }
  return cudaSuccess;
}

// The grouped GEMM of a chunk of rows. LaunchTables must run first.
inline ExpertGemm MakeGroupedProduct(const GroupedGemmCall& call, const GroupedGemmBuffers& buffers,
                                     const RowChunk& chunk, const ProductTables& tables,
                                     const GemmKernel& kernel) {
  const GroupedGemmShape& shape = call.shape;
  ExpertGemm gemm = {};
  gemm.rows = tables.rows;
  gemm.rule = kernel.rule;
  gemm.partial_sums = tables.partial_sums;
  gemm.type = call.type;
  gemm.left = {chunk.x, nullptr, 1, static_cast<int32_t>(chunk.rows), nullptr, nullptr};
  gemm.weight = buffers.weight;
  gemm.bias_rows = static_cast<int32_t>(shape.n);
  gemm.parts = static_cast<int32_t>(shape.parts);
  gemm.k = static_cast<int32_t>(shape.k);
  gemm.columns = static_cast<int32_t>(shape.n);
  gemm.output = {chunk.y, call.type, nullptr};
  gemm.schedule = MakeTileSchedule(kernel, gemm, tables.starts[0], tables.ready[0]);
  return gemm;
}

inline cudaError_t LaunchTables(cudaStream_t stream, const GroupedGemmCall& call,
                                const GroupedGemmBuffers& buffers, const RowChunk& chunk,
                                const ExpertGemm& gemm) {
  const GroupedGemmShape& shape = call.shape;
  return LaunchGroupTiles(stream, buffers.group_sizes, chunk.first, chunk.rows, shape.e, gemm.rows,
                          gemm.rule, TileSchedules{1, {gemm.schedule, {}}},
                          {chunk.y, shape.n * Bytes(call.type)});
}

}  // namespace nvfp4
