// The handlers of attention, and of what prepares its heads. As in cuda_bindings.cc, each one
// decodes its operands and attributes, checks them, and launches kernels.

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
#include "heads_checks.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

ffi::Error CheckAttention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer positions, ffi::AnyBuffer sinks, ffi::AnyBuffer y,
                          ffi::DataType key_type, AttentionShape* shape, DataType* type) {
  const int64_t factor = key_type == ffi::F8E4M3FN ? kE4M3HeadWidthFactor : kHeadWidthFactor;
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("q [b, t, n, d]", q.element_type(), type));
  if (*type == DataType::kF32) return Expected("q", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectType("k", k.element_type(), key_type));
  NVFP4_RETURN_IF_ERROR(ExpectType("v", v.element_type(), key_type));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("sinks", sinks.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, n, d]", q.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("k [b, m, s, d]", k.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("v [b, m, s, dv]", v.dimensions(), 4));
  const int64_t b = q.dimensions()[0], t = q.dimensions()[1];
  const int64_t n = q.dimensions()[2], d = q.dimensions()[3];
  const int64_t m = k.dimensions()[1], s = k.dimensions()[2], dv = v.dimensions()[3];
  *shape = {b, t, n, m, s, d, dv};
  NVFP4_RETURN_IF_ERROR(ExpectDims("k [b, m, s, d]", k.dimensions(), {b, m, s, d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("v [b, m, s, dv]", v.dimensions(), {b, m, s, dv}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("sinks [n]", sinks.dimensions(), {n}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, t, n, dv]", y.dimensions(), {b, t, n, dv}));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("m (k)", m, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (q)", n, m));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (q)", d, factor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("dv (v)", dv, factor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (q)", d, kMaxHeadWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("dv (v)", dv, kMaxHeadWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (k)", s, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (q)", b, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (q)", n, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b t n (q)", b * t * n, kMaxRows));
  return ExpectAligned(
      {{"q", q}, {"k", k}, {"v", v}, {"positions", positions}, {"sinks", sinks}, {"y", y}},
      kAlignment);
}

// Reads the attributes that the two forms of attention share.
ffi::Error ReadVisibility(float scale, int32_t window, int32_t chunk, AttentionCall* call) {
  if (!(scale > 0.0f)) return Expected("scale", "a number above 0", std::to_string(scale));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("window", window, 0));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("chunk", chunk, 0));
  call->scale = scale;
  call->window = window;
  call->chunk = chunk;
  return ffi::Error::Success();
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

ffi::Error Attention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::AnyBuffer positions, ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::AnyBuffer> workspace, float scale, int32_t window,
                     int32_t chunk) {
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(
      CheckAttention(q, k, v, positions, sinks, *y, q.element_type(), &call.shape, &call.type));
  NVFP4_RETURN_IF_ERROR(ReadVisibility(scale, window, chunk, &call));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, AttentionWorkspaceBytes(call.shape)));
  call.positions_are_unchanged = running_chain.IsUnchanged(RangeOf(positions));
  AttentionBuffers buffers = {q.untyped_data(),         k.untyped_data(),  v.untyped_data(),
                              Data<int32_t>(positions), DataOrNull(sinks), y->untyped_data(),
                              workspace->untyped_data()};
  const std::optional<InputHeads> heads = running_chain.TakeWork<InputHeads>();
  if (heads) {
    NVFP4_RETURN_IF_ERROR(CheckInputHeads(*heads, buffers));
    buffers.heads = &*heads;
  }
  return FromCuda(LaunchAttention(stream, call, buffers), "nvfp4_attention_cuda");
}

