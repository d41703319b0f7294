// The functions of the CUDA files that cuda_bindings.cc calls. They take plain pointers and return
// an error code. What Python must know before a call stands in the tables at the end.
//
// Each function only launches kernels and fills on `stream`. It does not allocate memory, copy to
// the host, or synchronize, so that a CUDA graph can capture it. What it launches does not depend
// on values in device memory. Pointers are device pointers to row-major arrays, aligned to 16
// bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/attention/splits.h"
#include "cuda/collectives/peer_memory.h"
#include "cuda/layers/workspaces.h"
#include "cuda/limits.h"
#include "cuda/recurrent/chunk_sizes.h"
#include "cuda/runtime_types.h"
#include "cuda/scheduling/schedule_sizes.h"
#include "facts.h"
#include "shapes.h"

namespace nvfp4 {

struct AllReduceCall;
struct InputCombine;
struct InputNorm;
struct InputHeads;

// The packed weights of all experts, in the layout of the engine: "fp4_64x64" for kSm120,
// "fp4_128x64" for kSm100, and "mma_64x64" for the others. If the activation is gated, gate_up has
// the variant "..._gated" of that layout, except for kSm100.
struct ExpertWeights {
  const uint8_t* packed;       // [e, rows, k/2]
  const uint8_t* block_scale;  // [e, rows, k/16] E4M3
  const float* global_scale;   // [e, parts]
  const float* input_scale;    // [e]; read under ActivationScale::kStatic
  const float* bias;           // [e, rows] or null
};

struct MoEBuffers {
  const void* x;  // [t, h]
  ExpertWeights gate_up;
  ExpertWeights down;
  const int32_t* expert_ids;    // [t, top_k], any value
  const float* expert_weights;  // [t, top_k]
  void* y;                      // [t, h]
  void* workspace;              // see workspaces.h
  // If LaunchMoEW4A16 leaves out its last step, it writes here what that needs. If this is null, it
  // does not leave it out.
  InputCombine* combine = nullptr;
};

// The sum over the experts of a token: y[t] = sum over j of weight[t, j] * output[t, j].
struct CombineTokens {
  const int32_t* expert_ids;    // [t, top_k]; any value
  const float* expert_weights;  // [t, top_k]; if null, all weights are 1
  void* y;                      // [t, h]
  int64_t t;
  int32_t h;  // a multiple of 16
  int32_t top_k, num_experts;
};

// A sum over experts whose result is the operand `added` of a norm that computes the sum, too. The
// norm does not write the result.
struct InputCombine {
  CombineTokens tokens;
  const void* outputs;  // [t, top_k, h]
  DataType type;        // of outputs; kBF16 or kF16
};

// The engines, which are the GEMMs of expert_gemm_sm*.cu and fp4_gemm_sm100.cu. Calls that kSm80
// and kSm90 do not support run on the plain kernels (plain_gemm.cu), which read the same layouts.
enum class EngineKind { kSm80, kSm90, kSm100, kSm120 };

struct MoECall {
  MoEShape shape;
  DataType type;  // of x and y
  ActivationParameters activation;
  ActivationScale activation_scale;
  bool weight_on_input;
  EngineKind engine;
  bool x_is_unchanged = false;  // since the previous kernel (launch_kernel.cuh)

