// The targets of attention, and of what prepares its heads: their operands (operands.h), and the
// handlers, which fill the structures of launch.h and launch kernels.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "cuda_bindings.h"
#include "cuda_checks.h"
#include "heads_operands.h"
#include "operands.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

constexpr Operand kAttentionOperands[] = {
    {"q", kHalf, "[b, t, n, d]"},           {"k", Like("q"), "[b, m, s, d]"},
    {"v", Like("q"), "[b, m, s, dv]"},      {"positions", kS32, "[b, t]"},
    {"sinks", kF32, "[n] or [0]"},          {"y", Like("q"), "[b, t, n, dv]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

constexpr Operand kAttentionFp8Operands[] = {
    {"q", kHalf, "[b, t, n, d]"},
    {"k", kE4M3, "[b, m, s, d]"},
    {"v", kE4M3, "[b, m, s, dv]"},
    {"k_scale", kF32, "[m]"},
    {"v_scale", kF32, "[m]"},
    {"positions", kS32, "[b, t]"},
    {"sinks", kF32, "[n] or [0]"},
    {"y", Like("q"), "[b, t, n, dv]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

constexpr Operand kLatentOperands[] = {
    {"q", kHalf, "[b, t, n, d]"},
    {"k", Like("q"), "[b, m, s, d]"},
    {"positions", kS32, "[b, t]"},
    {"sinks", kF32, "[n] or [0]"},
    {"y", Like("q"), "[b, t, n, dv]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

// What a form of attention allows. Widths are multiples of `factor`; `widest` names the operand
// that has the width of a value.
struct AttentionLimits {
  int64_t factor, most_d, most_dv;
  std::string_view widest;
};

// Reads what all forms of attention have.
ffi::Error ReadAttention(const Call& operands, const AttentionLimits& limits, float scale,
                         int32_t window, int32_t chunk, AttentionCall* call) {
  const int64_t b = operands.size("b"), t = operands.size("t"), n = operands.size("n");
  const int64_t m = operands.size("m"), s = operands.size("s"), d = operands.size("d");
  const int64_t dv = operands.size("dv");
  if (!(scale > 0.0f)) return Expected("scale", "a number above 0", std::to_string(scale));
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtLeast("m (k)", m, 1), MultipleOf("n (q)", n, m), MultipleOf("d (q)", d, limits.factor),
       MultipleOf(limits.widest, dv, limits.factor), AtMost("d (q)", d, limits.most_d),
       AtMost(limits.widest, dv, limits.most_dv), AtMost("s (k)", s, kMaxRows),
       AtMost("b (q)", b, kMaxRows), AtMost("t (q)", t, kMaxRows), AtMost("n (q)", n, kMaxRows),
       AtMost("b t n (q)", b * t * n, kMaxRows), AtLeast("window", window, 0),
       AtLeast("chunk", chunk, 0)}));
  *call = {{b, t, n, m, s, d, dv}, operands.type("q"), scale, window, chunk};
  call->positions_are_unchanged = running_chain.IsUnchanged(RangeOf(operands["positions"]));
  return ffi::Error::Success();
}

AttentionBuffers AttentionBuffersOf(const Call& operands) {
  AttentionBuffers buffers = {};
  buffers.q = operands.in<void>("q");
  buffers.k = operands.in<void>("k");
  buffers.positions = operands.in<int32_t>("positions");
  buffers.sinks = operands.in_or_null("sinks");
  buffers.y = operands.out("y");
  buffers.workspace = operands.out("workspace");
  return buffers;
}

// Checks heads that the preceding call has left to the call that reads them.
ffi::Error CheckInputHeads(const InputHeads& heads, const AttentionBuffers& buffers) {
  const HeadsBuffers& own = heads.buffers;
  if (own.q == buffers.q && own.keys == buffers.k && own.values == buffers.v &&
      own.positions == buffers.positions) {
    return ffi::Error::Success();
  }
  return Expected("q, k, v and positions", "those of the heads that are left to this call",
                  "other operands");
}

ffi::Error Attention(cudaStream_t stream, const Call& operands, float scale, int32_t window,
                     int32_t chunk) {
  constexpr AttentionLimits kLimits = {kHeadWidthFactor, kMaxHeadWidth, kMaxHeadWidth, "dv (v)"};
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(ReadAttention(operands, kLimits, scale, window, chunk, &call));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, AttentionWorkspaceBytes(call.shape)));
  AttentionBuffers buffers = AttentionBuffersOf(operands);
  buffers.v = operands.in<void>("v");
  const std::optional<InputHeads> heads = running_chain.TakeWork<InputHeads>();
  if (heads) {
    NVFP4_RETURN_IF_ERROR(CheckInputHeads(*heads, buffers));
    buffers.heads = &*heads;
  }
  return FromCuda(LaunchAttention(stream, call, buffers));
}

ffi::Error AttentionFp8(cudaStream_t stream, const Call& operands, float scale, int32_t window,
                        int32_t chunk) {
  constexpr AttentionLimits kLimits = {kE4M3HeadWidthFactor, kMaxHeadWidth, kMaxHeadWidth,
                                       "dv (v)"};
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(ReadAttention(operands, kLimits, scale, window, chunk, &call));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, AttentionWorkspaceBytes(call.shape)));
  AttentionBuffers buffers = AttentionBuffersOf(operands);
  buffers.v = operands.in<void>("v");
  buffers.k_scale = operands.in("k_scale");
  buffers.v_scale = operands.in("v_scale");
  return FromCuda(LaunchAttention(stream, call, buffers));
}