ffi::Error AttentionFp8(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                        ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, ffi::AnyBuffer positions,
                        ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> workspace, float scale, int32_t window,
                        int32_t chunk) {
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(
      CheckAttention(q, k, v, positions, sinks, *y, ffi::F8E4M3FN, &call.shape, &call.type));
  NVFP4_RETURN_IF_ERROR(CheckHeadScales(k_scale, v_scale, call.shape.m, kAlignment));
  NVFP4_RETURN_IF_ERROR(ReadVisibility(scale, window, chunk, &call));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, AttentionWorkspaceBytes(call.shape)));
  call.positions_are_unchanged = running_chain.IsUnchanged(RangeOf(positions));
  const AttentionBuffers buffers = {
      q.untyped_data(),          k.untyped_data(),     v.untyped_data(),
      Data<int32_t>(positions),  DataOrNull(sinks),    y->untyped_data(),
      workspace->untyped_data(), Data<float>(k_scale), Data<float>(v_scale)};
  return FromCuda(LaunchAttention(stream, call, buffers), "nvfp4_attention_fp8_cuda");
}

ffi::Error CheckLatentAttention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer positions,
                                ffi::AnyBuffer sinks, ffi::AnyBuffer y, AttentionCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("q [b, t, n, d]", q.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("q", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectType("k", k.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y.element_type(), q.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("sinks", sinks.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, n, d]", q.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("k [b, m, s, d]", k.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("y [b, t, n, dv]", y.dimensions(), 4));
  const int64_t b = q.dimensions()[0], t = q.dimensions()[1];
  const int64_t n = q.dimensions()[2], d = q.dimensions()[3];
  const int64_t m = k.dimensions()[1], s = k.dimensions()[2], dv = y.dimensions()[3];
  call->shape = {b, t, n, m, s, d, dv};
  NVFP4_RETURN_IF_ERROR(ExpectDims("k [b, m, s, d]", k.dimensions(), {b, m, s, d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("sinks [n]", sinks.dimensions(), {n}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, t, n, dv]", y.dimensions(), {b, t, n, dv}));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("m (k)", m, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (q)", n, m));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (q)", d, kHeadWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("dv (y)", dv, kHeadWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (q)", d, kMaxLatentWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("dv (y)", dv, std::min(d, kMaxLatentValueWidth)));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (k)", s, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (q)", b, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (q)", n, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b t n (q)", b * t * n, kMaxRows));
  return ExpectAligned({{"q", q}, {"k", k}, {"positions", positions}, {"sinks", sinks}, {"y", y}},
                       kAlignment);
}

ffi::Error LatentAttention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                           ffi::AnyBuffer positions, ffi::AnyBuffer sinks,
                           ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                           float scale, int32_t window, int32_t chunk) {
  AttentionCall call = {};
  NVFP4_RETURN_IF_ERROR(CheckLatentAttention(q, k, positions, sinks, *y, &call));
  NVFP4_RETURN_IF_ERROR(ReadVisibility(scale, window, chunk, &call));
  NVFP4_RETURN_IF_ERROR(ExpectWorkspace(*workspace, LatentAttentionWorkspaceBytes(call.shape)));
  const AttentionBuffers buffers = {q.untyped_data(),         k.untyped_data(),  nullptr,
                                    Data<int32_t>(positions), DataOrNull(sinks), y->untyped_data(),
                                    workspace->untyped_data()};
  return FromCuda(LaunchLatentAttention(stream, call, buffers), "nvfp4_latent_attention_cuda");
}

