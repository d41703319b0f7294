// The functions that tests/support/emulation/cuda_emulation.py calls: those of launch.h, on host memory.
#include <algorithm>
#include <vector>

#include "cuda/attention/attention.cuh"
#include "cuda/attention/latent_attention.cuh"
#include "cuda/epilogues/combine.cuh"
#include "cuda/gemm/dense_few.cuh"
#include "cuda/gemm/fp4_groups.cuh"
#include "cuda/gemm/linear_few.cuh"
#include "cuda/gemm/linear_sm90.cuh"
#include "cuda/heads/sine.cuh"
#include "cuda/instructions/fp4_mma.cuh"
#include "cuda/launch.h"

namespace emulation {
extern bool backwards;
}

namespace nvfp4 {
int multiprocessors = 1;
int capability_major = 0;
int block_shared_bytes = 0;
int largest_shared_bytes = 0;
int largest_cluster = 0;
int launches = 0;
}  // namespace nvfp4

using namespace nvfp4;

namespace {

// The functions of an engine for a layer and for a grouped GEMM.
struct Functions {
  int64_t (*moe_bytes)(const MoEShape& shape);
  cudaError_t (*moe)(cudaStream_t stream, const MoECall& call, const MoEBuffers& buffers);
  int64_t (*product_bytes)(const GroupedGemmShape& shape);
  cudaError_t (*product)(cudaStream_t stream, const GroupedGemmCall& call,
                         const GroupedGemmBuffers& buffers);
};

Functions FunctionsOf(int engine) {
  switch (static_cast<EngineKind>(engine)) {
    case EngineKind::kSm100:
      return {MoEW4A4Sm100WorkspaceBytes, LaunchMoEW4A4Sm100, GroupedGemmW4A4Sm100WorkspaceBytes,
              LaunchGroupedGemmW4A4Sm100};
    case EngineKind::kSm120:
      return {MoEW4A4WorkspaceBytes, LaunchMoEW4A4, GroupedGemmW4A4WorkspaceBytes,
              LaunchGroupedGemmW4A4};
    default:
      return {MoEW4A16WorkspaceBytes, LaunchMoEW4A16, GroupedGemmW4A16WorkspaceBytes,
              LaunchGroupedGemmW4A16};
  }
}

// Reads packed, block_scale, global_scale, input_scale and bias.
ExpertWeights WeightsAt(void* const* operands) {
  return {static_cast<const uint8_t*>(operands[0]), static_cast<const uint8_t*>(operands[1]),
          static_cast<const float*>(operands[2]), static_cast<const float*>(operands[3]),
          static_cast<const float*>(operands[4])};
}

// A call of an expert layer.
struct ExpertLayer {
  MoECall call;
  MoEBuffers buffers;
};

// Reads x, gate_up, down, expert_ids, expert_weights, y and workspace.
ExpertLayer LayerOf(const MoEShape& shape, const ActivationParameters& activation, int type,
                    int engine, int weight_on_input, int activation_scale, void* const* operands) {
  return {{shape, static_cast<DataType>(type), activation,
           static_cast<ActivationScale>(activation_scale), weight_on_input != 0,
           static_cast<EngineKind>(engine)},
          {operands[0], WeightsAt(operands + 1), WeightsAt(operands + 6),
           static_cast<const int32_t*>(operands[11]), static_cast<const float*>(operands[12]),
           operands[13], operands[14]}};
}

struct TakenGroups {
  Fp4Groups groups;
  int64_t bytes;
};

TakenGroups TakeGroups(void* buffer, int64_t experts) {
  Sections sections(buffer);
  const Fp4Groups groups = TakeFp4Groups(&sections, experts);
  return {groups, sections.bytes()};
}

// Computes a norm of one row, and then `layer` of its result: both in one launch if `together`. The
// layer gets the norm that it has to compute, or null.
template <typename Layer>
cudaError_t AfterNorm(const NormCall& call, int together, const NormBuffers& buffers,
                      const Layer& layer) {
  const InputNorm norm = {call, buffers};
  if (together != 0) return layer(&norm);
  const cudaError_t status = LaunchAddRmsNorm(nullptr, call, buffers);
  return status == cudaSuccess ? layer(nullptr) : status;
}

}  // namespace

