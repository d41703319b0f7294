// The module _nvfp4_cpu: the CPU ops as XLA FFI targets. A handler decodes its operands and
// attributes, checks them, and runs the op. It computes nothing and decides nothing itself.
//
//   nvfp4_moe_w4a16_cpu, nvfp4_grouped_gemm_w4a16_cpu, nvfp4_quantize_cpu, nvfp4_dense_cpu
//   nvfp4_attention_amx, nvfp4_attention_avx512 (registered only where they can run)
//   nvfp4_read_rows_cpu, nvfp4_write_tokens_cpu
//
// nvfp4_call_chain_cpu runs several of these calls in order (call_chain.h). Those of the first line
// take an optional attribute `isa`: "auto" (the default), or a name that isa_levels() returns.
//
// XLA gives CPU handlers no allocator, so scratch memory is the last result, uint8 [bytes].
// ops/experts/cpu.py computes its size. If it is smaller than the whole call needs, the ops work in
// several rounds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cpu/ops.h"
#include "heads_checks.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace nvfp4 {
namespace {

// The layout "cpu_16x16". The kernels load vectors from any address, so that an operand needs no
// more than the alignment of its elements.
constexpr OperandRules kRules = {{cpu::kGroup, 16}, 1};

class XlaThreadPool : public cpu::ThreadPool {
 public:
  explicit XlaThreadPool(ffi::ThreadPool pool) : pool_(pool) {}
  int64_t NumThreads() override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool pool_;
};

template <typename T>
const T* Data(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
}

template <typename T>
ffi::Error Attribute(const ffi::Dictionary& attributes, std::string_view name, T* value) {
  auto found = attributes.get<T>(name);
  if (found.has_error()) return found.error();
  *value = found.value();
  return ffi::Error::Success();
}

ffi::Error ChooseIsa(const ffi::Dictionary& attributes, const cpu::Kernels** kernels) {
  std::string_view isa = "auto";
  if (attributes.contains("isa")) NVFP4_RETURN_IF_ERROR(Attribute(attributes, "isa", &isa));
  *kernels = cpu::ChooseKernels(isa);
  if (*kernels) return ffi::Error::Success();
  std::string names;
  for (std::string_view name : cpu::SupportedIsas()) names += ", " + std::string(name);
  return Expected("isa", "auto or one of this CPU's" + names.substr(1), std::string(isa));
}

ffi::Error MoEW4A16Cpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer gate_up_packed,
                       ffi::AnyBuffer gate_up_block_scale, ffi::AnyBuffer gate_up_global_scale,
                       ffi::AnyBuffer gate_up_input_scale, ffi::AnyBuffer gate_up_bias,
                       ffi::AnyBuffer down_packed, ffi::AnyBuffer down_block_scale,
                       ffi::AnyBuffer down_global_scale, ffi::AnyBuffer down_input_scale,
                       ffi::AnyBuffer down_bias, ffi::AnyBuffer expert_ids,
                       ffi::AnyBuffer expert_weights, ffi::Result<ffi::AnyBuffer> y,
                       ffi::ResultBufferR1<ffi::U8> workspace, ffi::Dictionary attributes) {
  const MoEOperands operands = {x,
                                gate_up_packed,
                                gate_up_block_scale,
                                gate_up_global_scale,
                                gate_up_input_scale,
                                gate_up_bias,
                                down_packed,
                                down_block_scale,
                                down_global_scale,
                                down_input_scale,
                                down_bias,
                                expert_ids,
                                expert_weights,
                                *y};
  std::string_view activation, activation_scale;
  float alpha = 0, beta = 0, limit = 0;
  bool weight_on_input = false;
  int64_t intermediate = 0;
  const cpu::Kernels* kernels;
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "activation", &activation));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "activation_scale", &activation_scale));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "alpha", &alpha));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "beta", &beta));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "limit", &limit));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "weight_on_input", &weight_on_input));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "intermediate", &intermediate));
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));

  MoEShape shape;
  MoEOptions options;
  NVFP4_RETURN_IF_ERROR(CheckMoE(operands, activation, alpha, beta, limit, activation_scale,
                                 intermediate, kRules, &shape, &options));
  const cpu::MoEArguments arguments = {x.untyped_data(),
                                       Data<uint8_t>(gate_up_packed),
                                       Data<uint8_t>(gate_up_block_scale),
                                       Data<float>(gate_up_global_scale),
                                       Data<float>(gate_up_input_scale),
                                       Data<float>(gate_up_bias),
                                       Data<uint8_t>(down_packed),
                                       Data<uint8_t>(down_block_scale),
                                       Data<float>(down_global_scale),
                                       Data<float>(down_input_scale),
                                       Data<float>(down_bias),
                                       Data<int32_t>(expert_ids),
                                       Data<float>(expert_weights),
                                       y->untyped_data(),
                                       workspace->typed_data(),
                                       static_cast<int64_t>(workspace->element_count()),
                                       options.type,
                                       options.activation,
                                       options.activation_scale,
                                       weight_on_input};
  XlaThreadPool threads(pool);
  if (cpu::RunMoEW4A16Cpu(shape, arguments, *kernels, threads)) return ffi::Error::Success();
  return ExpectAtLeast("workspace [bytes]", arguments.workspace_bytes,
                       cpu::MoEW4A16CpuWorkspace(shape, arguments, *kernels, 1));
}