// Checks what both products of heads share, and reads their sizes from the matrices [n, a, b].
ffi::Error CheckHeadProduct(ffi::AnyBuffer x, std::string_view name, ffi::AnyBuffer matrices,
                            ffi::AnyBuffer y, HeadProductCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("x", x.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("x", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectType(name, matrices.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y.element_type(), x.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [rows, n, k + e]", x.dimensions(), 3));
  NVFP4_RETURN_IF_ERROR(ExpectRank(name, matrices.dimensions(), 3));
  const int64_t rows = x.dimensions()[0], n = x.dimensions()[1];
  const int64_t k = matrices.dimensions()[call->expands ? 2 : 1];
  const int64_t outputs = matrices.dimensions()[call->expands ? 1 : 2];
  const int64_t e = x.dimensions()[2] - k;
  NVFP4_RETURN_IF_ERROR(ExpectDims(name, matrices.dimensions(),
                                   {n, matrices.dimensions()[1], matrices.dimensions()[2]}));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("x [rows, n, k + e], e", e, 0));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("y [rows, n, outputs + e]", y.dimensions(), {rows, n, outputs + e}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("rows (x)", rows, kMaxHeadProductRows));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n (x)", n, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf(call->expands ? "k (values)" : "k (keys)",
                                         call->expands ? k : outputs, kHeadProductFactor));
  NVFP4_RETURN_IF_ERROR(
      ExpectAtMost(name, k, call->expands ? kMaxHeadProductLatent : kMaxHeadProductQuery));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost(name, outputs, kMaxExtent / 64));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast(name, std::min(k, outputs), 1));
  call->rows = static_cast<int32_t>(rows);
  call->n = static_cast<int32_t>(n);
  call->k = static_cast<int32_t>(k);
  call->outputs = static_cast<int32_t>(outputs);
  call->e = static_cast<int32_t>(e);
  return ExpectAligned({{"x", x}, {name, matrices}, {"y", y}}, kAlignment);
}

ffi::Error AbsorbQueries(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer keys,
                         ffi::AnyBuffer positions, ffi::AnyBuffer frequencies,
                         ffi::Result<ffi::AnyBuffer> y, float rotation_scale, bool interleaved) {
  HeadProductCall call = {};
  NVFP4_RETURN_IF_ERROR(CheckHeadProduct(q, "keys [n, p, k]", keys, *y, &call));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("frequencies", frequencies.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [rows]", positions.dimensions(), {call.rows}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDimsOrEmpty("frequencies [e/2]", frequencies.dimensions(), {call.e / 2}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (q)", call.e, kMaxPreparedWidth));
  if (call.e % 2 != 0) return Expected("e (q)", "an even number", std::to_string(call.e));
  NVFP4_RETURN_IF_ERROR(
      ExpectAligned({{"positions", positions}, {"frequencies", frequencies}}, kAlignment));
  call.half = static_cast<int32_t>(frequencies.dimensions()[0]);
  call.rotation_scale = rotation_scale;
  call.interleaved = interleaved;
  const HeadProductBuffers buffers = {q.untyped_data(), keys.untyped_data(),
                                      Data<int32_t>(positions), DataOrNull(frequencies),
                                      y->untyped_data()};
  return FromCuda(LaunchHeadProduct(stream, call, buffers), "nvfp4_absorb_queries_cuda");
}

ffi::Error ExpandValues(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                        ffi::Result<ffi::AnyBuffer> y) {
  HeadProductCall call = {};
  call.expands = true;
  NVFP4_RETURN_IF_ERROR(CheckHeadProduct(x, "values [n, d, k]", values, *y, &call));
  NVFP4_RETURN_IF_ERROR(ExpectDims("x [rows, n, k]", x.dimensions(), {call.rows, call.n, call.k}));
  const HeadProductBuffers buffers = {x.untyped_data(), values.untyped_data(), nullptr, nullptr,
                                      y->untyped_data()};
  return FromCuda(LaunchHeadProduct(stream, call, buffers), "nvfp4_expand_values_cuda");
}

ffi::Error ReadHeads(const HeadsOperands& operands, ffi::DataType cache_type, HeadsCall* call) {
  HeadsShape shape;
  NVFP4_RETURN_IF_ERROR(CheckHeads(operands, call->gated, cache_type, kAlignment, &shape,
                                   &call->type, &call->weight_type));
  const auto [b, t, s, n, m, d, half] = shape;
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("d (keys)", d, kPreparedWidthFactor));
  if (half != 0) {
    NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("r (frequencies)", 2 * half, kPreparedWidthFactor));
  }
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (keys)", b, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("n + 2m (qkv)", n + 2 * m, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows / std::max(b * (n + 2 * m), int64_t{1})));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (keys)", s, kMaxRows));
  call->b = static_cast<int32_t>(b);
  call->t = static_cast<int32_t>(t);
  call->s = static_cast<int32_t>(s);
  call->n = static_cast<int32_t>(n);
  call->m = static_cast<int32_t>(m);
  call->d = static_cast<int32_t>(d);
  call->half = static_cast<int32_t>(half);
  return ffi::Error::Success();
}

