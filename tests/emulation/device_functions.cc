// Kernels and instructions that no FFI target of the extension runs alone, and how kernels cut
// their work.
#include "device_functions.h"

#include <algorithm>
#include <string>
#include <vector>

#include "checks.h"
#include "cuda/attention/attention.cuh"
#include "cuda/epilogues/combine.cuh"
#include "cuda/gemm/dense_few.cuh"
#include "cuda/gemm/fp4_groups.cuh"
#include "cuda/gemm/linear_few.cuh"
#include "cuda/gemm/linear_sm90.cuh"
#include "cuda/heads/sine.cuh"
#include "cuda/instructions/fp4_mma.cuh"
#include "cuda/launch.h"
#include "cuda_checks.h"

namespace nvfp4 {

Forced forced = Forced::kNothing;

// The bindings call these two instead of LaunchAttention and LaunchDenseFew.
cudaError_t LaunchChosenAttention(cudaStream_t stream, const AttentionCall& call,
                                  const AttentionBuffers& buffers) {
  const auto launch = forced == Forced::kSm90 ? LaunchAttentionSm90 : LaunchAttention;
  return launch(stream, call, buffers);
}

cudaError_t LaunchChosenDense(cudaStream_t stream, const DenseFewCall& call,
                              const DenseFewBuffers& buffers) {
  if (forced == Forced::kSm90) return LaunchDenseSm90(stream, call, buffers);
  if (forced == Forced::kNothing) return LaunchDenseFew(stream, call, buffers);
  return LaunchDenseCut(stream, call, buffers, CutDenseFew(call, /*clusters=*/false));
}

// The plain kernels are not compiled: their instructions have no replacement here.
cudaError_t LaunchMoE(cudaStream_t, const MoECall&, const MoEBuffers&) {
  return cudaErrorNotSupported;
}
cudaError_t LaunchGroupedGemm(cudaStream_t, const GroupedGemmCall&, const GroupedGemmBuffers&) {
  return cudaErrorNotSupported;
}

namespace {

struct TakenGroups {
  Fp4Groups groups;
  int64_t bytes;
};

TakenGroups TakeGroups(void* buffer, int64_t experts) {
  Sections sections(buffer);
  const Fp4Groups groups = TakeFp4Groups(&sections, experts);
  return {groups, sections.bytes()};
}

InputCombine CombineOf(ffi::AnyBuffer outputs, ffi::AnyBuffer expert_ids,
                       ffi::AnyBuffer expert_weights, ffi::AnyBuffer y, int64_t num_experts,
                       DataType type) {
  const auto dims = outputs.dimensions();
  return {{Data<int32_t>(expert_ids), DataOrNull(expert_weights), y.untyped_data(), dims[0],
           static_cast<int32_t>(dims[2]), static_cast<int32_t>(dims[1]),
           static_cast<int32_t>(num_experts)},
          outputs.untyped_data(),
          type};
}

// Sums the outputs [t, top_k, h] of experts.
ffi::Error Combine(cudaStream_t stream, ffi::AnyBuffer outputs, ffi::AnyBuffer expert_ids,
                   ffi::AnyBuffer expert_weights, ffi::Result<ffi::AnyBuffer> y,
                   int64_t num_experts) {
  DataType type;
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("outputs", outputs.element_type(), &type));
  const InputCombine combine =
      CombineOf(outputs, expert_ids, expert_weights, *y, num_experts, type);
  return FromCuda(LaunchCombineOutputs(stream, type, combine.tokens, combine.outputs), "combine");
}

// Sums the outputs of experts, and adds the sums in a norm: in one launch if `together`. `added` is
// then not written.
ffi::Error CombineAndNorm(cudaStream_t stream, ffi::AnyBuffer outputs, ffi::AnyBuffer expert_ids,
                          ffi::AnyBuffer expert_weights, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                          ffi::Result<ffi::AnyBuffer> added, ffi::Result<ffi::AnyBuffer> sum,
                          ffi::Result<ffi::AnyBuffer> y, int64_t num_experts, bool together) {
  NormCall norm = {x.dimensions()[0], x.dimensions()[1]};
  norm.eps = 1e-6f;
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &norm.type));
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("weight", weight.element_type(), &norm.weight_type));
  const InputCombine combine =
      CombineOf(outputs, expert_ids, expert_weights, *added, num_experts, norm.type);
  const NormBuffers buffers = {x.untyped_data(), added->untyped_data(), weight.untyped_data(),
                               sum->untyped_data(), y->untyped_data()};
  if (together) {
    return FromCuda(LaunchCombineRmsNorm(stream, norm, buffers, combine), "combine_and_norm");
  }
  const cudaError_t status =
      LaunchCombineOutputs(stream, combine.type, combine.tokens, combine.outputs);
  return FromCuda(status == cudaSuccess ? LaunchAddRmsNorm(stream, norm, buffers) : status,
                  "combine_and_norm");
}

