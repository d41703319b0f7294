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
#include "cuda_peers.h"
#include "operands.h"

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

InputCombine CombineOf(const Call& operands, void* y, int64_t num_experts) {
  return {{operands.in<int32_t>("expert_ids"), operands.in_or_null("expert_weights"), y,
           operands.size("t"), operands.size32("h"), operands.size32("k"),
           static_cast<int32_t>(num_experts)},
          operands.in<void>("outputs"),
          operands.type("outputs")};
}

constexpr Operand kCombineOperands[] = {
    {"outputs", kActivation, "[t, k, h]"},
    {"expert_ids", kS32, "[t, k]"},
    {"expert_weights", kF32, "[t, k] or [0]"},
    {"y", Like("outputs"), "[t, h]", kResult},
};

// Sums the outputs of experts.
ffi::Error CombineAlone(cudaStream_t stream, const Call& operands, int64_t num_experts) {
  NVFP4_RETURN_IF_ERROR(operands.Check());
  const InputCombine combine = CombineOf(operands, operands.out("y"), num_experts);
  return FromCuda(LaunchCombineOutputs(stream, combine.type, combine.tokens, combine.outputs));
}

constexpr Operand kCombineAndNormOperands[] = {
    {"outputs", kActivation, "[t, k, h]"},
    {"expert_ids", kS32, "[t, k]"},
    {"expert_weights", kF32, "[t, k] or [0]"},
    {"x", Like("outputs"), "[t, h]"},
    {"weight", kActivation, "[h]"},
    {"added", Like("x"), "[t, h]", kResult},
    {"sum", Like("x"), "[t, h]", kResult},
    {"y", Like("x"), "[t, h]", kResult},
};

// Sums the outputs of experts, and adds the sums in a norm: in one launch if `together`. `added` is
// then not written.
ffi::Error CombineAndNorm(cudaStream_t stream, const Call& operands, int64_t num_experts,
                          bool together) {
  NVFP4_RETURN_IF_ERROR(operands.Check());
  const NormCall norm = {operands.size("t"), operands.size("h"), operands.type("x"),
                         operands.type("weight"), 1e-6f};
  const InputCombine combine = CombineOf(operands, operands.out("added"), num_experts);
  const NormBuffers buffers = {operands.in<void>("x"), operands.in<void>("added"),
                               operands.in<void>("weight"), operands.out("sum"), operands.out("y")};
  if (together) {
    return FromCuda(LaunchCombineRmsNorm(stream, norm, buffers, combine));
  }
  const cudaError_t status =
      LaunchCombineOutputs(stream, combine.type, combine.tokens, combine.outputs);
  return FromCuda(status == cudaSuccess ? LaunchAddRmsNorm(stream, norm, buffers) : status);
}

constexpr Operand kMultiplyOperands[] = {
    {"a", kAnyType, "[32, 4]"},         {"b", kAnyType, "[32, 2]"},
    {"scale_a", kAnyType, "[32, 1]"},   {"scale_b", kAnyType, "[32, 1]"},
    {"sums", kF32, "[32, 4]", kResult},
};

// Computes one FP4 MMA. If `shuffled`, the emulation for GPUs without the instruction runs.
// Otherwise fp4_mma.cuh in this folder runs.
ffi::Error MultiplyFp4(cudaStream_t, const Call& operands, bool shuffled) {
  NVFP4_RETURN_IF_ERROR(operands.Check());
  const auto* a = operands.in<uint32_t[4]>("a");
  const auto* b = operands.in<uint32_t[2]>("b");
  const auto *scale_a = operands.in<uint32_t>("scale_a"),
             *scale_b = operands.in<uint32_t>("scale_b");
  auto* const sums = operands.out<float4>("sums");
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

constexpr Operand kPackGroupsOperands[] = {
    {"starts", kS32, "[e + 1]"},
    {"slots", kS32, "[slots]"},
    {"global_scale", kF32, "[e]"},
    {"input_scale", kF32, "[e]"},
    {"shapes", kS32, "[e, 3]", kResult},
    {"strides", kS32, "[e, 6]", kResult},  // pairs of words
    {"scale_layouts", kS32, "[e, 10]", kResult},
    {"offsets", kS32, "[e, 10]", kResult},  // pairs of words
    {"alpha", kF32, "[e]", kResult},
    {"places", kS32, "[slots]", kResult},
};

// Returns what LaunchPackGroups writes for one grouped GEMM. The words of strides and offsets are
// the halves of 64-bit numbers.
ffi::Error PackGroups(cudaStream_t stream, const Call& operands, int64_t weight_rows, int64_t k,
                      bool scaled) {
  NVFP4_RETURN_IF_ERROR(operands.Check());
  const int64_t experts = operands.size("e");
  std::vector<uint8_t> memory(TakeGroups(nullptr, experts).bytes);
  const Fp4Groups groups = TakeGroups(memory.data(), experts).groups;
  // Nothing reads or writes at these addresses. Only what is added to them matters.
  auto* const codes = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  auto* const scales = reinterpret_cast<uint8_t*>(uintptr_t{1} << 41);
  auto* const output = reinterpret_cast<__nv_bfloat16*>(uintptr_t{1} << 42);
  const ExpertWeights weight = {codes, scales, operands.in("global_scale"),
                                operands.in("input_scale"), nullptr};
  ExpertRows rows = {};
  rows.starts = operands.out<int32_t>("starts");
  rows.slots = operands.out<int32_t>("slots");
  const auto columns = static_cast<int32_t>(weight_rows);
  const Fp4Product product = {
      groups, weight, columns, {codes, scales, static_cast<int32_t>(k)}, output, PadTo(columns, 8),
      scaled};
  const cudaError_t status = LaunchPackGroups(
      stream, {1, {product, {}}, rows, operands.size32("slots"), operands.out<int32_t>("places")});
  std::copy(groups.shapes, groups.shapes + experts, operands.out<GroupShape>("shapes"));
  std::copy(groups.alpha, groups.alpha + experts, operands.out<float>("alpha"));
  for (int64_t e = 0; e < experts; ++e) {
    if (groups.alphas[e] != groups.alpha + e) emulation::Fail("a pointer to another alpha");
    int64_t* strides = operands.out<int64_t>("strides") + 3 * e;
    strides[0] = groups.weights.strides[e];
    strides[1] = groups.rows.strides[e];
    strides[2] = groups.output_strides[e];
    ScaleLayout* layouts = operands.out<ScaleLayout>("scale_layouts") + 2 * e;
    layouts[0] = groups.weights.scale_layouts[e];
    layouts[1] = groups.rows.scale_layouts[e];
    int64_t* offsets = operands.out<int64_t>("offsets") + 5 * e;
    offsets[0] = groups.weights.codes[e] - codes;
    offsets[1] = groups.weights.scales[e] - scales;
    offsets[2] = groups.rows.codes[e] - codes;
    offsets[3] = groups.rows.scales[e] - scales;
    offsets[4] = reinterpret_cast<uint8_t*>(groups.outputs[e]) - reinterpret_cast<uint8_t*>(output);
  }
  return FromCuda(status);
}

}  // namespace