extern "C" {

// Sets how the next calls run: the number of multiprocessors, the bytes of shared memory per block,
// and the order of the threads of a block.
void configure(int count, int shared_bytes, int backwards) {
  multiprocessors = count;
  block_shared_bytes = shared_bytes;
  largest_shared_bytes = 0;
  largest_cluster = 0;
  launches = 0;
  emulation::backwards = backwards != 0;
}

// Sets the compute capability of the emulated device, where kernels depend on it. It is 0
// otherwise.
void use_capability(int major) { capability_major = major; }

// Returns the most dynamic shared memory of a launch since `configure`.
int largest_dynamic_bytes() { return largest_shared_bytes; }

// Returns the most blocks of a cluster since `configure`.
int largest_cluster_blocks() { return largest_cluster; }

// Returns the number of launches since `configure`.
int launch_count() { return launches; }

int64_t combined_few_shared_bytes(int64_t slots, int64_t k) {
  return CombinedFewSharedBytes(slots, k);
}

int64_t moe_workspace_bytes(const MoEShape* shape, int engine) {
  return FunctionsOf(engine).moe_bytes(*shape);
}

// The operands are outputs, expert_ids, expert_weights or null, y.
int combine(int64_t t, int32_t h, int32_t top_k, int32_t num_experts, int type,
            void* const* operands) {
  const CombineTokens tokens = {static_cast<const int32_t*>(operands[1]),
                                static_cast<const float*>(operands[2]),
                                operands[3],
                                t,
                                h,
                                top_k,
                                num_experts};
  return LaunchCombineOutputs(nullptr, static_cast<DataType>(type), tokens, operands[0]);
}

// The operands are x, gate_up, down, expert_ids, expert_weights, y, workspace. A single token runs
// twice, because a kernel may read its row before it waits. Both results must have the same bits.
int moe(const MoEShape* shape, const ActivationParameters* activation, int type, int engine,
        int weight_on_input, int activation_scale, void* const* operands) {
  ExpertLayer layer =
      LayerOf(*shape, *activation, type, engine, weight_on_input, activation_scale, operands);
  const cudaError_t status = FunctionsOf(engine).moe(nullptr, layer.call, layer.buffers);
  if (status != cudaSuccess || shape->t != 1 || layer.call.is_empty()) return status;
  const auto* y = static_cast<const uint8_t*>(layer.buffers.y);
  const std::vector<uint8_t> first(y, y + layer.call.output_bytes());
  layer.call.x_is_unchanged = true;
  const cudaError_t again = FunctionsOf(engine).moe(nullptr, layer.call, layer.buffers);
  if (again != cudaSuccess) return again;
  return std::equal(first.begin(), first.end(), y) ? cudaSuccess : cudaErrorInvalidValue;
}

// As moe, of an engine for W4A16 that leaves out its last step, which then runs. Fails if the layer
// does not leave it out.
int moe_and_combine(const MoEShape* shape, const ActivationParameters* activation, int type,
                    int engine, int weight_on_input, int activation_scale, void* const* operands) {
  ExpertLayer layer =
      LayerOf(*shape, *activation, type, engine, weight_on_input, activation_scale, operands);
  InputCombine combine = {};
  layer.buffers.combine = &combine;
  const cudaError_t status = LaunchMoEW4A16(nullptr, layer.call, layer.buffers);
  if (status != cudaSuccess) return status;
  if (combine.outputs == nullptr) return cudaErrorNotReady;
  return LaunchCombineOutputs(nullptr, combine.type, combine.tokens, combine.outputs);
}

// Sums the outputs of experts, and adds the sums in a norm: in one launch if `together`. The
// operands are outputs, expert_ids, expert_weights or null, x, weight of the norm; added, sum, y.
// `added` is not written if `together`.
int combine_and_norm(int64_t t, int32_t h, int32_t top_k, int32_t num_experts, int type,
                     int weight_type, float eps, int together, void* const* operands) {
  const auto data_type = static_cast<DataType>(type);
  const InputCombine combine = {
      {static_cast<const int32_t*>(operands[1]), static_cast<const float*>(operands[2]),
       operands[5], t, h, top_k, num_experts},
      operands[0],
      data_type};
  const NormCall norm = {t, h, data_type, static_cast<DataType>(weight_type), eps};
  const NormBuffers buffers = {operands[3], operands[5], operands[4], operands[6], operands[7]};
  if (together != 0) return LaunchCombineRmsNorm(nullptr, norm, buffers, combine);
  const cudaError_t status =
      LaunchCombineOutputs(nullptr, combine.type, combine.tokens, combine.outputs);
  return status == cudaSuccess ? LaunchAddRmsNorm(nullptr, norm, buffers) : status;
}

// Adds z to `routed` with a gate, and adds the result in a norm: in one launch if `together`. The
// operands are routed, z, gate or null, gate_input or null, gate_weight or null, x, weight of the
// norm; added, sum, y. `added` is not written if `together`. Without gate_weight, k is 0.
int gated_and_norm(int64_t rows, int64_t h, int64_t k, int type, int weight_type, float eps,
                   int together, void* const* operands) {
  const auto data_type = static_cast<DataType>(type);
  const AddGatedCall gated = {rows,        h,           data_type,  operands[0],
                              operands[2], operands[1], operands[7]};
  const AddLinearGatedCall linear = {rows,        h,           k,           data_type,  operands[0],
                                     operands[3], operands[4], operands[1], operands[7]};
  const NormCall norm = {rows, h, data_type, static_cast<DataType>(weight_type), eps};
  const NormBuffers buffers = {operands[5], operands[7], operands[6], operands[8], operands[9]};
  if (together != 0) {
    return k == 0 ? LaunchAddGatedRmsNorm(nullptr, norm, buffers, gated)
                  : LaunchAddGatedRmsNorm(nullptr, norm, buffers, linear);
  }
  const cudaError_t status =
      k == 0 ? LaunchAddGated(nullptr, gated) : LaunchAddLinearGated(nullptr, linear);
  return status == cudaSuccess ? LaunchAddRmsNorm(nullptr, norm, buffers) : status;
}

int64_t grouped_gemm_workspace_bytes(const GroupedGemmShape* shape, int engine) {
  return FunctionsOf(engine).product_bytes(*shape);
}

// The operands are x, weight, group_sizes, y, workspace.
int grouped_gemm(const GroupedGemmShape* shape, int type, int engine, int activation_scale,
                 int older, void* const* operands) {
  const GroupedGemmCall call = {*shape, static_cast<DataType>(type),
                                static_cast<ActivationScale>(activation_scale),
                                static_cast<EngineKind>(engine), older != 0};
  const GroupedGemmBuffers buffers = {operands[0], WeightsAt(operands + 1),
                                      static_cast<const int32_t*>(operands[6]), operands[7],
                                      operands[8]};
  return FunctionsOf(engine).product(nullptr, call, buffers);
}

void cut_linear_few(int64_t rows, int64_t n, int64_t k, int clusters, LinearFewCut* cut) {
  *cut = CutLinearFew(rows, n, k, clusters != 0);
}

void cut_dense_few(const DenseFewCall* call, int clusters, DenseFewCut* cut) {
  *cut = CutDenseFew(*call, clusters != 0);
}

// The operands are x, weight, weight_scale, row_scale, bias, y. Without clusters, the launch is
// that of a device before 9.0.
int dense_few(const DenseFewCall* call, int clusters, void* const* operands) {
  const DenseFewBuffers buffers = {operands[0],
                                   operands[1],
                                   operands[5],
                                   static_cast<const float*>(operands[2]),
                                   static_cast<const float*>(operands[3]),
                                   operands[4]};
  return clusters != 0
             ? LaunchDenseFew(nullptr, *call, buffers)
             : LaunchDenseCut(nullptr, *call, buffers, CutDenseFew(*call, /*clusters=*/false));
}

// As dense_few, for the kernel for 9.0, which need not be the one that LaunchDenseFew chooses.
int dense_sm90(const DenseFewCall* call, void* const* operands) {
  return LaunchDenseSm90(
      nullptr, *call,
      {operands[0], operands[1], operands[5], static_cast<const float*>(operands[2]),
       static_cast<const float*>(operands[3]), operands[4]});
}

// Computes a layer with plain weights after a norm. The operands are x, added, weight of the norm,
// weight, bias; sum, y of the norm, y.
int norm_and_dense(int weight_type, float eps, const DenseFewCall* call, int together,
                   void* const* operands) {
  const NormCall norm = {1, call->k, call->type, static_cast<DataType>(weight_type), eps};
  return AfterNorm(norm, together,
                   {operands[0], operands[1], operands[2], operands[5], operands[6]},
                   [&](const InputNorm* input) {
                     DenseFewBuffers buffers = {operands[6], operands[3], operands[7],
                                                nullptr,     nullptr,     operands[4]};
                     buffers.norm = input;
                     return LaunchDenseFew(nullptr, *call, buffers);
                   });
}

// Computes a linear layer in W4A16 after a norm. The operands are x, added, weight of the norm,
// packed, block_scale, global_scale, input_scale, bias; sum, y of the norm, y, workspace.
int norm_and_linear(int weight_type, float eps, const GroupedGemmShape* shape, int type, int engine,
                    int older, int together, void* const* operands) {
  const auto data_type = static_cast<DataType>(type);
  const NormCall norm = {1, shape->k, data_type, static_cast<DataType>(weight_type), eps};
  const GroupedGemmCall call = {*shape, data_type, ActivationScale::kNone,
                                static_cast<EngineKind>(engine), older != 0};
  return AfterNorm(norm, together,
                   {operands[0], operands[1], operands[2], operands[8], operands[9]},
                   [&](const InputNorm* input) {
                     GroupedGemmBuffers buffers = {operands[9], WeightsAt(operands + 3), nullptr,
                                                   operands[10], operands[11]};
                     buffers.norm = input;
                     return LaunchGroupedGemmW4A16(nullptr, call, buffers);
                   });
}

void cut_linear_sm90(int64_t n, int64_t k, int few, LinearSm90Cut* cut) {
  *cut = CutLinearSm90(n, k, few != 0);
}

// Computes one FP4 MMA. The operands are a [32, 4], b [32, 2], scale_a [32], scale_b [32], sums
// [32, 4]. If `shuffled`, the emulation for GPUs without the instruction runs. Otherwise
// fp4_mma.cuh in this folder runs.
int multiply_fp4(int shuffled, void* const* operands) {
  const auto a = static_cast<const uint32_t (*)[4]>(operands[0]);
  const auto b = static_cast<const uint32_t (*)[2]>(operands[1]);
  const auto scale_a = static_cast<const uint32_t*>(operands[2]);
  const auto scale_b = static_cast<const uint32_t*>(operands[3]);
  const auto sums = static_cast<float4*>(operands[4]);
  emulation::Run(dim3(1), 32, false, [=] {
    const unsigned lane = threadIdx.x;
    float own[4] = {};
    if (shuffled != 0) {
      sums[lane] = EmulateFp4(make_float4(0, 0, 0, 0),
                              make_uint4(a[lane][0], a[lane][1], a[lane][2], a[lane][3]),
                              make_uint2(b[lane][0], b[lane][1]), scale_a[lane], scale_b[lane]);
    } else {
      MultiplyAddFp4(own, a[lane], b[lane], scale_a[lane], scale_b[lane]);
      sums[lane] = make_float4(own[0], own[1], own[2], own[3]);
    }
  });
  return cudaSuccess;
}

// Returns what LaunchPackGroups writes for one grouped GEMM. The operands are starts, slots,
// global_scale, input_scale, and the results shapes [e, 3], strides [e, 3], scale_layouts [e, 10],
// offsets [e, 5], alpha [e], places [slots].
int pack_groups(int experts, int slots, int weight_rows, int k, int scaled, void* const* operands) {
  std::vector<uint8_t> memory(TakeGroups(nullptr, experts).bytes);
  const Fp4Groups groups = TakeGroups(memory.data(), experts).groups;
  // Nothing reads or writes at these addresses. Only what is added to them matters.
  auto* const codes = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  auto* const scales = reinterpret_cast<uint8_t*>(uintptr_t{1} << 41);
  auto* const output = reinterpret_cast<__nv_bfloat16*>(uintptr_t{1} << 42);
  const ExpertWeights weight = {codes, scales, static_cast<const float*>(operands[2]),
                                static_cast<const float*>(operands[3]), nullptr};
  ExpertRows rows = {};
  rows.starts = static_cast<int32_t*>(operands[0]);
  rows.slots = static_cast<int32_t*>(operands[1]);
  const Fp4Product product = {
      groups, weight, weight_rows, {codes, scales, k}, output, PadTo(weight_rows, 8), scaled != 0};
  const cudaError_t status = LaunchPackGroups(
      nullptr, {1, {product, {}}, rows, slots, static_cast<int32_t*>(operands[9])});
  std::copy(groups.shapes, groups.shapes + experts, static_cast<GroupShape*>(operands[4]));
  std::copy(groups.alpha, groups.alpha + experts, static_cast<float*>(operands[8]));
  for (int e = 0; e < experts; ++e) {
    if (groups.alphas[e] != groups.alpha + e) emulation::Fail("a pointer to another alpha");
    int64_t* strides = static_cast<int64_t*>(operands[5]) + 3 * e;
    strides[0] = groups.weights.strides[e];
    strides[1] = groups.rows.strides[e];
    strides[2] = groups.output_strides[e];
    ScaleLayout* layouts = static_cast<ScaleLayout*>(operands[6]) + 2 * e;
    layouts[0] = groups.weights.scale_layouts[e];
    layouts[1] = groups.rows.scale_layouts[e];
    int64_t* offsets = static_cast<int64_t*>(operands[7]) + 5 * e;
    offsets[0] = groups.weights.codes[e] - codes;
    offsets[1] = groups.weights.scales[e] - scales;
    offsets[2] = groups.rows.codes[e] - codes;
    offsets[3] = groups.rows.scales[e] - scales;
    offsets[4] = reinterpret_cast<uint8_t*>(groups.outputs[e]) - reinterpret_cast<uint8_t*>(output);
  }
  return status;
}

// The operands are x, global_scale or null, packed, block_scale, used_scale, partials.
int quantize(int64_t m, int64_t k, int type, int swizzled, void* const* operands) {
  return LaunchQuantize(nullptr, {m, k, static_cast<DataType>(type), swizzled != 0},
                        {operands[0], static_cast<const float*>(operands[1]),
                         static_cast<uint8_t*>(operands[2]), static_cast<uint8_t*>(operands[3]),
                         static_cast<float*>(operands[4]), static_cast<uint32_t*>(operands[5])});
}

// The operands are logits, bias, expert_ids, expert_weights.
int route(const RouterCall* call, void* const* operands) {
  return LaunchRoute(
      nullptr, *call,
      {static_cast<const float*>(operands[0]), static_cast<const float*>(operands[1]),
       static_cast<int32_t*>(operands[2]), static_cast<float*>(operands[3])});
}

int64_t attention_workspace_bytes(const AttentionShape* shape) {
  return AttentionWorkspaceBytes(*shape);
}

// The operands are q, k, v, positions, sinks, k_scale, v_scale, y, workspace. If `sm90`, the kernel
// for Hopper runs.
int attention(const AttentionShape* shape, int type, float scale, int window, int chunk, int sm90,
              int older, void* const* operands) {
  const AttentionCall call = {*shape,    static_cast<DataType>(type), scale, window, chunk,
                              older != 0};
  const auto launch = sm90 != 0 ? LaunchAttentionSm90 : LaunchAttention;
  return launch(nullptr, call,
                {operands[0], operands[1], operands[2], static_cast<const int32_t*>(operands[3]),
                 static_cast<const float*>(operands[4]), operands[7], operands[8],
                 static_cast<const float*>(operands[5]), static_cast<const float*>(operands[6])});
}

int64_t latent_attention_workspace_bytes(const AttentionShape* shape) {
  return LatentAttentionWorkspaceBytes(*shape);
}

// The operands are q, k, positions, sinks, y, workspace. If `sm90`, kernels are those of Hopper.
int latent_attention(const AttentionShape* shape, int type, float scale, int window, int chunk,
                     int sm90, void* const* operands) {
  const AttentionCall call = {*shape, static_cast<DataType>(type), scale, window, chunk};
  return LaunchLatentKernels(
      nullptr, call,
      {operands[0], operands[1], nullptr, static_cast<const int32_t*>(operands[2]),
       static_cast<const float*>(operands[3]), operands[4], operands[5]},
      sm90 != 0);
}

int attention_fills_sm90(const AttentionShape* shape) { return FillsSm90(*shape); }

// The operands are x, added, weight, sum, y.
int add_rms_norm(int64_t rows, int64_t h, int type, int weight_type, float eps,
                 void* const* operands) {
  return LaunchAddRmsNorm(
      nullptr, {rows, h, static_cast<DataType>(type), static_cast<DataType>(weight_type), eps},
      {operands[0], operands[1], operands[2], operands[3], operands[4]});
}

// The operands are gate_up, y.
int activate(int64_t rows, int64_t columns, int type, const ActivationParameters* activation,
             void* const* operands) {
  return LaunchActivate(
      nullptr, {rows, columns, static_cast<DataType>(type), *activation, operands[0], operands[1]});
}

// The operands are x, gate, z, y.
int add_gated(int64_t rows, int64_t columns, int type, void* const* operands) {
  return LaunchAddGated(nullptr, {rows, columns, static_cast<DataType>(type), operands[0],
                                  operands[1], operands[2], operands[3]});
}

// The operands are x, gate_input, gate_weight, z, y.
int add_linear_gated(int64_t rows, int64_t columns, int64_t k, int type, void* const* operands) {
  return LaunchAddLinearGated(nullptr, {rows, columns, k, static_cast<DataType>(type), operands[0],
                                        operands[1], operands[2], operands[3], operands[4]});
}

// The operands are x, gates, y.
int gate_heads(int64_t rows, int64_t heads, int64_t d, int64_t gate_columns, int type,
               void* const* operands) {
  return LaunchGateHeads(nullptr, {rows, static_cast<uint32_t>(heads), static_cast<uint32_t>(d),
                                   gate_columns, gate_columns == heads, static_cast<DataType>(type),
                                   operands[0], operands[1], operands[2]});
}

// The operands are down, positions, q_weight, kv_weight, frequencies, q, cache.
int prepare_latents(const LatentsCall* call, void* const* operands) {
  return LaunchPrepareLatents(
      nullptr, *call,
      {operands[0], static_cast<const int32_t*>(operands[1]), operands[2], operands[3],
       static_cast<const float*>(operands[4]), operands[5], operands[6]});
}

// The operands are x, matrices, positions, frequencies, y.
int head_product(const HeadProductCall* call, void* const* operands) {
  return LaunchHeadProduct(nullptr, *call,
                           {operands[0], operands[1], static_cast<const int32_t*>(operands[2]),
                            static_cast<const float*>(operands[3]), operands[4]});
}

// The operands are qkv, positions, q_weight, k_weight, frequencies, k_scale, v_scale, q, keys,
// values.
int prepare_heads(const HeadsCall* call, void* const* operands) {
  return LaunchPrepareHeads(
      nullptr, *call,
      {operands[0], static_cast<const int32_t*>(operands[1]), operands[2], operands[3],
       static_cast<const float*>(operands[4]), operands[7], operands[8], operands[9],
       static_cast<const float*>(operands[5]), static_cast<const float*>(operands[6])});
}

// Prepares the heads of one token of each row, and computes their attention: in one launch if
// `together`. The operands are qkv, positions, q_weight, k_weight, frequencies, sinks; y, q, keys,
// values, workspace.
int heads_and_attention(const HeadsCall* heads_call, const AttentionShape* shape, float scale,
                        int window, int chunk, int older, int together, void* const* operands) {
  const auto* positions = static_cast<const int32_t*>(operands[1]);
  const AttentionCall call = {*shape, heads_call->type, scale, window, chunk, older != 0};
  const HeadsBuffers heads = {
      operands[0], positions,   operands[2], operands[3], static_cast<const float*>(operands[4]),
      operands[7], operands[8], operands[9]};
  const InputHeads input = {*heads_call, heads, older != 0};
  AttentionBuffers buffers = {
      operands[7], operands[8], operands[9], positions, static_cast<const float*>(operands[5]),
      operands[6], operands[10]};
  if (together != 0) {
    buffers.heads = &input;
  } else if (const cudaError_t status = LaunchPrepareHeads(nullptr, *heads_call, heads)) {
    return status;
  }
  return LaunchAttention(nullptr, call, buffers);
}

// Writes the sines and the cosines of `count` angles.
void sines(int64_t count, const float* angles, float* sine, float* cosine) {
  for (int64_t i = 0; i < count; ++i) {
    const SineCosine both = SineAndCosine(angles[i]);
    sine[i] = both.sine;
    cosine[i] = both.cosine;
  }
}

// The operands are projected, positions, conv_weight, A_log, dt_bias, norm, rates or null, decays
// or null, gates or null, y, inputs, state.
int delta_step(const DeltaStepCall* call, void* const* operands) {
  return LaunchDeltaStep(
      nullptr, *call,
      {operands[0], static_cast<const int32_t*>(operands[1]),
       static_cast<const float*>(operands[2]), static_cast<const float*>(operands[3]),
       static_cast<const float*>(operands[4]), static_cast<const float*>(operands[5]), operands[6],
       operands[7], operands[8], operands[10], static_cast<float*>(operands[11]), operands[9]});
}

// The operands are x, positions, weight, bias or null, y of three parts, inputs.
int causal_convolution(const ConvolutionCall* call, void* const* operands) {
  const auto floats = [operands](int i) { return static_cast<float*>(operands[i]); };
  return LaunchConvolution(nullptr, *call,
                           {operands[0],
                            static_cast<const int32_t*>(operands[1]),
                            floats(2),
                            floats(3),
                            operands[7],
                            {floats(4), floats(5), floats(6)}});
}

int64_t delta_rule_workspace_bytes(const DeltaRuleCall* call) {
  return DeltaRuleWorkspaceBytes(*call);
}

// The operands are q, k, v, g, beta, lengths or null, y, state, workspace.
int delta_rule(const DeltaRuleCall* call, void* const* operands) {
  const auto floats = [operands](int i) { return static_cast<float*>(operands[i]); };
  return LaunchDeltaRule(
      nullptr, *call,
      {floats(0), floats(1), floats(2), floats(3), floats(4),
       static_cast<const int32_t*>(operands[5]), floats(7), floats(6), operands[8]});
}

int64_t mamba2_scan_workspace_bytes(const Mamba2ScanCall* call) {
  return Mamba2ScanWorkspaceBytes(*call);
}

// The operands are x, dt, a, B, C, D, lengths or null, y, state, workspace.
int mamba2_scan(const Mamba2ScanCall* call, void* const* operands) {
  const auto floats = [operands](int i) { return static_cast<float*>(operands[i]); };
  return LaunchMamba2Scan(
      nullptr, *call,
      {floats(0), floats(1), floats(2), floats(3), floats(4), floats(5),
       static_cast<const int32_t*>(operands[6]), floats(8), floats(7), operands[9]});
}

// The operands are projected, positions, conv_weight, conv_bias or null, A_log, dt_bias, D, norm,
// y, inputs, state, workspace.
int mamba2_step(const Mamba2StepCall* call, void* const* operands) {
  const auto floats = [operands](int i) { return static_cast<const float*>(operands[i]); };
  return LaunchMamba2Step(
      nullptr, *call,
      {operands[0], static_cast<const int32_t*>(operands[1]), floats(2), floats(3), floats(4),
       floats(5), floats(6), floats(7), operands[9], static_cast<float*>(operands[10]), operands[8],
       static_cast<float*>(operands[11])});
}
}