// Computes one FP4 MMA of a [32, 4], b [32, 2], scale_a [32] and scale_b [32]. If `shuffled`, the
// emulation for GPUs without the instruction runs. Otherwise fp4_mma.cuh in this folder runs.
ffi::Error MultiplyFp4(cudaStream_t, ffi::AnyBuffer a_words, ffi::AnyBuffer b_words,
                       ffi::AnyBuffer a_scales, ffi::AnyBuffer b_scales,
                       ffi::Result<ffi::AnyBuffer> result, bool shuffled) {
  const auto* a = static_cast<const uint32_t (*)[4]>(a_words.untyped_data());
  const auto* b = static_cast<const uint32_t (*)[2]>(b_words.untyped_data());
  const auto *scale_a = Data<uint32_t>(a_scales), *scale_b = Data<uint32_t>(b_scales);
  auto* const sums = static_cast<float4*>(result->untyped_data());
  emulation::Run(dim3(1), 32, false, [=] {
    const unsigned lane = threadIdx.x;
    float own[4] = {};
    if (shuffled) {
      sums[lane] = EmulateFp4(make_float4(0, 0, 0, 0),
                              make_uint4(a[lane][0], a[lane][1], a[lane][2], a[lane][3]),
                              make_uint2(b[lane][0], b[lane][1]), scale_a[lane], scale_b[lane]);
    } else {
      MultiplyAddFp4(own, a[lane], b[lane], scale_a[lane], scale_b[lane]);
      sums[lane] = make_float4(own[0], own[1], own[2], own[3]);
    }
  });
  return ffi::Error::Success();
}

// Returns what LaunchPackGroups writes for one grouped GEMM. The words of strides and offsets are
// the halves of 64-bit numbers.
ffi::Error PackGroups(cudaStream_t stream, ffi::AnyBuffer starts, ffi::AnyBuffer slots,
                      ffi::AnyBuffer global_scale, ffi::AnyBuffer input_scale,
                      ffi::Result<ffi::AnyBuffer> shapes, ffi::Result<ffi::AnyBuffer> stride_words,
                      ffi::Result<ffi::AnyBuffer> scale_layouts,
                      ffi::Result<ffi::AnyBuffer> offset_words, ffi::Result<ffi::AnyBuffer> alpha,
                      ffi::Result<ffi::AnyBuffer> places, int64_t weight_rows, int64_t k,
                      bool scaled) {
  const int64_t experts = global_scale.element_count();
  std::vector<uint8_t> memory(TakeGroups(nullptr, experts).bytes);
  const Fp4Groups groups = TakeGroups(memory.data(), experts).groups;
  // Nothing reads or writes at these addresses. Only what is added to them matters.
  auto* const codes = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  auto* const scales = reinterpret_cast<uint8_t*>(uintptr_t{1} << 41);
  auto* const output = reinterpret_cast<__nv_bfloat16*>(uintptr_t{1} << 42);
  const ExpertWeights weight = {codes, scales, Data<float>(global_scale), Data<float>(input_scale),
                                nullptr};
  ExpertRows rows = {};
  rows.starts = static_cast<int32_t*>(starts.untyped_data());
  rows.slots = static_cast<int32_t*>(slots.untyped_data());
  const auto columns = static_cast<int32_t>(weight_rows);
  const Fp4Product product = {
      groups, weight, columns, {codes, scales, static_cast<int32_t>(k)}, output, PadTo(columns, 8),
      scaled};
  const cudaError_t status =
      LaunchPackGroups(stream, {1,
                                {product, {}},
                                rows,
                                static_cast<int32_t>(slots.element_count()),
                                static_cast<int32_t*>(places->untyped_data())});
  std::copy(groups.shapes, groups.shapes + experts,
            static_cast<GroupShape*>(shapes->untyped_data()));
  std::copy(groups.alpha, groups.alpha + experts, static_cast<float*>(alpha->untyped_data()));
  for (int64_t e = 0; e < experts; ++e) {
    if (groups.alphas[e] != groups.alpha + e) emulation::Fail("a pointer to another alpha");
    int64_t* strides = static_cast<int64_t*>(stride_words->untyped_data()) + 3 * e;
    strides[0] = groups.weights.strides[e];
    strides[1] = groups.rows.strides[e];
    strides[2] = groups.output_strides[e];
    ScaleLayout* layouts = static_cast<ScaleLayout*>(scale_layouts->untyped_data()) + 2 * e;
    layouts[0] = groups.weights.scale_layouts[e];
    layouts[1] = groups.rows.scale_layouts[e];
    int64_t* offsets = static_cast<int64_t*>(offset_words->untyped_data()) + 5 * e;
    offsets[0] = groups.weights.codes[e] - codes;
    offsets[1] = groups.weights.scales[e] - scales;
    offsets[2] = groups.rows.codes[e] - codes;
    offsets[3] = groups.rows.scales[e] - scales;
    offsets[4] = reinterpret_cast<uint8_t*>(groups.outputs[e]) - reinterpret_cast<uint8_t*>(output);
  }
  return FromCuda(status, "pack_groups");
}