ffi::Error LatentAttention(cudaStream_t stream, const Call& operands, float scale, int32_t window,
                           int32_t chunk) {
  const int64_t most_dv = std::min(operands.size("d"), kMaxLatentValueWidth);
  const AttentionLimits limits = {kHeadWidthFactor, kMaxLatentWidth, most_dv, "dv (y)"};
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(ReadAttention(operands, limits, scale, window, chunk, &call));
  call.positions_are_unchanged = false;
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(operands, LatentAttentionWorkspaceBytes(call.shape)));
  return FromCuda(LaunchLatentAttention(stream, call, AttentionBuffersOf(operands)));
}

constexpr Operand kQueryOperands[] = {
    {"x", kHalf, "[rows, n, w]", kGivesSizes},
    {"keys", Like("x"), "[n, p, k]", kGivesSizes},
    {"positions", kS32, "[rows]"},
    {"e", kAnyType, "w - p", kLetter},
    {"frequencies", kF32, "[e/2] or [0]"},
    {"y", Like("x"), "[rows, n, k + e]", kResult},
};

constexpr Operand kValueOperands[] = {
    {"x", kHalf, "[rows, n, k]"},
    {"values", Like("x"), "[n, d, k]", kGivesSizes},
    {"y", Like("x"), "[rows, n, d]", kResult},
};

// Reads what both products of heads have. Each head has `k` channels in a sum, and `outputs` sums.
// `name` is that of the matrices.
ffi::Error ReadHeadProduct(const Call& operands, std::string_view name, int64_t k, int64_t outputs,
                           HeadProductCall* call) {
  const int64_t rows = operands.size("rows"), n = operands.size("n");
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {AtMost("rows (x)", rows, kMaxHeadProductRows), AtMost("n (x)", n, kMaxExtent),
       MultipleOf(call->expands ? "k (values)" : "k (keys)", call->expands ? k : outputs,
                  kHeadProductFactor),
       AtMost(name, k, call->expands ? kMaxHeadProductLatent : kMaxHeadProductQuery),
       AtMost(name, outputs, kMaxExtent / 64), AtLeast(name, std::min(k, outputs), 1)}));
  call->rows = static_cast<int32_t>(rows);
  call->n = static_cast<int32_t>(n);
  call->k = static_cast<int32_t>(k);
  call->outputs = static_cast<int32_t>(outputs);
  call->type = operands.type("x");
  return ffi::Error::Success();
}

ffi::Error AbsorbQueries(cudaStream_t stream, const Call& operands, float rotation_scale,
                         bool interleaved) {
  HeadProductCall call = {};
  const int64_t e = operands.size("e");
  NVFP4_RETURN_IF_ERROR(
      Expect({AtLeast("x [rows, n, p + e], e", e, 0), AtMost("e (q)", e, kMaxPreparedWidth)}));
  if (e % 2 != 0) return Expected("e (q)", "an even number", std::to_string(e));
  NVFP4_RETURN_IF_ERROR(
      ReadHeadProduct(operands, "keys [n, p, k]", operands.size("p"), operands.size("k"), &call));
  call.e = static_cast<int32_t>(e);
  call.half = static_cast<int32_t>(operands["frequencies"].element_count());
  call.rotation_scale = rotation_scale;
  call.interleaved = interleaved;
  const HeadProductBuffers buffers = {operands.in<void>("x"), operands.in<void>("keys"),
                                      operands.in<int32_t>("positions"),
                                      operands.in_or_null("frequencies"), operands.out("y")};
  return FromCuda(LaunchHeadProduct(stream, call, buffers));
}