std::vector<NamedHandler> FunctionHandlers() {
  return {
      NVFP4_CUDA_TARGET("emulated_combine", kCombineOperands, CombineAlone,
                        .Attr<int64_t>("num_experts")),
      NVFP4_CUDA_TARGET("emulated_combine_and_norm", kCombineAndNormOperands, CombineAndNorm,
                        .Attr<int64_t>("num_experts").Attr<bool>("together")),
      NVFP4_CUDA_TARGET("emulated_multiply_fp4", kMultiplyOperands, MultiplyFp4,
                        .Attr<bool>("shuffled")),
      NVFP4_CUDA_TARGET("emulated_pack_groups", kPackGroupsOperands, PackGroups,
                        .Attr<int64_t>("weight_rows").Attr<int64_t>("k").Attr<bool>("scaled")),
  };
}

}  // namespace nvfp4

using namespace nvfp4;

extern "C" {

void cut_linear_few(int64_t rows, int64_t n, int64_t k, int clusters, LinearFewCut* cut) {
  *cut = CutLinearFew(rows, n, k, clusters != 0);
}

void cut_linear_sm90(int64_t n, int64_t k, int few, int weight_bits, LinearSm90Cut* cut) {
  *cut = CutLinearSm90(n, k, few != 0, weight_bits);
}

// The types are values of DataType. The layer has a bias in float32.
void cut_dense_few(int64_t rows, int64_t n, int64_t k, int type, int weight_type, int clusters,
                   DenseFewCut* cut) {
  DenseFewCall call = {rows, n, k, static_cast<DataType>(type), static_cast<DataType>(weight_type)};
  call.output_type = DataType::kF32;
  call.bias_size = 4;
  *cut = CutDenseFew(call, clusters != 0);
}

// Makes the emulated GPU rank `rank` of `count` GPUs, in groups of that name. The other GPUs have
// already sent their values for the next two sums of `pieces` pieces of 16 bytes: `sent`
// [count, pieces] by rank. If `row_pieces` is not `pieces`, rows of so many have blocks of their
// own; `by_rows` says so in the stamps.
void connect_peers(const char* groups, int rank, int count, int pieces, int row_pieces, int by_rows,
                   int type, const uint8_t* sent) {
  std::vector<uintptr_t> memory(count);
  for (uintptr_t& one : memory) one = AllocatePeerMemory(0, count);
  auto* const own = reinterpret_cast<char*>(memory[rank]);
  const auto send = [&](int sender, uint64_t epoch, int block, int first, int many) {
    const int slot = static_cast<int>(epoch % 2);
    *StampIn(own, slot, block, sender) = epoch << 32 | pieces << 8 | by_rows << 7 | type;
    for (int thread = 0; thread < many; ++thread) {
      uint32_t words[4];
      std::memcpy(words, sent + (int64_t{sender} * pieces + first + thread) * kPieceBytes,
                  sizeof(words));
      uint64_t* const lines = LinesIn(own, count, slot, sender, block, thread);
      for (int i = 0; i < 4; ++i) lines[i / 2 * kSecondLine + i % 2] = epoch << 32 | words[i];
    }
  };
  for (int sender = 0; sender < count; ++sender) {
    int block = 0;
    for (int row = 0; row < pieces; row += row_pieces) {
      for (int first = 0; first < row_pieces; first += kPeerThreads, ++block) {
        const int many = std::min(kPeerThreads, row_pieces - first);
        for (const uint64_t epoch : {1, 2}) send(sender, epoch, block, row + first, many);
      }
    }
  }
  AddPeerGroup(groups, 0, rank, memory, 10.0);
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