  // Without slots or without experts, the output is zeros and no kernel runs. Most kernels divide
  // by top_k or search the rows of experts, and need at least one.
  bool is_empty() const { return shape.slots() == 0 || shape.e == 0; }
  int64_t output_bytes() const { return shape.t * shape.h * Bytes(type); }
};

// An expert layer on the plain kernels.
cudaError_t LaunchMoE(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

// An expert layer on call.engine, which is kSm80 or kSm90. call.type must be bf16 or f16, and h and
// i at most kMaxEngineExtent.
cudaError_t LaunchMoEW4A16(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

// An expert layer on FP4 tensor cores, with call.engine kSm120. Activations must be quantized, and
// HasSm120() must be true.
cudaError_t LaunchMoEW4A4(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

// Whether this build has code of the engine kSm120 for the current device.
bool HasSm120();

// An expert layer on FP4 tensor cores of compute capability 10.x. Weights must have the layout
// "fp4_128x64", call.type must be bf16, and activations must be quantized.
cudaError_t LaunchMoEW4A4Sm100(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);

struct GroupedGemmBuffers {
  const void* x;  // [m, k], rows sorted by expert
  ExpertWeights weight;
  // [e]; negative sizes count as 0, and the sum is cut to m. If null, one expert owns all rows.
  const int32_t* group_sizes;
  void* y;                          // [m, n]; rows past the sum become zeros
  void* workspace;                  // see workspaces.h
  const InputNorm* norm = nullptr;  // computes x; null if x exists. LaunchGroupedGemmW4A16 alone
};

struct GroupedGemmCall {
  GroupedGemmShape shape;
  DataType type;  // of x and y
  ActivationScale activation_scale;
  EngineKind engine;
  bool weight_is_unchanged = false;  // since the previous kernel (launch_kernel.cuh)
  bool starts_next = false;          // whether the next kernel may start at once
  // Whether weights are transposed: y = W.T @ x, where W is [k, n] of `shape`. Only on kSm90.
  bool transposed = false;

  // Without experts, the output is zeros and no kernel runs.
  bool is_empty() const { return shape.m == 0 || shape.n == 0 || shape.e == 0; }
  int64_t output_bytes() const { return shape.m * shape.n * Bytes(type); }
};

// A grouped GEMM on the plain kernels.
cudaError_t LaunchGroupedGemm(cudaStream_t stream, const GroupedGemmCall& call,
                              const GroupedGemmBuffers& buffers);

// A grouped GEMM on call.engine, which is kSm80 or kSm90. call.type must be bf16 or f16, and n, k
// and parts at most kMaxEngineExtent. m * k has no bound.
cudaError_t LaunchGroupedGemmW4A16(cudaStream_t stream, const GroupedGemmCall& call,
                                   const GroupedGemmBuffers& buffers);

// A grouped GEMM on FP4 tensor cores of 12.x. Activations must be quantized. m * k has no bound.
cudaError_t LaunchGroupedGemmW4A4(cudaStream_t stream, const GroupedGemmCall& call,
                                  const GroupedGemmBuffers& buffers);

// A grouped GEMM on FP4 tensor cores of 10.x, with the needs of LaunchMoEW4A4Sm100. m * k and n * k
// must be below 2^35.
cudaError_t LaunchGroupedGemmW4A4Sm100(cudaStream_t stream, const GroupedGemmCall& call,
                                       const GroupedGemmBuffers& buffers);

// Pieces of x whose largest magnitudes LaunchQuantize finds first, each a word of its workspace. It
// searches if no global scale is given.
constexpr int kAmaxPartials = 256;
constexpr int64_t QuantizeWorkspaceBytes(bool searches) {
  return searches ? kAmaxPartials * static_cast<int64_t>(sizeof(uint32_t)) : 0;
}

struct QuantizeCall {
  int64_t m, k;
  DataType type;       // of x
  bool swizzle_128x4;  // scales in tiles, padded with zeros; otherwise [m, k/16]
};

struct QuantizeBuffers {
  const void* x;              // [m, k]
  const float* global_scale;  // []; if null, amax(x) / 2688
  uint8_t* packed;            // [m, k/2]
  uint8_t* block_scale;       // [m, k/16], or padded and swizzled
  float* used_scale;          // []; receives the global scale
  uint32_t* partials;         // [kAmaxPartials]; scratch if global_scale is null
};

cudaError_t LaunchQuantize(cudaStream_t stream, const QuantizeCall& call,
                           const QuantizeBuffers& buffers);

enum class RouterScore { kSoftmax, kSigmoid, kSqrtSoftplus };

// How to route, as in `route` of numerics/routing.py.
struct RouterCall {
  int64_t t;
  int32_t e, top_k, num_groups, groups_kept;
  RouterScore score;
  bool select_logits;  // choose by logits, and compute scores of the chosen experts only
  bool renormalize;
  float scaling;
};

struct RouterBuffers {
  const float* logits;             // [t, e]
  const float* bias;               // [e] or null
  int32_t* expert_ids;             // [t, top_k]; best first
  float* expert_weights;           // [t, top_k]
  const int32_t* first = nullptr;  // []: what ids are counted from; null for 0
};

cudaError_t LaunchRoute(cudaStream_t stream, const RouterCall& call, const RouterBuffers& buffers);

// A router whose ids are shifted by the call that reads them.
struct InputRoute {
  RouterCall call;
  RouterBuffers buffers;
};

// shifted = ids - first, of `count` ids.
struct ShiftIdsCall {
  const int32_t* ids;
  const int32_t* first;  // []
  int32_t* shifted;
  int64_t count;
  bool starts_next = false;  // whether the next kernel may start at once (launch_kernel.cuh)
};

cudaError_t LaunchShiftIds(cudaStream_t stream, const ShiftIdsCall& call);

// The widest key and value of attention, and the number of which each width is a multiple.
constexpr int64_t kMaxHeadWidth = 256, kHeadWidthFactor = 8;
// With keys and values in E4M3. With more rows (queries that share a key head), each block would
// decode all keys again.
constexpr int64_t kE4M3HeadWidthFactor = 16, kMaxE4M3AttentionRows = 64;
struct AttentionCall {
  AttentionShape shape;
  DataType type;   // of q, k, v and y; kBF16 or kF16. With k_scale, k and v are kE4M3
  float scale;     // above 0
  int32_t window;  // keys that a query sees, the last at its own position; 0 for all
  int32_t chunk;   // a query sees keys of its own chunk of so many positions; 0 for all
  bool positions_are_unchanged = false;  // since the previous kernel (launch_kernel.cuh)

  bool is_empty() const { return shape.b == 0 || shape.t == 0 || shape.n == 0 || shape.dv == 0; }
};

struct AttentionBuffers {
  const void* q;             // [b, t, n, d]
  const void* k;             // [b, m, s, d]
  const void* v;             // [b, m, s, dv]; null for LaunchLatentAttention
  const int32_t* positions;  // [b, t]; kPadding or more is padding, whose results are finite
  const float* sinks;        // [n] or null
  void* y;                   // [b, t, n, dv]
  void* workspace;           // AttentionWorkspaceBytes
  // [m] of positive numbers, by which keys and values in E4M3 are multiplied; null for 16 bits.
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
  const InputHeads* heads = nullptr;  // prepare q, k and v; null if these exist. LaunchAttention
};

// Causal attention. The query at position p sees the keys at 0 to p that exist and that the window
// and the chunk allow. A query that sees no key gets zeros. Positions are read on the device only.
cudaError_t LaunchAttention(cudaStream_t stream, const AttentionCall& call,
                            const AttentionBuffers& buffers);

// The widest key and value of latent attention.
constexpr int64_t kMaxLatentWidth = 576, kMaxLatentValueWidth = 512;

// The same, with the first dv channels of the keys as values. Buffers have no v. Each key is read
// once for both products. Widths are multiples of kHeadWidthFactor.
cudaError_t LaunchLatentAttention(cudaStream_t stream, const AttentionCall& call,
                                  const AttentionBuffers& buffers);

// The most rows of LaunchDenseFew, and the number of which k is a multiple; then that for E4M3.
constexpr int64_t kMostDenseRows = 64, kDenseFactor = 8, kDenseE4M3Factor = 16;
constexpr int64_t kDenseGroup = 128;  // of k, which share a scale

struct DenseFewCall {
  int64_t rows, n, k;    // at most kMostDenseRows rows
  DataType type;         // of x; kBF16 or kF16
  DataType weight_type;  // `type`, kE4M3, or kF32 if `type` is kBF16
  DataType output_type;  // kF32 or `type`
  int64_t row_scales;    // 0, 1 or rows; 0 without kE4M3
  int64_t scale_groups;  // groups of a weight row that have a scale each; 0 for one for the row
  int64_t bias_size;     // bytes of an element of the bias: 0 without one, 2 in `type`, 4 in kF32
  // Whether W and its scales are unchanged since the previous kernel (launch_kernel.cuh).
  bool weight_is_unchanged = false;
};

struct DenseFewBuffers {
  const void* x;                    // [rows, k]
  const void* weight;               // [n, k]
  void* y;                          // [rows, n]
  const float* weight_scale;        // [n] or [n, scale_groups]; null without kE4M3
  const float* row_scale;           // [row_scales]
  const void* bias;                 // [n]; null without one
  const InputNorm* norm = nullptr;  // computes x; null if x exists
};

// y = x @ weight.T + bias with float32 sums, for few rows. The sums for E4M3 weights are multiplied
// by the scale of their row, if there is one, and then by that of their column. With scale_groups,
// the sum over each kDenseGroup of k is multiplied by its scale instead, and then all by that of
// the row. The bias is added last, before the result is rounded.
cudaError_t LaunchDenseFew(cudaStream_t stream, const DenseFewCall& call,
                           const DenseFewBuffers& buffers);

struct ActivateCall {
  int64_t rows, columns;
  DataType type;
  ActivationParameters activation;  // a gated one
  const void* gate_up;              // [rows, 2 columns]
  void* y;                          // [rows, columns]
  bool starts_next = false;         // whether the next kernel may start at once (launch_kernel.cuh)
};

// y = act(gate) * up.
cudaError_t LaunchActivate(cudaStream_t stream, const ActivateCall& call);

struct AddGatedCall {
  int64_t rows, columns;
  DataType type;
  const void* x;             // [rows, columns]
  const void* gate;          // [rows] or null
  const void* z;             // [rows, columns]
  void* y;                   // [rows, columns]
  bool starts_next = false;  // whether the next kernel may start at once (launch_kernel.cuh)
};

// y = x + sigmoid(gate) * z, or x + z without a gate.
cudaError_t LaunchAddGated(cudaStream_t stream, const AddGatedCall& call);

struct AddLinearGatedCall {
  int64_t rows, columns, k;
  DataType type;
  const void* x;             // [rows, columns]
  const void* gate_input;    // [rows, k]
  const void* gate_weight;   // [k]
  const void* z;             // [rows, columns]
  void* y;                   // [rows, columns]
  bool starts_next = false;  // whether the next kernel may start at once (launch_kernel.cuh)
};

// y = x + sigmoid(gate_input @ gate_weight) * z.
cudaError_t LaunchAddLinearGated(cudaStream_t stream, const AddLinearGatedCall& call);

struct GateHeadsCall {
  int64_t rows;  // rows * heads is at most kMaxRows
  uint32_t heads, d;
  int64_t gate_columns;            // of a row of gates
  bool one_gate;                   // for each head; otherwise for each of its channels
  uint32_t first_gate, gate_step;  // the column of the first head's gates, and from head to head
  DataType type;
  const void* x;             // [rows, heads, d]
  const void* gates;         // [rows, gate_columns]
  void* y;                   // [rows, heads, d]
  bool starts_next = false;  // whether the next kernel may start at once (launch_kernel.cuh)
};

// y = x * sigmoid(gate).
cudaError_t LaunchGateHeads(cudaStream_t stream, const GateHeadsCall& call);

struct NormCall {
  int64_t rows, h;
  DataType type;  // of x, added, sum and y
  DataType weight_type;
  float eps;
  bool starts_next = false;  // whether the next kernel may start at once (launch_kernel.cuh)
};

struct NormBuffers {
  const void* x;       // [rows, h]
  const void* added;   // [rows, h] or null
  const void* weight;  // [h]
  void* sum;           // [rows, h]; not written if `added` is null
  void* y;             // [rows, h]
};

// sum = x + added, and y = weight * sum / sqrt(mean(sum^2) + eps) over each row.
cudaError_t LaunchAddRmsNorm(cudaStream_t stream, const NormCall& call, const NormBuffers& buffers);

// The same, with the sum over experts as `added`. Its type is call.type.
cudaError_t LaunchCombineRmsNorm(cudaStream_t stream, const NormCall& call,
                                 const NormBuffers& buffers, const InputCombine& combine);

// The same, with the result of a gated sum as `added`, which is not written.
cudaError_t LaunchAddGatedRmsNorm(cudaStream_t stream, const NormCall& call,
                                  const NormBuffers& buffers, const AddGatedCall& gated);
cudaError_t LaunchAddGatedRmsNorm(cudaStream_t stream, const NormCall& call,
                                  const NormBuffers& buffers, const AddLinearGatedCall& gated);

// The same, with a sum over GPUs as `added`. Its type is call.type.
cudaError_t LaunchAllReduceRmsNorm(cudaStream_t stream, const NormCall& call,
                                   const NormBuffers& buffers, const AllReduceCall& added);

// A norm whose y is the input of a kernel that computes the norm, too.
struct InputNorm {
  NormCall call;
  NormBuffers buffers;
};

// Whether kernels with blocks of 256 threads can compute the norm: it has one row, and at most two
// pieces of 16 bytes for each thread.
inline bool FitsInputNorm(const InputNorm& norm) {
  return norm.call.rows == 1 && norm.call.type != DataType::kF32 && norm.call.h % 8 == 0 &&
         norm.call.h <= 2 * 256 * 8 &&
         (norm.call.weight_type == norm.call.type || norm.call.weight_type == DataType::kF32);
}

// The number of which the width of a head and that of its rotated part are multiples. The widest
// head has kMaxPreparedWidth channels.
constexpr int64_t kPreparedWidthFactor = 4;

struct HeadsCall {
  int32_t b, t, s;       // rows, new tokens of a row, and tokens that the cache has room for
  int32_t n, m, d;       // query heads, key heads, and the width of a head
  int32_t half;          // half of the channels that rotate; 0 for none
  DataType type;         // of heads; kBF16 or kF16. The cache has it too, or kE4M3
  DataType weight_type;  // `type` or kF32
  float eps, rotation_scale;
  bool rotates_first;  // whether heads are normalized after their rotation
  bool gated;          // whether a gate of width d, which is not read, follows each query head
  bool multiply_by_reciprocal = false;  // how to round to E4M3: E4M3Rounding in nvfp4.h
  bool starts_next = false;  // whether the next kernel may start at once (launch_kernel.cuh)
};

struct HeadsBuffers {
  const void* qkv;           // [b, t, (n + 2m) d], or (2n + 2m) d with gates
  const int32_t* positions;  // [b, t]; any value
  const void* q_weight;      // [d], or null without norms; k_weight likewise
  const void* k_weight;
  const float* frequencies;  // [half]
  void* q;                   // [b, t, n, d]
  void* keys;                // [b, m, s, d]; only the places of new tokens are written
  void* values;              // [b, m, s, d]; likewise
  // [m] of positive numbers, by which keys and values in E4M3 are divided; null for another cache.
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
};

// Normalizes and rotates heads, and writes new keys and values into the cache, rounded to E4M3 if
// it has scales.
cudaError_t LaunchPrepareHeads(cudaStream_t stream, const HeadsCall& call,
                               const HeadsBuffers& buffers);

// The heads of one new token of each row, which attention prepares itself. It writes new keys and
// values into the cache, but no queries.
struct InputHeads {
  HeadsCall call;  // t is 1
  HeadsBuffers buffers;
  bool unchanged;  // whether all that is read but the qkv is, since the previous kernel
};

// The largest latents of LaunchPrepareLatents: of queries, and of keys and values. Widths are
// multiples of kPreparedWidthFactor, and the rotated key has at most kMaxPreparedWidth channels.
constexpr int64_t kMaxQueryLatent = 1 << 18, kMaxKeyLatent = 4096;

struct LatentsCall {
  int32_t b, t, s;       // rows, new tokens of a row, and tokens that the cache has room for
  int32_t r, k, e;       // widths of the latents of queries and of keys, and of the rotated key
  int32_t half;          // e / 2, or 0 if nothing rotates
  DataType type;         // of down, q and cache; kBF16 or kF16
  DataType weight_type;  // `type` or kF32
  float eps, rotation_scale;
  bool interleaved;          // whether the channels of a pair are adjacent in `down`
  bool starts_next = false;  // whether the next kernel may start at once (launch_kernel.cuh)
};

struct LatentsBuffers {
  const void* down;          // [b, t, r + k + e]
  const int32_t* positions;  // [b, t]; any value
  const void* q_weight;      // [r], or null: the queries are not normalized
  const void* kv_weight;     // [k]
  const float* frequencies;  // [half]
  void* q;                   // [b, t, r]
  void* cache;               // [b, s, k + e]; only the places of new tokens are written
};

// Normalizes latents, rotates the key, and writes new latents and keys into the cache.
cudaError_t LaunchPrepareLatents(cudaStream_t stream, const LatentsCall& call,
                                 const LatentsBuffers& buffers);

// The most rows of LaunchHeadProduct, and the widest sums over channels of a query and of a latent.
constexpr int64_t kMaxHeadProductRows = 8, kMaxHeadProductQuery = 512, kMaxHeadProductLatent = 1024;
constexpr int64_t kHeadProductFactor = 8;  // of k and of the outputs of queries

struct HeadProductCall {
  int32_t rows, n;     // tokens, and heads of each
  int32_t k, outputs;  // channels of a sum, and sums of a head; see `expands`
  int32_t e;           // further channels of a query, which rotate; 0 if `expands`
  int32_t half;        // e / 2, or 0 if nothing rotates
  DataType type;       // of all operands; kBF16 or kF16
  float rotation_scale;
  bool interleaved;  // whether the channels of a rotated pair are adjacent in x
  bool expands;  // values, with matrices [n, outputs, k]; otherwise queries, with [n, k, outputs]
};

struct HeadProductBuffers {
  const void* x;             // [rows, n, k + e]
  const void* matrices;      // see `expands`
  const int32_t* positions;  // [rows]; not read if `half` is 0
  const float* frequencies;  // [half]
  void* y;                   // [rows, n, outputs + e]
};

// Multiplies each head by its matrix, and rotates the further channels.
cudaError_t LaunchHeadProduct(cudaStream_t stream, const HeadProductCall& call,
                              const HeadProductBuffers& buffers);

// Tokens of each of b rows through a gated delta net or through Kimi delta attention, without the
// projections. The state of a value head is a matrix [d, e].
//
// A row has one token and one state, or, with `kept`, t tokens and the states after each of its
// last w >= t tokens. It goes on from the one that `kept` names, and the states after its new
// tokens take the first t places.
struct DeltaStepCall {
  int64_t b;
  int32_t t, w;       // 1 without `kept`
  int32_t key_heads;  // m
  int32_t shared;     // value heads of a key head, r; 1 with `channel_decays`
  int32_t d, e;       // the width of a key, and of a value; e is a multiple of 4
  int32_t taps;       // of the convolution
  DataType type;      // of projected, inputs and y
  bool interleaved;   // projected has key head after key head
  float scale;        // factor of the queries, d ** -0.5
  float eps;          // of the norm
  // Kimi delta attention: a decay for each channel of a key, and a sigmoid for the gate.
  bool channel_decays;
  float lower_bound;  // smallest logarithm of such a decay, which is negative; 0 for none
  // Whether positions, weights, inputs and state are unchanged since the previous kernel
  // (launch_kernel.cuh).
  bool state_is_unchanged = false;
};

struct DeltaStepBuffers {
  // [b, t, 2 m d + m r (2 e + 2)], or 2 m d + 2 m r e with `rates`. Kimi delta attention has
  // neither z nor steps in it: [b, t, m (2 d + e + 1)], or m (2 d + e) with `rates`.
  const void* projected;
  const int32_t* positions;  // [b, t]; a token at kPaddingPosition or later changes no state
  const int32_t* kept;       // [b], or null
  const float* conv_weight;  // [2 m d + m r e, taps]
  const float* A_log;        // [m r]
  const float* dt_bias;      // [m r]; [m d] for decays of channels
  const float* norm;         // [e]
  const void* rates;         // [b, t, 2 m r]: rates and steps, or [b, t, m]; null if in `projected`
  const void* decays;        // [b, t, m d]: what the decays of channels come from; null for none
  const void* gates;         // [b, t, m e]: likewise, the gates
  void* inputs;              // [b, w, taps - 1, 2 m d + m r e]; in place
  float* state;              // [b, w, m, r, d, e]; in place
  void* y;                   // [b, t, m r e]
};

cudaError_t LaunchDeltaStep(cudaStream_t stream, const DeltaStepCall& call,
                            const DeltaStepBuffers& buffers);

// The gated delta rule for t tokens of each of b rows. All arrays of numbers are float32.
struct DeltaRuleCall {
  int64_t b, t;
  int32_t key_heads;  // m
  int32_t shared;     // value heads of a key head, r; 1 with `channel_decays`
  int32_t d, e;       // the width of a key, and of a value; multiples of 4
  bool normalize;     // scale keys to length 1, and queries to length `scale`
  float scale;
  bool channel_decays;  // a decay for each channel of a key, instead of one for each value head
};

struct DeltaRuleBuffers {
  const float* q;     // [b, t, m, d]
  const float* k;     // [b, t, m, d]
  const float* v;     // [b, t, m, r, e]
  const float* g;     // [b, t, m, r], or [b, t, m, d]: logarithms of the decays
  const float* beta;  // [b, t, m, r]
  // [b]: the tokens of each row; those behind them are padding, which may be anything. Null if all
  // rows have t tokens.
  const int32_t* lengths;
  float* state;     // [b, m, r, d, e]; in place
  float* y;         // [b, t, m, r, e]; 0 for padding
  void* workspace;  // DeltaRuleWorkspaceBytes
};

int64_t DeltaRuleWorkspaceBytes(const DeltaRuleCall& call);
cudaError_t LaunchDeltaRule(cudaStream_t stream, const DeltaRuleCall& call,
                            const DeltaRuleBuffers& buffers);

// The number of taps of a convolution, the most parts of its channels, and the number of which all
// widths are multiples.
constexpr int64_t kMinConvolutionTaps = 2, kMaxConvolutionTaps = 8, kConvolutionFactor = 4;
constexpr int kConvolutionParts = 3;

// The causal convolution for t tokens of each of b rows, with the columns of x that it reads. Each
// of `heads` heads has widths[0] columns of the first part, then widths[1] of the second one, and
// so on. The convolution numbers the channels of all heads of the first part first.
struct ConvolutionCall {
  int64_t b, t;
  int64_t columns;   // of a row of x
  int32_t channels;  // heads * (widths[0] + widths[1] + widths[2])
  int32_t first;     // column of the first head
  int32_t heads;
  int32_t stride;                     // columns from a head to the next one
  int32_t widths[kConvolutionParts];  // a part that is missing has width 0
  int32_t taps;
  DataType type;  // of x and inputs; kBF16 or kF16
};

struct ConvolutionBuffers {
  const void* x;                // [b, t, columns]
  const int32_t* positions;     // [b, t]; a token at kPaddingPosition or later is padding
  const float* weight;          // [channels, taps]
  const float* bias;            // [channels] or null
  void* inputs;                 // [b, taps - 1, channels]: the last inputs; in place
  float* y[kConvolutionParts];  // [b, t, heads * widths[i]]
};

cudaError_t LaunchConvolution(cudaStream_t stream, const ConvolutionCall& call,
                              const ConvolutionBuffers& buffers);

// Tokens of each of b rows through a Mamba-2 mixer, without its two projections, as for a delta
// net. The state of a head is a matrix [p, n].
struct Mamba2StepCall {
  int64_t b;
  int32_t t, w;                     // as in DeltaStepCall
  int32_t heads, groups;            // groups divides heads
  int32_t p, n;                     // n is a multiple of 4
  int32_t taps;                     // of the convolution
  DataType type;                    // of projected, inputs and y
  ActivationParameters activation;  // after the convolution; not gated
  float smallest_step, largest_step;
  float eps;                        // of the norm
  bool state_is_unchanged = false;  // as in DeltaStepCall
};

struct Mamba2StepBuffers {
  const void* projected;     // [b, t, 2 heads p + 2 groups n + heads]: z, x, B and C, dt
  const int32_t* positions;  // [b, t]; a token at kPaddingPosition or later changes no state
  const int32_t* kept;       // [b], or null
  const float* conv_weight;  // [heads p + 2 groups n, taps]
  const float* conv_bias;    // [heads p + 2 groups n] or null
  const float* A_log;        // [heads]
  const float* dt_bias;      // [heads]
  const float* D;            // [heads]
  const float* norm;         // [heads p]
  void* inputs;              // [b, w, taps - 1, heads p + 2 groups n]; in place
  float* state;              // [b, w, heads, p, n]; in place
  void* y;                   // [b, t, heads p]
  float* gated;              // [b t, heads p]; of Mamba2StepRowBytes each
};

cudaError_t LaunchMamba2Step(cudaStream_t stream, const Mamba2StepCall& call,
                             const Mamba2StepBuffers& buffers);

// The recurrence of Mamba-2 for t tokens of each of b rows. All arrays of numbers are float32.
struct Mamba2ScanCall {
  int64_t b, t;
  int32_t heads, groups;  // groups divides heads
  int32_t p, n;           // the width of x, and of B and C; multiples of 4
};

struct Mamba2ScanBuffers {
  const float* x;          // [b, t, heads, p]
  const float* dt;         // [b, t, heads]
  const float* a;          // [heads]: rates of the decays, at most 0
  const float* B;          // [b, t, groups, n]
  const float* C;          // [b, t, groups, n]
  const float* D;          // [heads]: factors of x in the results
  const int32_t* lengths;  // [b] or null, as in DeltaRuleBuffers
  float* state;            // [b, heads, p, n]; in place
  float* y;                // [b, t, heads, p]; 0 for padding
  void* workspace;         // Mamba2ScanWorkspaceBytes
};

int64_t Mamba2ScanWorkspaceBytes(const Mamba2ScanCall& call);
cudaError_t LaunchMamba2Scan(cudaStream_t stream, const Mamba2ScanCall& call,
                             const Mamba2ScanBuffers& buffers);

// The sum of small arrays over the GPUs of a group.
struct AllReduceCall {
  const void* x;
  void* y;
  int32_t pieces;  // of kPieceBytes bytes; kMaxPeerBytes in all at most
  DataType type;
  PeerGroup group;
  bool starts_next;  // whether the next kernel may start at once (launch_kernel.cuh)
};

// Loads the kernels of these sums on the current device, and sets their attributes, once. It says
// whether they may start before the kernel ahead of them has ended. LaunchAllReduce only launches.
// While another GPU waits in a sum, the driver may hold back a thread that does more.
// LaunchAllReduceRmsNorm only launches, too, unless a norm has a kernel of its own.
cudaError_t PrepareAllReduce(bool* overlaps);
cudaError_t PrepareAllReduceRmsNorm(bool* overlaps);
cudaError_t LaunchAllReduce(cudaStream_t stream, const AllReduceCall& call);

// What Python reads (facts.h). Records name the numbers and the sizes.

constexpr NumberFact kCudaNumbers[] = {
    {"MAX_EXPERTS", kMaxExperts},
    {"MAX_TOP_K", kMaxTopK},
    {"MAX_EXTENT", kMaxExtent},
    {"MAX_ENGINE_EXTENT", kMaxEngineExtent},
    {"SHARED_BYTES_SM80", kSharedBytesSm80},
    {"SHARED_BYTES_SM90", kSharedBytesSm90},
    {"SHARED_BYTES_SM120", kSharedBytesSm120},
    {"SHARED_BYTES_LATENT_ATTENTION", kSharedBytesLatentAttention},
    {"RECURRENCE_CHUNK", kLargeChunk},
    {"UNSPLIT_INPUTS", kUnsplitInputs},
    {"FEW_STATIC_BYTES", kFewStaticBytes},
    {"COMBINED_STATIC_BYTES", kCombinedStaticBytes},
};

constexpr SizesFact kCudaSizes[] = {
    {"HEAD_WIDTHS", kHeadWidthFactor, kMaxHeadWidth, kHeadWidthFactor},
    {"E4M3_HEAD_WIDTHS", kE4M3HeadWidthFactor, kMaxHeadWidth, kE4M3HeadWidthFactor},
    {"E4M3_ATTENTION_ROWS", 1, kMaxE4M3AttentionRows, 1},
    {"LATENT_WIDTHS", kHeadWidthFactor, kMaxLatentWidth, kHeadWidthFactor},
    {"LATENT_VALUE_WIDTHS", kHeadWidthFactor, kMaxLatentValueWidth, kHeadWidthFactor},
    {"DENSE_ROWS", 1, kMostDenseRows, 1},
    {"DENSE_INPUTS", kDenseFactor, kOpen, kDenseFactor},
    {"DENSE_E4M3_INPUTS", kDenseE4M3Factor, kOpen, kDenseE4M3Factor},
    {"PREPARED_WIDTHS_CUDA", 0, kMaxPreparedWidth, kPreparedWidthFactor},
    {"QUERY_LATENTS", kPreparedWidthFactor, kMaxQueryLatent, kPreparedWidthFactor},
    {"KEY_LATENTS", kPreparedWidthFactor, kMaxKeyLatent, kPreparedWidthFactor},
    {"ROTATED_KEY_WIDTHS", kPreparedWidthFactor, kMaxPreparedWidth, kPreparedWidthFactor},
    {"HEAD_PRODUCT_ROWS", 1, kMaxHeadProductRows, 1},
    {"HEAD_PRODUCT_QUERIES", 1, kMaxHeadProductQuery, 1},
    {"HEAD_PRODUCT_LATENTS", kHeadProductFactor, kMaxHeadProductLatent, kHeadProductFactor},
    {"HEAD_PRODUCT_ROTATED", 0, kMaxPreparedWidth, 2},
    {"STATE_WIDTHS", kStateWidthFactor, kMaxStateWidth, kStateWidthFactor},
    {"CONVOLUTION_TAPS", kMinConvolutionTaps, kMaxConvolutionTaps, 1},
    {"CONVOLUTION_COLUMNS", 0, kMaxExtent, kConvolutionFactor},
    {"PEERS", 2, kMaxPeers, 1},
    {"PEER_BYTES", kPieceBytes, kMaxPeerBytes, kPieceBytes},
};

// Returns the layer, or the grouped GEMM, of the sizes that the rows below name. Activations in 16
// bits need the same memory, whichever type they have.
inline MoEShape MoEOf(const int64_t* s) {
  return {s[0], s[1], s[2], s[3], s[4], s[5] != 0 ? 2 * s[4] : s[4]};
}
inline GroupedGemmShape GroupedGemmOf(const int64_t* s) {
  return {s[0], s[2], s[2], s[3], s[1], 1};
}
inline int64_t MoEW4A16Bytes(const int64_t* s) {
  return MoEW4A16WorkspaceBytes(MoEOf(s), TypeOfSize(s[6]));
}
inline int64_t GroupedGemmW4A16Bytes(const int64_t* s) {
  return GroupedGemmW4A16WorkspaceBytes(GroupedGemmOf(s), TypeOfSize(s[4]));
}
inline int64_t TransposedGemmBytes(const int64_t* s) {
  return TransposedGemmWorkspaceBytes(GroupedGemmOf(s));
}
inline AttentionShape AttentionOf(const int64_t* s) {
  return {s[0], s[1], s[2], s[3], s[4], s[5], s[5]};
}
constexpr WorkspaceFact kCudaWorkspaces[] = {
    {"nvfp4_moe_w4a16_sm80", "t top_k e h i gated itemsize", MoEW4A16Bytes},
    {"nvfp4_moe_w4a16_sm90", "t top_k e h i gated itemsize", MoEW4A16Bytes},
    {"nvfp4_moe_w4a4_sm120", "t top_k e h i gated itemsize",
     [](const int64_t* s) { return MoEW4A4WorkspaceBytes(MoEOf(s)); }},
    {"nvfp4_moe_w4a4_sm100", "t top_k e h i gated itemsize",
     [](const int64_t* s) { return MoEW4A4Sm100WorkspaceBytes(MoEOf(s)); }},
    {"nvfp4_grouped_gemm_w4a16_sm80", "m e n k itemsize", GroupedGemmW4A16Bytes},
    {"nvfp4_grouped_gemm_w4a16_sm90", "m e n k itemsize", GroupedGemmW4A16Bytes},
    {"nvfp4_transposed_gemm_w4a16_sm90", "m e n k", TransposedGemmBytes},
    {"nvfp4_grouped_gemm_w4a4_sm120", "m e n k itemsize",
     [](const int64_t* s) { return GroupedGemmW4A4WorkspaceBytes(GroupedGemmOf(s)); }},
    {"nvfp4_grouped_gemm_w4a4_sm100", "m e n k itemsize",
     [](const int64_t* s) { return GroupedGemmW4A4Sm100WorkspaceBytes(GroupedGemmOf(s)); }},
    {"nvfp4_quantize_cuda", "searches",
     [](const int64_t* s) { return QuantizeWorkspaceBytes(s[0] != 0); }},
    {"nvfp4_attention_cuda", "b t n m s dv",
     [](const int64_t* s) { return AttentionWorkspaceBytes(AttentionOf(s)); }},
    {"nvfp4_attention_fp8_cuda", "b t n m s dv",
     [](const int64_t* s) { return AttentionWorkspaceBytes(AttentionOf(s)); }},
    {"nvfp4_latent_attention_cuda", "b t n m s dv",
     [](const int64_t* s) { return LatentAttentionWorkspaceBytes(AttentionOf(s)); }},
};

// The rows of a recurrence over a prompt are its chunks (CountChunks).
constexpr WorkspaceRowsFact kCudaWorkspaceRows[] = {
    {"nvfp4_delta_rule_cuda", "m r channel_decays",
     [](const int64_t* s) {
       const auto recurrence = s[2] != 0 ? Recurrence::kChannelDelta : Recurrence::kDelta;
       return WorkspaceRows{0, ChunkBytes(recurrence, s[0], s[1]), 0};
     }},
    {"nvfp4_mamba2_scan_cuda", "groups shared",
     [](const int64_t* s) {
       return WorkspaceRows{0, ChunkBytes(Recurrence::kMamba2, s[0], s[1]), 0};
     }},
    {"nvfp4_mamba2_step_cuda", "heads p",
     [](const int64_t* s) { return WorkspaceRows{0, Mamba2StepRowBytes(s[0], s[1]), 0}; }},
};

}  // namespace nvfp4