XLA_FFI_DEFINE_HANDLER(kCombine, Combine,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // outputs         [t, k, h]
                           .Arg<ffi::AnyBuffer>()  // expert_ids      [t, k]
                           .Arg<ffi::AnyBuffer>()  // expert_weights  [t, k] or [0]
                           .Ret<ffi::AnyBuffer>()  // y               [t, h]
                           .Attr<int64_t>("num_experts"));

XLA_FFI_DEFINE_HANDLER(kCombineAndNorm, CombineAndNorm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // outputs         [t, k, h]
                           .Arg<ffi::AnyBuffer>()  // expert_ids      [t, k]
                           .Arg<ffi::AnyBuffer>()  // expert_weights  [t, k] or [0]
                           .Arg<ffi::AnyBuffer>()  // x               [t, h]
                           .Arg<ffi::AnyBuffer>()  // weight          [h]
                           .Ret<ffi::AnyBuffer>()  // added           [t, h]
                           .Ret<ffi::AnyBuffer>()  // sum             [t, h]
                           .Ret<ffi::AnyBuffer>()  // y               [t, h]
                           .Attr<int64_t>("num_experts")
                           .Attr<bool>("together"));

XLA_FFI_DEFINE_HANDLER(kMultiplyFp4, MultiplyFp4,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // a        [32, 4]
                           .Arg<ffi::AnyBuffer>()  // b        [32, 2]
                           .Arg<ffi::AnyBuffer>()  // scale_a  [32]
                           .Arg<ffi::AnyBuffer>()  // scale_b  [32]
                           .Ret<ffi::AnyBuffer>()  // sums     [32, 4]
                           .Attr<bool>("shuffled"));

XLA_FFI_DEFINE_HANDLER(kPackGroups, PackGroups,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // starts         [e + 1]
                           .Arg<ffi::AnyBuffer>()  // slots          [slots]
                           .Arg<ffi::AnyBuffer>()  // global_scale   [e]
                           .Arg<ffi::AnyBuffer>()  // input_scale    [e]
                           .Ret<ffi::AnyBuffer>()  // shapes         [e, 3]
                           .Ret<ffi::AnyBuffer>()  // strides        [e, 3] of two words
                           .Ret<ffi::AnyBuffer>()  // scale_layouts  [e, 10]
                           .Ret<ffi::AnyBuffer>()  // offsets        [e, 5] of two words
                           .Ret<ffi::AnyBuffer>()  // alpha          [e]
                           .Ret<ffi::AnyBuffer>()  // places         [slots]
                           .Attr<int64_t>("weight_rows")
                           .Attr<int64_t>("k")
                           .Attr<bool>("scaled"));

}  // namespace

std::vector<NamedHandler> FunctionHandlers() {
  return {
      {"emulated_combine", kCombine},
      {"emulated_combine_and_norm", kCombineAndNorm},
      {"emulated_multiply_fp4", kMultiplyFp4},
      {"emulated_pack_groups", kPackGroups},
  };
}

}  // namespace nvfp4

using namespace nvfp4;

extern "C" {

void cut_linear_few(int64_t rows, int64_t n, int64_t k, int clusters, LinearFewCut* cut) {
  *cut = CutLinearFew(rows, n, k, clusters != 0);
}

void cut_linear_sm90(int64_t n, int64_t k, int few, LinearSm90Cut* cut) {
  *cut = CutLinearSm90(n, k, few != 0);
}

// The types are values of DataType. The layer has a bias in float32.
void cut_dense_few(int64_t rows, int64_t n, int64_t k, int type, int weight_type, int clusters,
                   DenseFewCut* cut) {
  DenseFewCall call = {rows, n, k, static_cast<DataType>(type), static_cast<DataType>(weight_type)};
  call.output_type = DataType::kF32;
  call.bias_size = 4;
  *cut = CutDenseFew(call, clusters != 0);
}

// Whether a Hopper GPU takes its own kernel for attention of this shape.
int attention_fills_sm90(int64_t b, int64_t t, int64_t n, int64_t m, int64_t s, int64_t d) {
  return FillsSm90({b, t, n, m, s, d, d});
}

// Writes the sines and the cosines of `count` angles.
void sines(int64_t count, const float* angles, float* sine, float* cosine) {
  for (int64_t i = 0; i < count; ++i) {
    const SineCosine both = SineAndCosine(angles[i]);
    sine[i] = both.sine;
    cosine[i] = both.cosine;
  }
}
}