ffi::Error ExpandValues(cudaStream_t stream, const Call& operands) {
  HeadProductCall call = {};
  call.expands = true;
  NVFP4_RETURN_IF_ERROR(
      ReadHeadProduct(operands, "values [n, d, k]", operands.size("k"), operands.size("d"), &call));
  const HeadProductBuffers buffers = {operands.in<void>("x"), operands.in<void>("values"), nullptr,
                                      nullptr, operands.out("y")};
  return FromCuda(LaunchHeadProduct(stream, call, buffers));
}

constexpr Operand kLatentsOperands[] = {
    {"down", kHalf, "[b, t, r + w]"},
    {"positions", kS32, "[b, t]"},
    {"cache", Like("down"), "[b, 1, s, w]", kGivesSizes},
    {"q_weight", Like("kv_weight"), "[r] or [0]"},
    {"kv_weight", kActivation, "[k]", kGivesSizes},
    {"e", kAnyType, "w - k", kLetter},
    {"frequencies", kF32, "[e/2] or [0]"},
    {"q", Like("down"), "[b, t, r]", kResult | kGivesSizes},
    {"new_cache", Like("down"), "[b, 1, s, w]", kResult},
};

ffi::Error PrepareLatents(cudaStream_t stream, const Call& operands, float eps,
                          float rotation_scale, bool interleaved) {
  LatentsCall call = {};
  call.starts_next = running_chain.StartsNext();
  call.type = operands.type("down");
  call.weight_type = operands.type("kv_weight");
  if (call.weight_type != call.type && call.weight_type != DataType::kF32) {
    return Expected("kv_weight", "float32 or the type of down",
                    TypeText(operands["kv_weight"].element_type()));
  }
  const int64_t b = operands.size("b"), t = operands.size("t"), s = operands.size("s");
  const int64_t r = operands.size("r"), k = operands.size("k"), e = operands.size("e");
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {MultipleOf("r (q)", r, kPreparedWidthFactor),
       MultipleOf("k (kv_weight)", k, kPreparedWidthFactor),
       MultipleOf("e (cache)", e, kPreparedWidthFactor), AtMost("r (q)", r, kMaxQueryLatent),
       AtMost("k (kv_weight)", k, kMaxKeyLatent), AtMost("e (cache)", e, kMaxPreparedWidth),
       AtMost("b (cache)", b, kMaxExtent),
       AtMost("t (q)", t, kMaxRows / std::max(2 * b, int64_t{1})),
       AtMost("s (cache)", s, kMaxRows)}));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, operands, "cache", "new_cache"));
  call.b = static_cast<int32_t>(b);
  call.t = static_cast<int32_t>(t);
  call.s = static_cast<int32_t>(s);
  call.r = static_cast<int32_t>(r);
  call.k = static_cast<int32_t>(k);
  call.e = static_cast<int32_t>(e);
  call.half = static_cast<int32_t>(operands["frequencies"].element_count());
  call.eps = eps;
  call.rotation_scale = rotation_scale;
  call.interleaved = interleaved;
  const LatentsBuffers buffers = {operands.in<void>("down"),
                                  operands.in<int32_t>("positions"),
                                  operands.in_or_null<void>("q_weight"),
                                  operands.in<void>("kv_weight"),
                                  operands.in_or_null("frequencies"),
                                  operands.out("q"),
                                  operands.out("new_cache")};
  return FromCuda(LaunchPrepareLatents(stream, call, buffers));
}

// Reads what both forms of `prepare_heads` have.
ffi::Error ReadHeads(cudaStream_t stream, const Call& operands, float eps, float rotation_scale,
                     bool rotates_first, bool gated, HeadsCall* call) {
  HeadsShape shape;
  NVFP4_RETURN_IF_ERROR(ReadHeadsShape(operands, gated, kPreparedWidthFactor, &shape));
  const auto [b, t, s, n, m, d, half] = shape;
  NVFP4_RETURN_IF_ERROR(
      Expect({AtMost("b (keys)", b, kMaxExtent), AtMost("n + 2m (qkv)", n + 2 * m, kMaxExtent),
              AtMost("t (q)", t, kMaxRows / std::max(b * (n + 2 * m), int64_t{1})),
              AtMost("s (keys)", s, kMaxRows)}));
  *call = {static_cast<int32_t>(b),
           static_cast<int32_t>(t),
           static_cast<int32_t>(s),
           static_cast<int32_t>(n),
           static_cast<int32_t>(m),
           static_cast<int32_t>(d),
           static_cast<int32_t>(half),
           operands.type("qkv"),
           operands.type("q_weight"),
           eps,
           rotation_scale,
           rotates_first,
           gated};
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, operands, "keys", "new_keys"));
  return PutInPlace(stream, operands, "values", "new_values");
}

