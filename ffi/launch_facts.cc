// The submodule `launch_facts` of _nvfp4_cpu: what Python must know about launches to choose a
// kernel, and to give it memory. The headers that kernels and handlers include state each fact.
// This file only names them. It is in the extension that every build has, so that programs can be
// lowered for a GPU without the other one.
#include "launch_facts.h"

#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "cpu/workspace_rounds.h"
#include "cuda/attention/splits.h"
#include "cuda/layers/forms.h"
#include "cuda/layers/workspaces.h"
#include "cuda/limits.h"
#include "cuda/recurrent/chunk_sizes.h"
#include "cuda/scheduling/schedule_sizes.h"
#include "shapes.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nvfp4 {
namespace {

struct Number {
  const char* name;
  int64_t value;
};

constexpr Number kNumbers[] = {
    {"MAX_EXPERTS", kMaxExperts},
    {"MAX_TOP_K", kMaxTopK},
    {"MAX_EXTENT", kMaxExtent},
    {"MAX_ENGINE_EXTENT", kMaxEngineExtent},
    {"SHARED_BYTES_SM80", kSharedBytesSm80},
    {"SHARED_BYTES_SM90", kSharedBytesSm90},
    {"SHARED_BYTES_SM120", kSharedBytesSm120},
    {"SHARED_BYTES_LATENT_ATTENTION", kSharedBytesLatentAttention},
    {"UNSPLIT_INPUTS", kUnsplitInputs},
    {"FEW_STATIC_BYTES", kFewStaticBytes},
    {"COMBINED_STATIC_BYTES", kCombinedStaticBytes},
};

// Stands for no upper bound but that of all matrices: OPEN of backends/record.py, less 1.
constexpr int64_t kOpen = (int64_t{1} << 62) - 1;

// The multiples of `factor` from `least` to `most`.
struct Sizes {
  const char* name;
  int64_t least, most, factor;
};

constexpr Sizes kSizes[] = {
    {"HEAD_WIDTHS", kHeadWidthFactor, kMaxHeadWidth, kHeadWidthFactor},
    {"E4M3_HEAD_WIDTHS", kE4M3HeadWidthFactor, kMaxHeadWidth, kE4M3HeadWidthFactor},
    {"E4M3_ATTENTION_ROWS", 1, kMaxE4M3AttentionRows, 1},
    {"LATENT_WIDTHS", kHeadWidthFactor, kMaxLatentWidth, kHeadWidthFactor},
    {"LATENT_VALUE_WIDTHS", kHeadWidthFactor, kMaxLatentValueWidth, kHeadWidthFactor},
    {"DENSE_ROWS", 1, kMostDenseRows, 1},
    {"DENSE_INPUTS", kDenseFactor, kOpen, kDenseFactor},
    {"DENSE_E4M3_INPUTS", kDenseE4M3Factor, kOpen, kDenseE4M3Factor},
    {"PREPARED_WIDTHS", 0, kMaxPreparedWidth, 1},
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
};

// Activations in 16 bits need the same memory, whichever type they have.
DataType TypeOfSize(int64_t itemsize) { return itemsize == 4 ? DataType::kF32 : DataType::kBF16; }

// Returns {FFI target: function that returns the bytes of scratch memory of a call}.
nb::dict WorkspaceBytes() {
  nb::dict bytes;
  const auto add = [&](const char* target, const auto& function, const auto&... names) {
    bytes[target] = nb::cpp_function(function, names...);
  };
  // An expert layer; `itemsize` is that of x.
  const auto add_moe = [&](const char* target, auto of_shape) {
    add(
        target,
        [of_shape](int64_t t, int64_t top_k, int64_t e, int64_t h, int64_t i, bool gated,
                   int64_t itemsize) -> int64_t {
          return of_shape(MoEShape{t, top_k, e, h, i, gated ? 2 * i : i}, TypeOfSize(itemsize));
        },
        "t"_a, "top_k"_a, "e"_a, "h"_a, "i"_a, "gated"_a, "itemsize"_a);
  };
  add_moe("nvfp4_moe_w4a16_sm80", MoEW4A16WorkspaceBytes);
  add_moe("nvfp4_moe_w4a16_sm90", MoEW4A16WorkspaceBytes);
  add_moe("nvfp4_moe_w4a4_sm120",
          [](const MoEShape& shape, DataType) { return MoEW4A4WorkspaceBytes(shape); });
  add_moe("nvfp4_moe_w4a4_sm100",
          [](const MoEShape& shape, DataType) { return MoEW4A4Sm100WorkspaceBytes(shape); });
  // A grouped GEMM, likewise.
  const auto add_grouped = [&](const char* target, auto of_shape) {
    add(
        target,
        [of_shape](int64_t m, int64_t e, int64_t n, int64_t k, int64_t itemsize) -> int64_t {
          return of_shape(GroupedGemmShape{m, n, n, k, e, 1}, TypeOfSize(itemsize));
        },
        "m"_a, "e"_a, "n"_a, "k"_a, "itemsize"_a);
  };
  add_grouped("nvfp4_grouped_gemm_w4a16_sm80", GroupedGemmW4A16WorkspaceBytes);
  add_grouped("nvfp4_grouped_gemm_w4a16_sm90", GroupedGemmW4A16WorkspaceBytes);
  add_grouped("nvfp4_grouped_gemm_w4a4_sm120", [](const GroupedGemmShape& shape, DataType) {
    return GroupedGemmW4A4WorkspaceBytes(shape);
  });
  add_grouped("nvfp4_grouped_gemm_w4a4_sm100", [](const GroupedGemmShape& shape, DataType) {
    return GroupedGemmW4A4Sm100WorkspaceBytes(shape);
  });
  // Without a given global scale, the kernel on a GPU searches the largest magnitude in pieces.
  add("nvfp4_quantize_cuda", &QuantizeWorkspaceBytes, "searches"_a);
  add("nvfp4_quantize_cpu", [](bool) { return 0; }, "searches"_a);
  const auto add_attention = [&](const char* target, int64_t (*of_shape)(const AttentionShape&)) {
    add(
        target,
        [of_shape](int64_t b, int64_t t, int64_t n, int64_t m, int64_t s, int64_t dv) {
          return of_shape({b, t, n, m, s, dv, dv});
        },
        "b"_a, "t"_a, "n"_a, "m"_a, "s"_a, "dv"_a);
  };
  add_attention("nvfp4_attention_cuda", AttentionWorkspaceBytes);
  add_attention("nvfp4_attention_fp8_cuda", AttentionWorkspaceBytes);
  add_attention("nvfp4_latent_attention_cuda", LatentAttentionWorkspaceBytes);
  add(
      "nvfp4_delta_rule_cuda",
      [](int64_t b, int64_t t, int32_t m, int32_t r, bool channel_decays) {
        return ChunkWorkspaceBytes(channel_decays ? Recurrence::kChannelDelta : Recurrence::kDelta,
                                   {b, t, m, r, 0, 0});
      },
      "b"_a, "t"_a, "m"_a, "r"_a, "channel_decays"_a);
  add(
      "nvfp4_mamba2_scan_cuda",
      [](int64_t b, int64_t t, int32_t groups, int32_t shared) {
        return ChunkWorkspaceBytes(Recurrence::kMamba2, {b, t, groups, shared, 0, 0});
      },
      "b"_a, "t"_a, "groups"_a, "shared"_a);
  add("nvfp4_mamba2_step_cuda", &Mamba2StepWorkspaceBytes, "b"_a, "heads"_a, "p"_a);
  return bytes;
}

// Returns {FFI target: function that returns the fields of WorkspaceRounds}.
nb::dict Rounds() {
  const auto fields = [](const cpu::WorkspaceRounds& rounds) {
    return std::make_tuple(rounds.fixed, rounds.of_row, rounds.most_rows);
  };
  nb::dict rounds;
  rounds["nvfp4_moe_w4a16_cpu"] = nb::cpp_function(
      [fields](int64_t top_k, int64_t e, int64_t h, int64_t i, bool, int64_t itemsize) {
        return fields(cpu::MoEW4A16CpuRounds(top_k, e, h, i, TypeOfSize(itemsize)));
      },
      "top_k"_a, "e"_a, "h"_a, "i"_a, "gated"_a, "itemsize"_a);
  rounds["nvfp4_grouped_gemm_w4a16_cpu"] = nb::cpp_function(
      [fields](int64_t e, int64_t, int64_t k, int64_t itemsize) {
        return fields(cpu::GroupedGemmW4A16CpuRounds(e, k, TypeOfSize(itemsize)));
      },
      "e"_a, "n"_a, "k"_a, "itemsize"_a);
  return rounds;
}

}  // namespace