ffi::Error GroupedGemmW4A16Cpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer packed,
                               ffi::AnyBuffer block_scale, ffi::AnyBuffer global_scale,
                               ffi::AnyBuffer input_scale, ffi::AnyBuffer bias,
                               ffi::AnyBuffer group_sizes, ffi::Result<ffi::AnyBuffer> y,
                               ffi::ResultBufferR1<ffi::U8> workspace, ffi::Dictionary attributes) {
  std::string_view scale_name;
  const cpu::Kernels* kernels;
  GroupedGemmShape shape;
  DataType type;
  ActivationScale scale = ActivationScale::kNone;
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "activation_scale", &scale_name));
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  const GroupedGemmOperands operands = {x,           packed, block_scale, global_scale,
                                        input_scale, bias,   group_sizes, *y};
  NVFP4_RETURN_IF_ERROR(CheckGroupedGemm(operands, scale_name, kRules, &shape, &type, &scale));
  const cpu::GroupedGemmArguments arguments = {x.untyped_data(),
                                               Data<uint8_t>(packed),
                                               Data<uint8_t>(block_scale),
                                               Data<float>(global_scale),
                                               Data<float>(input_scale),
                                               Data<float>(bias),
                                               Data<int32_t>(group_sizes),
                                               y->untyped_data(),
                                               workspace->typed_data(),
                                               static_cast<int64_t>(workspace->element_count()),
                                               type,
                                               scale};
  XlaThreadPool threads(pool);
  if (cpu::RunGroupedGemmW4A16Cpu(shape, arguments, *kernels, threads))
    return ffi::Error::Success();
  return ExpectAtLeast("workspace [bytes]", arguments.workspace_bytes,
                       cpu::GroupedGemmW4A16CpuWorkspace(shape, arguments, *kernels, 1));
}

ffi::Error QuantizeCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer global_scale,
                       ffi::Result<ffi::AnyBuffer> packed, ffi::Result<ffi::AnyBuffer> block_scale,
                       ffi::Result<ffi::AnyBuffer> used_scale, ffi::Result<ffi::BufferR1<ffi::U8>>,
                       ffi::Dictionary attributes) {
  const cpu::Kernels* kernels;
  std::string_view scale_layout;
  DataType type;
  bool swizzle;
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "scale_layout", &scale_layout));
  NVFP4_RETURN_IF_ERROR(CheckQuantize(x, global_scale, *packed, *block_scale, *used_scale,
                                      scale_layout, kRules.alignment, &type, &swizzle));
  const cpu::QuantizeArguments arguments = {x.untyped_data(),
                                            type,
                                            x.dimensions()[0],
                                            x.dimensions()[1],
                                            Data<float>(global_scale),
                                            swizzle,
                                            static_cast<uint8_t*>(packed->untyped_data()),
                                            static_cast<uint8_t*>(block_scale->untyped_data()),
                                            static_cast<float*>(used_scale->untyped_data())};
  XlaThreadPool threads(pool);
  cpu::RunQuantizeCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