HeadsBuffers HeadsBuffersOf(const Call& operands) {
  return {operands.in<void>("qkv"),
          operands.in<int32_t>("positions"),
          operands.in_or_null<void>("q_weight"),
          operands.in_or_null<void>("k_weight"),
          operands.in_or_null("frequencies"),
          operands.out("q"),
          operands.out("new_keys"),
          operands.out("new_values")};
}

ffi::Error PrepareHeads(cudaStream_t stream, const Call& operands, float eps, float rotation_scale,
                        bool rotates_first, bool gated) {
  HeadsCall call = {};
  NVFP4_RETURN_IF_ERROR(
      ReadHeads(stream, operands, eps, rotation_scale, rotates_first, gated, &call));
  if (running_chain.fuses) {
    call.starts_next = running_chain.Follows();  // as in AddRmsNorm of cuda_mixer_bindings.cc
    const bool is_unchanged = AreUnchanged(
        operands, {"positions", "keys", "values", "q_weight", "k_weight", "frequencies"});
    running_chain.work = InputHeads{call, HeadsBuffersOf(operands), is_unchanged};
    return ffi::Error::Success();
  }
  call.starts_next = running_chain.StartsNext();
  return FromCuda(LaunchPrepareHeads(stream, call, HeadsBuffersOf(operands)));
}

ffi::Error PrepareHeadsFp8(cudaStream_t stream, const Call& operands, float eps,
                           float rotation_scale, bool rotates_first, bool gated,
                           bool multiply_by_reciprocal) {
  HeadsCall call = {};
  NVFP4_RETURN_IF_ERROR(
      ReadHeads(stream, operands, eps, rotation_scale, rotates_first, gated, &call));
  call.multiply_by_reciprocal = multiply_by_reciprocal;
  call.starts_next = running_chain.StartsNext();
  HeadsBuffers buffers = HeadsBuffersOf(operands);
  buffers.k_scale = operands.in("k_scale");
  buffers.v_scale = operands.in("v_scale");
  return FromCuda(LaunchPrepareHeads(stream, call, buffers));
}

#define NVFP4_ATTENTION_ATTRIBUTES \
  .Attr<float>("scale").Attr<int32_t>("window").Attr<int32_t>("chunk")
#define NVFP4_HEADS_ATTRIBUTES \
  .Attr<float>("eps").Attr<float>("rotation_scale").Attr<bool>("rotates_first").Attr<bool>("gated")

}  // namespace

std::vector<NamedHandler> AttentionHandlers() {
  return {
      NVFP4_CUDA_TARGET("nvfp4_attention_cuda", kAttentionOperands, Attention,
                        NVFP4_ATTENTION_ATTRIBUTES),
      NVFP4_CUDA_TARGET("nvfp4_attention_fp8_cuda", kAttentionFp8Operands, AttentionFp8,
                        NVFP4_ATTENTION_ATTRIBUTES),
      NVFP4_CUDA_TARGET("nvfp4_latent_attention_cuda", kLatentOperands, LatentAttention,
                        NVFP4_ATTENTION_ATTRIBUTES),
      NVFP4_CUDA_TARGET("nvfp4_prepare_heads_cuda", kHeadsOperands, PrepareHeads,
                        NVFP4_HEADS_ATTRIBUTES),
      NVFP4_CUDA_TARGET("nvfp4_prepare_heads_fp8_cuda", kHeadsFp8Operands, PrepareHeadsFp8,
                        NVFP4_HEADS_ATTRIBUTES.Attr<bool>("multiply_by_reciprocal")),
      NVFP4_CUDA_TARGET(
          "nvfp4_prepare_latents_cuda", kLatentsOperands, PrepareLatents,
          .Attr<float>("eps").Attr<float>("rotation_scale").Attr<bool>("interleaved")),
      NVFP4_CUDA_TARGET("nvfp4_absorb_queries_cuda", kQueryOperands, AbsorbQueries,
                        .Attr<float>("rotation_scale").Attr<bool>("interleaved")),
      NVFP4_CUDA_TARGET("nvfp4_expand_values_cuda", kValueOperands, ExpandValues, ),
  };
}

}  // namespace nvfp4