void DefineLaunchFacts(nb::module_ m) {
  m.doc() = "What kernels and Python must agree on: sizes that kernels take, and bytes of memory.";
  for (const Number& number : kNumbers) m.attr(number.name) = number.value;
  const nb::object range = nb::module_::import_("builtins").attr("range");
  for (const Sizes& sizes : kSizes) {
    m.attr(sizes.name) = range(sizes.least, sizes.most + 1, sizes.factor);
  }
  m.def(
      "most_unsorted_tokens",
      [](int64_t top_k, int64_t h, int64_t i, bool gated, bool token_scales, int64_t shared_bytes) {
        const auto scale = token_scales ? ActivationScale::kToken : ActivationScale::kNone;
        return MostUnsortedTokens(MoEShape{0, top_k, 1, h, i, gated ? 2 * i : i}, DataType::kBF16,
                                  scale, shared_bytes);
      },
      "top_k"_a, "h"_a, "i"_a, "gated"_a, "token_scales"_a, "shared_bytes"_a,
      "Return up to how many tokens an expert layer runs without sorting them by expert.");
  m.def(
      "few_slots_shared_bytes",
      [](int64_t slots, int64_t top_k, int64_t h, int64_t i) {
        return FewSlotsSharedBytes(MoEShape{0, top_k, 1, h, i, i}, slots);
      },
      "slots"_a, "top_k"_a, "h"_a, "i"_a,
      "Return the bytes of shared memory of a block that runs so many slots without a sort.");
  m.def(
      "most_linear_rows",
      [](int64_t k, bool clusters, int64_t shared_bytes) {
        return MostLinearRows(k, {0, shared_bytes, clusters, false});
      },
      "k"_a, "clusters"_a, "shared_bytes"_a,
      "Return up to how many rows a linear layer runs in one kernel, without a workspace.");
  m.attr("WORKSPACE_BYTES") = WorkspaceBytes();
  m.attr("WORKSPACE_ROUNDS") = Rounds();
}

}  // namespace nvfp4
