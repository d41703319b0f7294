// The functions that the bindings call, one for each op. All pointers are row-major arrays with the
// shapes of the FFI signatures in cpu_bindings.cc. A null pointer stands for an operand that is
// left out. What Python must know before a call stands in the tables at the end.
#pragma once

#include <cstdint>

#include "../facts.h"
#include "../shapes.h"
#include "attention.h"
#include "kernels.h"
#include "phases.h"
#include "workspace_rounds.h"

namespace nvfp4::cpu {

struct MoEArguments {
  const void* x;
  const uint8_t* gate_up_packed;
  const uint8_t* gate_up_block_scale;
  const float* gate_up_global_scale;
  const float* gate_up_input_scale;
  const float* gate_up_bias;
  const uint8_t* down_packed;
  const uint8_t* down_block_scale;
  const float* down_global_scale;
  const float* down_input_scale;
  const float* down_bias;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* y;
  uint8_t* workspace;
  int64_t workspace_bytes;
  DataType type;
  ActivationParameters activation;
  ActivationScale activation_scale;
  bool weight_on_input;
};

// Returns the bytes of workspace that a layer needs to process `tokens` of its tokens in one round.
int64_t MoEW4A16CpuWorkspace(const MoEShape& shape, const MoEArguments& arguments,
                             const Kernels& kernels, int64_t tokens);

// Returns false if the workspace is too small for a single token.
bool RunMoEW4A16Cpu(const MoEShape& shape, const MoEArguments& arguments, const Kernels& kernels,
                    ThreadPool& pool);

struct GroupedGemmArguments {
  const void* x;
  const uint8_t* packed;
  const uint8_t* block_scale;
  const float* global_scale;
  const float* input_scale;
  const float* bias;
  const int32_t* group_sizes;
  void* y;
  uint8_t* workspace;
  int64_t workspace_bytes;
  DataType type;
  ActivationScale activation_scale;
};

// Returns the bytes of workspace that a grouped GEMM needs to process `rows` of its rows in one
// round.
int64_t GroupedGemmW4A16CpuWorkspace(const GroupedGemmShape& shape,
                                     const GroupedGemmArguments& arguments, const Kernels& kernels,
                                     int64_t rows);

// Returns false if the workspace is too small for a single row.
bool RunGroupedGemmW4A16Cpu(const GroupedGemmShape& shape, const GroupedGemmArguments& arguments,
                            const Kernels& kernels, ThreadPool& pool);

struct TransposedGemmArguments {
  const void* x;
  const uint8_t* packed;
  const uint8_t* block_scale;
  const float* global_scale;
  const int32_t* group_sizes;
  void* y;
  uint8_t* workspace;
  int64_t workspace_bytes;
  DataType type;
  int64_t m, e, n, k;
};

// Returns the bytes of workspace that a product with transposed weights needs to process `rows` of
// its rows in one round.
int64_t TransposedGemmCpuWorkspace(const TransposedGemmArguments& arguments, const Kernels& kernels,
                                   int64_t rows);

// Returns false if the workspace is too small for a single row.
bool RunTransposedGemmCpu(const TransposedGemmArguments& arguments, const Kernels& kernels,
                          ThreadPool& pool);

struct QuantizeArguments {
  const void* x;  // [m, k]
  DataType type;
  int64_t m;
  int64_t k;
  const float* global_scale;  // if null, amax(x) / 2688
  bool swizzle;               // scales in the 128x4 order, padded with zeros; otherwise [m, k/16]
  uint8_t* packed;
  uint8_t* block_scale;
  float* used_scale;  // receives the global scale
};

struct DenseArguments {
  const float* x;          // [m, k]
  const uint16_t* weight;  // bfloat16 [n, k]
  float* y;                // [m, n]
  int64_t m;
  int64_t n;
  int64_t k;
};

struct AttentionArguments {
  const uint16_t* q;         // bfloat16 [b, t, n, d]
  const uint16_t* k;         // bfloat16 [b, m, s, d]
  const uint16_t* v;         // bfloat16 [b, m, s, v_stride], of which dv columns are used
  const int32_t* positions;  // [b, t], none of them negative
  const float* sinks;        // [n]
  uint16_t* y;               // bfloat16 [b, t, n, dv]
  int64_t b, t, n, m, s, d, dv, v_stride;
  float scale;
  int64_t window, chunk;  // 0 for none
};

struct HeadsArguments {
  HeadsShape shape;
  DataType type;             // of heads; kBF16 or kF16. The cache has it too, or kE4M3
  DataType weight_type;      // `type` or kF32
  const void* qkv;           // [b, t, (n + 2m) d], or (2n + 2m) d with gates
  const int32_t* positions;  // [b, t]; any value
  const void* q_weight;      // [d], or null without norms; k_weight likewise
  const void* k_weight;
  const float* frequencies;  // [half]
  void* q;                   // [b, t, n, d]
  void* keys;                // [b, m, s, d], in place; values likewise
  void* values;
  float eps, rotation_scale;
  bool rotates_first, gated;
  const float* k_scale;         // [m], by which keys in E4M3 are divided; null for another cache
  const float* v_scale;         // [m], likewise
  bool multiply_by_reciprocal;  // how to round to E4M3: E4M3Rounding in nvfp4.h
};

void RunHeadsCpu(const HeadsArguments& arguments, const Kernels& kernels, ThreadPool& pool);

void RunAttentionCpu(const AttentionArguments& arguments, const AttentionKernels& kernels,
                     ThreadPool& pool);

void RunDenseCpu(const DenseArguments& arguments, const Kernels& kernels, ThreadPool& pool);

void RunQuantizeCpu(const QuantizeArguments& arguments, const Kernels& kernels, ThreadPool& pool);

// What Python reads (facts.h).

constexpr SizesFact kSizes[] = {
    {"PREPARED_WIDTHS", 0, kMaxPreparedWidth, 1},
};

constexpr WorkspaceRowsFact kWorkspaceRows[] = {
    {"nvfp4_moe_w4a16_cpu", "top_k e h i gated itemsize",
     [](const int64_t* s) { return MoEW4A16CpuRounds(s[0], s[1], s[2], s[3], TypeOfSize(s[5])); }},
    {"nvfp4_grouped_gemm_w4a16_cpu", "e n k itemsize",
     [](const int64_t* s) { return GroupedGemmW4A16CpuRounds(s[0], s[2], TypeOfSize(s[3])); }},
    {"nvfp4_transposed_gemm_cpu", "e k n",
     [](const int64_t* s) { return TransposedGemmCpuRounds(s[0], s[2]); }},
};

constexpr WorkspaceFact kWorkspaces[] = {
    {"nvfp4_quantize_cpu", "searches", [](const int64_t*) { return int64_t{0}; }},
};

}  // namespace nvfp4::cpu
