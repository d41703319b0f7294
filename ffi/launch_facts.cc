// The submodule `launch_facts` of _nvfp4_cpu: what Python must know about launches to choose a
// kernel, and to give it memory. The headers that kernels and handlers include state each fact.
// This file only names them. It is in the extension that every build has, so that programs can be
// lowered for a GPU without the other one.
#include "launch_facts.h"

#include <cstdint>

#include "cuda/attention/splits.h"
#include "cuda/limits.h"
#include "cuda/recurrent/chunk_sizes.h"
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
    {"AMAX_PARTIALS", kAmaxPartials},
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

// The bytes of scratch memory that a call needs.
struct AttentionWorkspace {
  const char* name;
  int64_t (*bytes)(const AttentionShape& shape);
};

constexpr AttentionWorkspace kAttentionWorkspaces[] = {
    {"attention_workspace_bytes", AttentionWorkspaceBytes},
    {"latent_attention_workspace_bytes", LatentAttentionWorkspaceBytes},
};

struct RecurrenceWorkspace {
  const char* name;
  Recurrence recurrence;
};

constexpr RecurrenceWorkspace kRecurrenceWorkspaces[] = {
    {"delta_rule_workspace_bytes", Recurrence::kDelta},
    {"channel_delta_rule_workspace_bytes", Recurrence::kChannelDelta},
    {"mamba2_scan_workspace_bytes", Recurrence::kMamba2},
};

}  // namespace

void DefineLaunchFacts(nb::module_ m) {
  m.doc() = "What kernels and Python must agree on: sizes that kernels take, and bytes of memory.";
  for (const Number& number : kNumbers) m.attr(number.name) = number.value;
  const nb::object range = nb::module_::import_("builtins").attr("range");
  for (const Sizes& sizes : kSizes) {
    m.attr(sizes.name) = range(sizes.least, sizes.most + 1, sizes.factor);
  }
  for (const AttentionWorkspace& workspace : kAttentionWorkspaces) {
    m.def(
        workspace.name,
        [bytes = workspace.bytes](int64_t b, int64_t t, int64_t n, int64_t m, int64_t s,
                                  int64_t dv) { return bytes({b, t, n, m, s, dv, dv}); },
        "b"_a, "t"_a, "n"_a, "m"_a, "s"_a, "dv"_a,
        "Return the bytes of scratch memory for n query heads and m key heads of s keys.");
  }
  for (const RecurrenceWorkspace& workspace : kRecurrenceWorkspaces) {
    m.def(
        workspace.name,
        [recurrence = workspace.recurrence](int64_t b, int64_t t, int32_t key_heads,
                                            int32_t shared) {
          return ChunkWorkspaceBytes(recurrence, {b, t, key_heads, shared, 0, 0});
        },
        "b"_a, "t"_a, "key_heads"_a, "shared"_a,
        "Return the bytes of scratch memory for `shared` heads of each key head, or of a group.");
  }
  m.def("mamba2_step_workspace_bytes", &Mamba2StepWorkspaceBytes, "b"_a, "heads"_a, "p"_a,
        "Return the bytes of scratch memory for one token of b rows.");
}

}  // namespace nvfp4