ffi::Error CheckLatents(ffi::AnyBuffer down, ffi::AnyBuffer positions, ffi::AnyBuffer cache,
                        ffi::AnyBuffer q_weight, ffi::AnyBuffer kv_weight,
                        ffi::AnyBuffer frequencies, ffi::AnyBuffer q, ffi::AnyBuffer new_cache,
                        LatentsCall* call) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("down", down.element_type(), &call->type));
  if (call->type == DataType::kF32) return Expected("down", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(
      ExpectActivationType("kv_weight", kv_weight.element_type(), &call->weight_type));
  if (call->weight_type != call->type && call->weight_type != DataType::kF32) {
    return Expected("kv_weight", "float32 or the type of down", TypeText(kv_weight.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectType("q_weight", q_weight.element_type(), kv_weight.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("frequencies", frequencies.element_type(), ffi::F32));
  for (const NamedOperand& operand :
       {NamedOperand{"cache", cache}, NamedOperand{"q", q}, NamedOperand{"new_cache", new_cache}}) {
    NVFP4_RETURN_IF_ERROR(
        ExpectType(operand.name, operand.buffer.element_type(), down.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(ExpectRank("cache [b, 1, s, k + e]", cache.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, r]", q.dimensions(), 3));
  NVFP4_RETURN_IF_ERROR(ExpectRank("kv_weight [k]", kv_weight.dimensions(), 1));
  NVFP4_RETURN_IF_ERROR(ExpectRank("frequencies [e/2]", frequencies.dimensions(), 1));
  const int64_t b = cache.dimensions()[0], s = cache.dimensions()[2], width = cache.dimensions()[3];
  const int64_t t = q.dimensions()[1], r = q.dimensions()[2], k = kv_weight.dimensions()[0];
  const int64_t e = width - k;
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("r (q)", r, kPreparedWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("k (kv_weight)", k, kPreparedWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("e (cache)", e, kPreparedWidthFactor));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("r (q)", r, kMaxQueryLatent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("k (kv_weight)", k, kMaxKeyLatent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("e (cache)", e, kMaxPreparedWidth));
  NVFP4_RETURN_IF_ERROR(ExpectDims("cache [b, 1, s, k + e]", cache.dimensions(), {b, 1, s, k + e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("new_cache", new_cache.dimensions(), {b, 1, s, k + e}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("q [b, t, r]", q.dimensions(), {b, t, r}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("down [b, t, r + k + e]", down.dimensions(), {b, t, r + width}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("q_weight [r]", q_weight.dimensions(), {r}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("frequencies [e/2]", frequencies.dimensions(), {e / 2}));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("b (cache)", b, kMaxExtent));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("t (q)", t, kMaxRows / std::max(2 * b, int64_t{1})));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("s (cache)", s, kMaxRows));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"down", down},
                                       {"positions", positions},
                                       {"cache", cache},
                                       {"q_weight", q_weight},
                                       {"kv_weight", kv_weight},
                                       {"frequencies", frequencies},
                                       {"q", q}},
                                      kAlignment));
  call->b = static_cast<int32_t>(b);
  call->t = static_cast<int32_t>(t);
  call->s = static_cast<int32_t>(s);
  call->r = static_cast<int32_t>(r);
  call->k = static_cast<int32_t>(k);
  call->e = static_cast<int32_t>(e);
  call->half = static_cast<int32_t>(frequencies.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error PrepareLatents(cudaStream_t stream, ffi::AnyBuffer down, ffi::AnyBuffer positions,
                          ffi::AnyBuffer cache, ffi::AnyBuffer q_weight, ffi::AnyBuffer kv_weight,
                          ffi::AnyBuffer frequencies, ffi::Result<ffi::AnyBuffer> q,
                          ffi::Result<ffi::AnyBuffer> new_cache, float eps, float rotation_scale,
                          bool interleaved) {
  LatentsCall call = {};
  call.starts_next = running_chain.StartsNext();
  NVFP4_RETURN_IF_ERROR(CheckLatents(down, positions, cache, q_weight, kv_weight, frequencies, *q,
                                     *new_cache, &call));
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_cache", cache, *new_cache));
  call.eps = eps;
  call.rotation_scale = rotation_scale;
  call.interleaved = interleaved;
  const LatentsBuffers buffers = {down.untyped_data(),        Data<int32_t>(positions),
                                  DataOrNull<void>(q_weight), kv_weight.untyped_data(),
                                  DataOrNull(frequencies),    q->untyped_data(),
                                  new_cache->untyped_data()};
  return FromCuda(LaunchPrepareLatents(stream, call, buffers), "nvfp4_prepare_latents_cuda");
}

// The attributes that both forms of `prepare_heads` have.
struct HeadsOptions {
  float eps, rotation_scale;
  bool rotates_first, gated;
};

HeadsCall StartHeads(const HeadsOptions& options) {
  HeadsCall call = {};
  call.gated = options.gated;
  call.eps = options.eps;
  call.rotation_scale = options.rotation_scale;
  call.rotates_first = options.rotates_first;
  return call;
}

ffi::Error PutCacheInPlace(cudaStream_t stream, const HeadsOperands& o) {
  NVFP4_RETURN_IF_ERROR(PutInPlace(stream, "new_keys", o.keys, o.new_keys));
  return PutInPlace(stream, "new_values", o.values, o.new_values);
}

HeadsBuffers BuffersOf(const HeadsOperands& o) {
  return {o.qkv.untyped_data(),         Data<int32_t>(o.positions), DataOrNull<void>(o.q_weight),
          DataOrNull<void>(o.k_weight), DataOrNull(o.frequencies),  o.q.untyped_data(),
          o.new_keys.untyped_data(),    o.new_values.untyped_data()};
}

// Whether all operands but the qkv are unchanged since the previous kernel.
bool AreUnchanged(const HeadsOperands& o) {
  const ffi::AnyBuffer others[] = {o.positions, o.keys,     o.values,
                                   o.q_weight,  o.k_weight, o.frequencies};
  return std::all_of(std::begin(others), std::end(others), [](const ffi::AnyBuffer& operand) {
    return operand.element_count() == 0 || running_chain.IsUnchanged(RangeOf(operand));
  });
}

ffi::Error PrepareHeads(cudaStream_t stream, ffi::AnyBuffer qkv, ffi::AnyBuffer positions,
                        ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer q_weight,
                        ffi::AnyBuffer k_weight, ffi::AnyBuffer frequencies,
                        ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> new_keys,
                        ffi::Result<ffi::AnyBuffer> new_values, float eps, float rotation_scale,
                        bool rotates_first, bool gated) {
  HeadsCall call = StartHeads({eps, rotation_scale, rotates_first, gated});
  const HeadsOperands operands = {qkv,      positions,   keys, values,    q_weight,
                                  k_weight, frequencies, *q,   *new_keys, *new_values};
  NVFP4_RETURN_IF_ERROR(ReadHeads(operands, qkv.element_type(), &call));
  NVFP4_RETURN_IF_ERROR(PutCacheInPlace(stream, operands));
  if (running_chain.fuses) {
    call.starts_next = running_chain.Follows();  // as in AddRmsNorm of cuda_mixer_bindings.cc
    running_chain.work = InputHeads{call, BuffersOf(operands), AreUnchanged(operands)};
    return ffi::Error::Success();
  }
  call.starts_next = running_chain.StartsNext();
  return FromCuda(LaunchPrepareHeads(stream, call, BuffersOf(operands)),
                  "nvfp4_prepare_heads_cuda");
}

ffi::Error PrepareHeadsFp8(cudaStream_t stream, ffi::AnyBuffer qkv, ffi::AnyBuffer positions,
                           ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer q_weight,
                           ffi::AnyBuffer k_weight, ffi::AnyBuffer frequencies,
                           ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale,
                           ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> new_keys,
                           ffi::Result<ffi::AnyBuffer> new_values, float eps, float rotation_scale,
                           bool rotates_first, bool gated, bool multiply_by_reciprocal) {
  HeadsCall call = StartHeads({eps, rotation_scale, rotates_first, gated});
  call.multiply_by_reciprocal = multiply_by_reciprocal;
  const HeadsOperands operands = {qkv,      positions,   keys, values,    q_weight,
                                  k_weight, frequencies, *q,   *new_keys, *new_values};
  NVFP4_RETURN_IF_ERROR(ReadHeads(operands, ffi::F8E4M3FN, &call));
  NVFP4_RETURN_IF_ERROR(CheckHeadScales(k_scale, v_scale, call.m, kAlignment));
  NVFP4_RETURN_IF_ERROR(PutCacheInPlace(stream, operands));
  call.starts_next = running_chain.StartsNext();
  HeadsBuffers buffers = BuffersOf(operands);
  buffers.k_scale = Data<float>(k_scale);
  buffers.v_scale = Data<float>(v_scale);
  return FromCuda(LaunchPrepareHeads(stream, call, buffers), "nvfp4_prepare_heads_fp8_cuda");
}

// kCmdBufferCompatible: as in cuda_mixer_bindings.cc.
XLA_FFI_DEFINE_HANDLER(kAttention, Attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q          [b, t, n, d]
                           .Arg<ffi::AnyBuffer>()  // k          [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // v          [b, m, s, dv]
                           .Arg<ffi::AnyBuffer>()  // positions  [b, t]
                           .Arg<ffi::AnyBuffer>()  // sinks      [n] or [0]
                           .Ret<ffi::AnyBuffer>()  // y          [b, t, n, dv]
                           .Ret<ffi::AnyBuffer>()  // workspace  U8 [bytes]
                           .Attr<float>("scale")
                           .Attr<int32_t>("window")
                           .Attr<int32_t>("chunk"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAttentionFp8, AttentionFp8,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q          [b, t, n, d]
                           .Arg<ffi::AnyBuffer>()  // k          F8E4M3FN [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // v          F8E4M3FN [b, m, s, dv]
                           .Arg<ffi::AnyBuffer>()  // k_scale    F32 [m]
                           .Arg<ffi::AnyBuffer>()  // v_scale    F32 [m]
                           .Arg<ffi::AnyBuffer>()  // positions  [b, t]
                           .Arg<ffi::AnyBuffer>()  // sinks      [n] or [0]
                           .Ret<ffi::AnyBuffer>()  // y          [b, t, n, dv]
                           .Ret<ffi::AnyBuffer>()  // workspace  U8 [bytes]
                           .Attr<float>("scale")
                           .Attr<int32_t>("window")
                           .Attr<int32_t>("chunk"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kLatentAttention, LatentAttention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q          [b, t, n, d]
                           .Arg<ffi::AnyBuffer>()  // k          [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // positions  [b, t]
                           .Arg<ffi::AnyBuffer>()  // sinks      [n] or [0]
                           .Ret<ffi::AnyBuffer>()  // y          [b, t, n, dv]
                           .Ret<ffi::AnyBuffer>()  // workspace  U8 [bytes]
                           .Attr<float>("scale")
                           .Attr<int32_t>("window")
                           .Attr<int32_t>("chunk"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPrepareHeads, PrepareHeads,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // qkv          [b, t, (n + 2m) d]; 2n if gated
                           .Arg<ffi::AnyBuffer>()  // positions    [b, t]
                           .Arg<ffi::AnyBuffer>()  // keys         [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // values       [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // q_weight     [d] or [0]
                           .Arg<ffi::AnyBuffer>()  // k_weight     [d] or [0]
                           .Arg<ffi::AnyBuffer>()  // frequencies  [r/2]
                           .Ret<ffi::AnyBuffer>()  // q            [b, t, n, d]
                           .Ret<ffi::AnyBuffer>()  // new_keys     the memory of keys
                           .Ret<ffi::AnyBuffer>()  // new_values   the memory of values
                           .Attr<float>("eps")
                           .Attr<float>("rotation_scale")
                           .Attr<bool>("rotates_first")
                           .Attr<bool>("gated"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPrepareHeadsFp8, PrepareHeadsFp8,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // qkv          [b, t, (n + 2m) d]; 2n if gated
                           .Arg<ffi::AnyBuffer>()  // positions    [b, t]
                           .Arg<ffi::AnyBuffer>()  // keys         F8E4M3FN [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // values       F8E4M3FN [b, m, s, d]
                           .Arg<ffi::AnyBuffer>()  // q_weight     [d] or [0]
                           .Arg<ffi::AnyBuffer>()  // k_weight     [d] or [0]
                           .Arg<ffi::AnyBuffer>()  // frequencies  [r/2]
                           .Arg<ffi::AnyBuffer>()  // k_scale      F32 [m]
                           .Arg<ffi::AnyBuffer>()  // v_scale      F32 [m]
                           .Ret<ffi::AnyBuffer>()  // q            [b, t, n, d]
                           .Ret<ffi::AnyBuffer>()  // new_keys     the memory of keys
                           .Ret<ffi::AnyBuffer>()  // new_values   the memory of values
                           .Attr<float>("eps")
                           .Attr<float>("rotation_scale")
                           .Attr<bool>("rotates_first")
                           .Attr<bool>("gated")
                           .Attr<bool>("multiply_by_reciprocal"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kPrepareLatents, PrepareLatents,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // down         [b, t, r + k + e]
                           .Arg<ffi::AnyBuffer>()  // positions    [b, t]
                           .Arg<ffi::AnyBuffer>()  // cache        [b, 1, s, k + e]
                           .Arg<ffi::AnyBuffer>()  // q_weight     [r] or [0]
                           .Arg<ffi::AnyBuffer>()  // kv_weight    [k]
                           .Arg<ffi::AnyBuffer>()  // frequencies  [e/2] or [0]
                           .Ret<ffi::AnyBuffer>()  // q            [b, t, r]
                           .Ret<ffi::AnyBuffer>()  // new_cache, in the memory of cache
                           .Attr<float>("eps")
                           .Attr<float>("rotation_scale")
                           .Attr<bool>("interleaved"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAbsorbQueries, AbsorbQueries,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // q            [rows, n, p + e]
                           .Arg<ffi::AnyBuffer>()  // keys         [n, p, k]
                           .Arg<ffi::AnyBuffer>()  // positions    [rows]
                           .Arg<ffi::AnyBuffer>()  // frequencies  [e/2] or [0]
                           .Ret<ffi::AnyBuffer>()  // y            [rows, n, k + e]
                           .Attr<float>("rotation_scale")
                           .Attr<bool>("interleaved"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kExpandValues, ExpandValues,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x       [rows, n, k]
                           .Arg<ffi::AnyBuffer>()   // values  [n, d, k]
                           .Ret<ffi::AnyBuffer>(),  // y       [rows, n, d]
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<NamedHandler> AttentionHandlers() {
  return {
      {"nvfp4_attention_cuda", kAttention},
      {"nvfp4_attention_fp8_cuda", kAttentionFp8},
      {"nvfp4_latent_attention_cuda", kLatentAttention},
      {"nvfp4_prepare_heads_cuda", kPrepareHeads},
      {"nvfp4_prepare_heads_fp8_cuda", kPrepareHeadsFp8},
      {"nvfp4_prepare_latents_cuda", kPrepareLatents},
      {"nvfp4_absorb_queries_cuda", kAbsorbQueries},
      {"nvfp4_expand_values_cuda", kExpandValues},
  };
}

}  // namespace nvfp4