ffi::Error DenseCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                    ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes) {
  const cpu::Kernels* kernels;
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  NVFP4_RETURN_IF_ERROR(ExpectType("x", x.element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectType("weight", weight.element_type(), ffi::BF16));
  NVFP4_RETURN_IF_ERROR(ExpectType("y", y->element_type(), ffi::F32));
  NVFP4_RETURN_IF_ERROR(ExpectRank("x [m, k]", x.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("weight [n, k]", weight.dimensions(), 2));
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = weight.dimensions()[0];
  NVFP4_RETURN_IF_ERROR(ExpectDims("weight [n, k]", weight.dimensions(), {n, k}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [m, n]", y->dimensions(), {m, n}));
  NVFP4_RETURN_IF_ERROR(ExpectAligned({{"x", x}, {"weight", weight}, {"y", *y}}, kRules.alignment));
  const cpu::DenseArguments arguments = {
      Data<float>(x), Data<uint16_t>(weight), static_cast<float*>(y->untyped_data()), m, n, k};
  XlaThreadPool threads(pool);
  cpu::RunDenseCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

#if defined(__x86_64__)

// `v` holds the values in its first columns. It is `k` again if values are a part of the keys.
template <const cpu::AttentionKernels& kKernels>
ffi::Error AttentionCpu(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                        ffi::AnyBuffer positions, ffi::AnyBuffer sinks,
                        ffi::Result<ffi::AnyBuffer> result, float scale, int32_t window,
                        int32_t chunk) {
  const ffi::AnyBuffer y = *result;
  for (const NamedOperand& operand :
       {NamedOperand{"q", q}, NamedOperand{"k", k}, NamedOperand{"v", v}, NamedOperand{"y", y}}) {
    NVFP4_RETURN_IF_ERROR(ExpectType(operand.name, operand.buffer.element_type(), ffi::BF16));
    NVFP4_RETURN_IF_ERROR(ExpectRank(operand.name, operand.buffer.dimensions(), 4));
  }
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("sinks", sinks.element_type(), ffi::F32));
  const int64_t b = q.dimensions()[0], t = q.dimensions()[1], n = q.dimensions()[2];
  const int64_t d = q.dimensions()[3], m = k.dimensions()[1], s = k.dimensions()[2];
  const int64_t v_width = v.dimensions()[3], dv = y.dimensions()[3];
  NVFP4_RETURN_IF_ERROR(ExpectDims("k [b, m, s, d]", k.dimensions(), {b, m, s, d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("v [b, m, s, dv]", v.dimensions(), {b, m, s, v_width}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("y [b, t, n, dv]", y.dimensions(), {b, t, n, dv}));
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("sinks [n]", sinks.dimensions(), {n}));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("v's width", v_width, dv));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("m (k)", m, 1));
  NVFP4_RETURN_IF_ERROR(ExpectMultipleOf("n (q)", n, m));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("window", window, 0));
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("chunk", chunk, 0));
  NVFP4_RETURN_IF_ERROR(ExpectAligned(
      {{"q", q}, {"k", k}, {"v", v}, {"positions", positions}, {"sinks", sinks}, {"y", y}},
      kRules.alignment));
  const cpu::AttentionArguments arguments = {Data<uint16_t>(q),
                                             Data<uint16_t>(k),
                                             Data<uint16_t>(v),
                                             Data<int32_t>(positions),
                                             Data<float>(sinks),
                                             static_cast<uint16_t*>(y.untyped_data()),
                                             b,
                                             t,
                                             n,
                                             m,
                                             s,
                                             d,
                                             dv,
                                             v_width,
                                             scale,
                                             window,
                                             chunk};
  XlaThreadPool threads(pool);
  cpu::RunAttentionCpu(arguments, kKernels, threads);
  return ffi::Error::Success();
}

#endif  // defined(__x86_64__)

// Puts `operand` where a kernel updates it in place. Under jax.vmap, a call has no aliases.
void PutInPlace(ffi::AnyBuffer operand, ffi::AnyBuffer result) {
  if (operand.untyped_data() == result.untyped_data() || operand.size_bytes() == 0) return;
  std::memcpy(result.untyped_data(), operand.untyped_data(), operand.size_bytes());
}

// Fills `arguments` for both forms of `prepare_heads`. `cache_type` is that of the qkv, or E4M3.
ffi::Error ReadHeads(const HeadsOperands& o, ffi::DataType cache_type,
                     const ffi::Dictionary& attributes, cpu::HeadsArguments* arguments,
                     const cpu::Kernels** kernels) {
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, kernels));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "eps", &arguments->eps));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "rotation_scale", &arguments->rotation_scale));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "rotates_first", &arguments->rotates_first));
  NVFP4_RETURN_IF_ERROR(Attribute(attributes, "gated", &arguments->gated));
  NVFP4_RETURN_IF_ERROR(CheckHeads(o, arguments->gated, cache_type, kRules.alignment,
                                   &arguments->shape, &arguments->type, &arguments->weight_type));
  PutInPlace(o.keys, o.new_keys);
  PutInPlace(o.values, o.new_values);
  arguments->qkv = o.qkv.untyped_data();
  arguments->positions = Data<int32_t>(o.positions);
  arguments->q_weight = Data<void>(o.q_weight);
  arguments->k_weight = Data<void>(o.k_weight);
  arguments->frequencies = Data<float>(o.frequencies);
  arguments->q = o.q.untyped_data();
  arguments->keys = o.new_keys.untyped_data();
  arguments->values = o.new_values.untyped_data();
  return ffi::Error::Success();
}

