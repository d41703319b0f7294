// The submodule `launch_facts` of _nvfp4_cpu: what Python must know about launches to choose a
// kernel, and to give it memory. The headers that kernels and handlers include state each fact.
// This file only names them. It is in the extension that every build has, so that programs can be
// lowered for a GPU without the other one.
#include "launch_facts.h"

#include <cstdint>

#include "cuda/limits.h"
#include "shapes.h"

namespace nb = nanobind;

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

}  // namespace

void DefineLaunchFacts(nb::module_ m) {
  m.doc() = "What kernels and Python must agree on: sizes that kernels take, and bytes of memory.";
  for (const Number& number : kNumbers) m.attr(number.name) = number.value;
  const nb::object range = nb::module_::import_("builtins").attr("range");
  for (const Sizes& sizes : kSizes) {
    m.attr(sizes.name) = range(sizes.least, sizes.most + 1, sizes.factor);
  }
}

}  // namespace nvfp4