ffi::Error HeadsCpu(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer positions,
                    ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer q_weight,
                    ffi::AnyBuffer k_weight, ffi::AnyBuffer frequencies,
                    ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> new_keys,
                    ffi::Result<ffi::AnyBuffer> new_values, ffi::Dictionary attributes) {
  const cpu::Kernels* kernels;
  cpu::HeadsArguments arguments = {};
  NVFP4_RETURN_IF_ERROR(ReadHeads(
      {qkv, positions, keys, values, q_weight, k_weight, frequencies, *q, *new_keys, *new_values},
      qkv.element_type(), attributes, &arguments, &kernels));
  XlaThreadPool threads(pool);
  cpu::RunHeadsCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

ffi::Error HeadsFp8Cpu(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer positions,
                       ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer q_weight,
                       ffi::AnyBuffer k_weight, ffi::AnyBuffer frequencies, ffi::AnyBuffer k_scale,
                       ffi::AnyBuffer v_scale, ffi::Result<ffi::AnyBuffer> q,
                       ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_values,
                       ffi::Dictionary attributes) {
  const cpu::Kernels* kernels;
  cpu::HeadsArguments arguments = {};
  NVFP4_RETURN_IF_ERROR(ReadHeads(
      {qkv, positions, keys, values, q_weight, k_weight, frequencies, *q, *new_keys, *new_values},
      ffi::F8E4M3FN, attributes, &arguments, &kernels));
  NVFP4_RETURN_IF_ERROR(CheckHeadScales(k_scale, v_scale, arguments.shape.m, kRules.alignment));
  NVFP4_RETURN_IF_ERROR(
      Attribute(attributes, "multiply_by_reciprocal", &arguments.multiply_by_reciprocal));
  arguments.k_scale = Data<float>(k_scale);
  arguments.v_scale = Data<float>(v_scale);
  XlaThreadPool threads(pool);
  cpu::RunHeadsCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

// rows[i] = table[ids[i]]. Ids outside of the table read its first or last row.
ffi::Error ReadRowsCpu(ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::Result<ffi::AnyBuffer> rows) {
  NVFP4_RETURN_IF_ERROR(ExpectType("ids", ids.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("rows", rows->element_type(), table.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectRank("table [v, h]", table.dimensions(), 2));
  NVFP4_RETURN_IF_ERROR(ExpectRank("ids [n]", ids.dimensions(), 1));
  const int64_t v = table.dimensions()[0], h = table.dimensions()[1], n = ids.dimensions()[0];
  NVFP4_RETURN_IF_ERROR(ExpectDims("rows [n, h]", rows->dimensions(), {n, h}));
  if (rows->size_bytes() == 0) return ffi::Error::Success();
  NVFP4_RETURN_IF_ERROR(ExpectAtLeast("v (table)", v, 1));
  const size_t bytes = table.size_bytes() / static_cast<size_t>(v);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = std::clamp<int64_t>(Data<int32_t>(ids)[i], 0, v - 1);
    std::memcpy(static_cast<uint8_t*>(rows->untyped_data()) + i * bytes,
                Data<uint8_t>(table) + at * bytes, bytes);
  }
  return ffi::Error::Success();
}

// entries[row, :, positions[row, t]] = values[row, t], in place. Positions outside of the cache are
// not written.
ffi::Error WriteTokensCpu(ffi::AnyBuffer entries, ffi::AnyBuffer positions, ffi::AnyBuffer values,
                          ffi::Result<ffi::AnyBuffer> written) {
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("values", values.element_type(), entries.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("written", written->element_type(), entries.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectRank("entries [b, m, s, d]", entries.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("positions [b, t]", positions.dimensions(), 2));
  const int64_t b = entries.dimensions()[0], m = entries.dimensions()[1];
  const int64_t s = entries.dimensions()[2], d = entries.dimensions()[3];
  const int64_t t = positions.dimensions()[1];
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", positions.dimensions(), {b, t}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("values [b, t, m, d]", values.dimensions(), {b, t, m, d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("written [b, m, s, d]", written->dimensions(), {b, m, s, d}));
  if (values.size_bytes() == 0) return ffi::Error::Success();
  const size_t bytes = values.size_bytes() / static_cast<size_t>(b * t * m);
  auto* target = static_cast<uint8_t*>(written->untyped_data());
  const auto* source = Data<uint8_t>(values);
  for (int64_t token = 0; token < b * t; ++token) {
    const int64_t position = Data<int32_t>(positions)[token];
    if (position < 0 || position >= s) continue;
    for (int64_t head = 0; head < m; ++head) {
      const int64_t place = (token / t * m + head) * s + position;
      std::memcpy(target + place * bytes, source + (token * m + head) * bytes, bytes);
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kMoEW4A16Cpu, MoEW4A16Cpu,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()          // x                     [t, h] bf16, f16 or f32
        .Arg<ffi::AnyBuffer>()          // gate_up_packed        [e, n1, h/2] U8, cpu_16x16
        .Arg<ffi::AnyBuffer>()          // gate_up_block_scale   [e, n1, h/16] F8E4M3FN
        .Arg<ffi::AnyBuffer>()          // gate_up_global_scale  [e, 2] if gated, else [e, 1] F32
        .Arg<ffi::AnyBuffer>()          // gate_up_input_scale   [e] or [0] F32
        .Arg<ffi::AnyBuffer>()          // gate_up_bias          [e, n1] or [0, 0] F32
        .Arg<ffi::AnyBuffer>()          // down_packed           [e, h, i/2] U8, cpu_16x16
        .Arg<ffi::AnyBuffer>()          // down_block_scale      [e, h, i/16] F8E4M3FN
        .Arg<ffi::AnyBuffer>()          // down_global_scale     [e, 1] F32
        .Arg<ffi::AnyBuffer>()          // down_input_scale      [e] or [0] F32
        .Arg<ffi::AnyBuffer>()          // down_bias             [e, h] or [0, 0] F32
        .Arg<ffi::AnyBuffer>()          // expert_ids            [t, k] S32
        .Arg<ffi::AnyBuffer>()          // expert_weights        [t, k] F32
        .Ret<ffi::AnyBuffer>()          // y                     [t, h] in the type of x
        .Ret<ffi::BufferR1<ffi::U8>>()  // workspace             [bytes]
        // activation, alpha, beta, limit, activation_scale, weight_on_input, intermediate, isa
        .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kGroupedGemmW4A16Cpu, GroupedGemmW4A16Cpu,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()          // x             [m, k] bf16, f16 or f32
        .Arg<ffi::AnyBuffer>()          // packed        [e, n_pad, k/2] U8, cpu_16x16
        .Arg<ffi::AnyBuffer>()          // block_scale   [e, n_pad, k/16] F8E4M3FN
        .Arg<ffi::AnyBuffer>()          // global_scale  [e, parts] F32
        .Arg<ffi::AnyBuffer>()          // input_scale   [e] or [0] F32
        .Arg<ffi::AnyBuffer>()          // bias          [e, n] or [0, 0] F32
        .Arg<ffi::AnyBuffer>()          // group_sizes   [e], or [0] if e is 1; S32
        .Ret<ffi::AnyBuffer>()          // y             [m, n] in the type of x
        .Ret<ffi::BufferR1<ffi::U8>>()  // workspace     [bytes]
        .Attrs());                      // activation_scale, isa

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kQuantizeCpu, QuantizeCpu,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()          // x             [m, k] bf16, f16 or f32
        .Arg<ffi::AnyBuffer>()          // global_scale  [] F32; [0] computes it from x
        .Ret<ffi::AnyBuffer>()          // packed        [m, k/2] U8
        .Ret<ffi::AnyBuffer>()          // block_scale   F8E4M3FN, linear or swizzled
        .Ret<ffi::AnyBuffer>()          // used_scale    [] F32
        .Ret<ffi::BufferR1<ffi::U8>>()  // workspace     [0]
        .Attrs());                      // scale_layout, isa

XLA_FFI_DEFINE_HANDLER_SYMBOL(kDenseCpu, DenseCpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x       [m, k] F32
                                  .Arg<ffi::AnyBuffer>()  // weight  [n, k] BF16
                                  .Ret<ffi::AnyBuffer>()  // y       [m, n] F32
                                  .Attrs());              // isa

#if defined(__x86_64__)

auto AttentionBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // q          [b, t, n, d] BF16
      .Arg<ffi::AnyBuffer>()  // k          [b, m, s, d] BF16
      .Arg<ffi::AnyBuffer>()  // v          [b, m, s, dv or more] BF16
      .Arg<ffi::AnyBuffer>()  // positions  [b, t] S32
      .Arg<ffi::AnyBuffer>()  // sinks      [n] or [0] F32
      .Ret<ffi::AnyBuffer>()  // y          [b, t, n, dv] BF16
      .Attr<float>("scale")
      .Attr<int32_t>("window")  // 0 for none
      .Attr<int32_t>("chunk");  // 0 for none
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kAttentionAmx, AttentionCpu<cpu::kAttentionAmx>, AttentionBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kAttentionAvx512, AttentionCpu<cpu::kAttentionAvx512>,
                              AttentionBinding());

#endif  // defined(__x86_64__)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kHeadsCpu, HeadsCpu,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()  // qkv          [b, t, (n + 2m) d] BF16 or F16
        .Arg<ffi::AnyBuffer>()  // positions    [b, t] S32
        .Arg<ffi::AnyBuffer>()  // keys         [b, m, s, d]
        .Arg<ffi::AnyBuffer>()  // values       [b, m, s, d]
        .Arg<ffi::AnyBuffer>()  // q_weight     [d] or [0]
        .Arg<ffi::AnyBuffer>()  // k_weight     [d] or [0]
        .Arg<ffi::AnyBuffer>()  // frequencies  [r/2] F32
        .Ret<ffi::AnyBuffer>()  // q            [b, t, n, d]
        .Ret<ffi::AnyBuffer>()  // new_keys     keys, in place
        .Ret<ffi::AnyBuffer>()  // new_values   values, in place
        .Attrs());              // eps, rotation_scale, rotates_first, gated, isa

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kHeadsFp8Cpu, HeadsFp8Cpu,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()  // qkv          [b, t, (n + 2m) d] BF16 or F16
        .Arg<ffi::AnyBuffer>()  // positions    [b, t] S32
        .Arg<ffi::AnyBuffer>()  // keys         [b, m, s, d] F8E4M3FN
        .Arg<ffi::AnyBuffer>()  // values       [b, m, s, d] F8E4M3FN
        .Arg<ffi::AnyBuffer>()  // q_weight     [d] or [0]
        .Arg<ffi::AnyBuffer>()  // k_weight     [d] or [0]
        .Arg<ffi::AnyBuffer>()  // frequencies  [r/2] F32
        .Arg<ffi::AnyBuffer>()  // k_scale      [m] F32
        .Arg<ffi::AnyBuffer>()  // v_scale      [m] F32
        .Ret<ffi::AnyBuffer>()  // q            [b, t, n, d]
        .Ret<ffi::AnyBuffer>()  // new_keys     keys, in place
        .Ret<ffi::AnyBuffer>()  // new_values   values, in place
        .Attrs());              // those of kHeadsCpu, multiply_by_reciprocal

XLA_FFI_DEFINE_HANDLER_SYMBOL(kReadRowsCpu, ReadRowsCpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()    // table  [v, h] of any type
                                  .Arg<ffi::AnyBuffer>()    // ids    [n] S32
                                  .Ret<ffi::AnyBuffer>());  // rows   [n, h]

XLA_FFI_DEFINE_HANDLER_SYMBOL(kWriteTokensCpu, WriteTokensCpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()    // entries    [b, m, s, d] of any type
                                  .Arg<ffi::AnyBuffer>()    // positions  [b, t] S32
                                  .Arg<ffi::AnyBuffer>()    // values     [b, t, m, d]
                                  .Ret<ffi::AnyBuffer>());  // written    entries, in place

const std::vector<NamedHandler>& Handlers() {
  static const std::vector<NamedHandler> handlers = [] {
    std::vector<NamedHandler> found = {
        {"nvfp4_moe_w4a16_cpu", kMoEW4A16Cpu},
        {"nvfp4_grouped_gemm_w4a16_cpu", kGroupedGemmW4A16Cpu},
        {"nvfp4_quantize_cpu", kQuantizeCpu},
        {"nvfp4_dense_cpu", kDenseCpu},
        {"nvfp4_prepare_heads_cpu", kHeadsCpu},
        {"nvfp4_prepare_heads_fp8_cpu", kHeadsFp8Cpu},
        {"nvfp4_read_rows_cpu", kReadRowsCpu},
        {"nvfp4_write_tokens_cpu", kWriteTokensCpu},
    };
#if defined(__x86_64__)
    if (cpu::kAttentionAmx.supported()) found.push_back({"nvfp4_attention_amx", kAttentionAmx});
    if (cpu::kAttentionAvx512.supported())
      found.push_back({"nvfp4_attention_avx512", kAttentionAvx512});
#endif
    return found;
  }();
  return handlers;
}

XLA_FFI_Error* RunChain(XLA_FFI_CallFrame* frame) { return RunCallChain(frame, Handlers()); }

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace
}  // namespace nvfp4

NB_MODULE(_nvfp4_cpu, m) {
  m.doc() = "NVFP4 kernels for the CPU as XLA FFI targets.";
  m.def(
      "registrations",
      [] {
        nb::dict targets;
        for (const nvfp4::NamedHandler& target : nvfp4::Handlers()) {
          targets[std::string(target.name).c_str()] = nvfp4::Capsule(target.handler);
        }
        targets["nvfp4_call_chain_cpu"] = nvfp4::Capsule(nvfp4::RunChain);
        return targets;
      },
      "Return {FFI target name: capsule}.");
  m.def(
      "ffi_api_version", [] { return std::make_pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "Return the (major, minor) of the XLA FFI headers that this module was built with.");
  m.def(
      "why_cuda", [] { return NVFP4_CUDA_WHY; },
      "Return why this build has CUDA kernels for the architectures that it has, or none.");
  m.def(
      "isa_levels",
      [] {
        nb::list names;
        for (std::string_view name : nvfp4::cpu::SupportedIsas())
          names.append(nb::str(name.data(), name.size()));
        return names;
      },
      "Return the names that the attribute `isa` may have on this CPU, best first.");
}
