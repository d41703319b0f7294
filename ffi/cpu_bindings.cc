// The module _nvfp4_cpu: the CPU ops as XLA FFI targets. A handler decodes its operands and
// attributes, checks them, and runs the op. It computes nothing and decides nothing itself.
//
//   nvfp4_moe_w4a16_cpu, nvfp4_grouped_gemm_w4a16_cpu, nvfp4_quantize_cpu, nvfp4_dense_cpu
//   nvfp4_transposed_gemm_cpu, nvfp4_prepare_heads_cpu, nvfp4_prepare_heads_fp8_cpu
//   nvfp4_attention_amx, nvfp4_attention_avx512 (registered only where they can run)
//   nvfp4_read_rows_cpu, nvfp4_write_tokens_cpu
//
// nvfp4_call_chain_cpu runs several of these calls in order (call_chain.h). Those of the first two
// lines take an optional attribute `isa`: "auto" (the default), or a name that isa_levels()
// returns.
//
// XLA gives CPU handlers no allocator, so scratch memory is the last result, uint8 [bytes].
// cpu/workspace_rounds.h has its size. If it is smaller than the whole call needs, the ops work in
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
#include "expert_operands.h"
#include "heads_operands.h"
#include "launch_facts.h"
#include "operands.h"
#include "quantize_operands.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace nvfp4 {
namespace {

constexpr Tile kTile = {cpu::kGroup, 16};  // in the layout "cpu_16x16"

// The kernels load vectors from any address, so that an operand needs no more than the alignment of
// its elements.
constexpr size_t kAlignment = 1;

class XlaThreadPool : public cpu::ThreadPool {
 public:
  explicit XlaThreadPool(ffi::ThreadPool pool) : pool_(pool) {}
  int64_t NumThreads() override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool pool_;
};

ffi::Error ReadAttributes(const ffi::Dictionary&) { return ffi::Error::Success(); }

// Reads attributes, given as names and where their values go.
template <typename T, typename... Others>
ffi::Error ReadAttributes(const ffi::Dictionary& attributes, std::string_view name, T* value,
                          Others... others) {
  auto found = attributes.get<T>(name);
  if (found.has_error()) return found.error();
  *value = found.value();
  return ReadAttributes(attributes, others...);
}

ffi::Error ChooseIsa(const ffi::Dictionary& attributes, const cpu::Kernels** kernels) {
  std::string_view isa = "auto";
  if (attributes.contains("isa")) NVFP4_RETURN_IF_ERROR(ReadAttributes(attributes, "isa", &isa));
  *kernels = cpu::ChooseKernels(isa);
  if (*kernels) return ffi::Error::Success();
  std::string names;
  for (std::string_view name : cpu::SupportedIsas()) names += ", " + std::string(name);
  return Expected("isa", "auto or one of this CPU's" + names.substr(1), std::string(isa));
}

// The body of a handler: reads the operands of `table`, and runs `run` on them.
template <typename Run>
ffi::Error Handle(const Table& table, const Run& run, ffi::ThreadPool pool,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  const ffi::Dictionary& attributes) {
  Call operands;
  NVFP4_RETURN_IF_ERROR(operands.Read(table, args, rets, kAlignment));
  XlaThreadPool threads(pool);
  const ffi::Error error = run(threads, operands, attributes);
  if (error.failure() || operands.is_checked()) return error;
  return ffi::Error::Internal("a handler does not check its operands");
}

// The target `name`, whose operands are those of `table`. `run` gets the threads, the operands and
// the attributes.
#define NVFP4_CPU_TARGET(name, table, run)                                                   \
  NamedHandler {                                                                             \
    name, +[](XLA_FFI_CallFrame* frame) {                                                    \
      static constexpr Table kTable(table);                                                  \
      static auto* const handler =                                                           \
          ffi::Ffi::Bind()                                                                   \
              .Ctx<ffi::ThreadPool>()                                                        \
              .RemainingArgs()                                                               \
              .RemainingRets()                                                               \
              .Attrs()                                                                       \
              .To([](ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, \
                     ffi::Dictionary attributes) {                                           \
                return Handle(kTable, run, pool, args, rets, attributes);                    \
              })                                                                             \
              .release();                                                                    \
      return handler->Call(frame);                                                           \
    }                                                                                        \
  }

ffi::Error MoEW4A16Cpu(XlaThreadPool& threads, Call& operands, const ffi::Dictionary& attributes) {
  MoEAttributes own;
  MoEShape shape;
  MoEOptions options;
  const cpu::Kernels* kernels;
  NVFP4_RETURN_IF_ERROR(ReadAttributes(attributes, "activation", &own.activation, "alpha",
                                       &own.alpha, "beta", &own.beta, "limit", &own.limit,
                                       "activation_scale", &own.activation_scale, "weight_on_input",
                                       &own.weight_on_input, "intermediate", &own.intermediate));
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  NVFP4_RETURN_IF_ERROR(ReadMoE(operands, own, kTile, &shape, &options));
  const cpu::MoEArguments arguments = {operands.in<void>("x"),
                                       operands.in_or_null<uint8_t>("gate_up_packed"),
                                       operands.in_or_null<uint8_t>("gate_up_block_scale"),
                                       operands.in_or_null("gate_up_global_scale"),
                                       operands.in_or_null("gate_up_input_scale"),
                                       operands.in_or_null("gate_up_bias"),
                                       operands.in_or_null<uint8_t>("down_packed"),
                                       operands.in_or_null<uint8_t>("down_block_scale"),
                                       operands.in_or_null("down_global_scale"),
                                       operands.in_or_null("down_input_scale"),
                                       operands.in_or_null("down_bias"),
                                       operands.in_or_null<int32_t>("expert_ids"),
                                       operands.in_or_null("expert_weights"),
                                       operands.out("y"),
                                       operands.out<uint8_t>("workspace"),
                                       operands.size("bytes"),
                                       options.type,
                                       options.activation,
                                       options.activation_scale,
                                       own.weight_on_input};
  if (cpu::RunMoEW4A16Cpu(shape, arguments, *kernels, threads)) return ffi::Error::Success();
  return Expect({AtLeast("workspace [bytes]", arguments.workspace_bytes,
                         cpu::MoEW4A16CpuWorkspace(shape, arguments, *kernels, 1))});
}

ffi::Error GroupedGemmW4A16Cpu(XlaThreadPool& threads, Call& operands,
                               const ffi::Dictionary& attributes) {
  std::string_view scale_name;
  const cpu::Kernels* kernels;
  GroupedGemmShape shape;
  DataType type;
  ActivationScale scale;
  NVFP4_RETURN_IF_ERROR(ReadAttributes(attributes, "activation_scale", &scale_name));
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  NVFP4_RETURN_IF_ERROR(ReadGroupedGemm(operands, scale_name, kTile, &shape, &type, &scale));
  const cpu::GroupedGemmArguments arguments = {operands.in<void>("x"),
                                               operands.in_or_null<uint8_t>("packed"),
                                               operands.in_or_null<uint8_t>("block_scale"),
                                               operands.in_or_null("global_scale"),
                                               operands.in_or_null("input_scale"),
                                               operands.in_or_null("bias"),
                                               operands.in_or_null<int32_t>("group_sizes"),
                                               operands.out("y"),
                                               operands.out<uint8_t>("workspace"),
                                               operands.size("bytes"),
                                               type,
                                               scale};
  if (cpu::RunGroupedGemmW4A16Cpu(shape, arguments, *kernels, threads)) {
    return ffi::Error::Success();
  }
  return Expect({AtLeast("workspace [bytes]", arguments.workspace_bytes,
                         cpu::GroupedGemmW4A16CpuWorkspace(shape, arguments, *kernels, 1))});
}

constexpr Operand kTransposedGemmCpuOperands[] = {
    {"x", kActivation, "[m, n]"},
    {"packed", kU8, "[e, n, k/2]", kInTiles},
    {"block_scale", kE4M3, "[e, n, k/16]", kInTiles},
    {"global_scale", kF32, "[e, 1]"},
    {"group_sizes", kS32, "[e] or [0]"},  // may be left out if e is 1
    {"y", Like("x"), "[m, k]", kResult},
    {"workspace", kU8, "[bytes]", kResult},
};

ffi::Error TransposedGemmCpu(XlaThreadPool& threads, Call& operands,
                             const ffi::Dictionary& attributes) {
  const cpu::Kernels* kernels;
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  const int64_t n = operands.size("n"), k = operands.size("k"), e = operands.size("e");
  operands.SetTile(kTile);
  NVFP4_RETURN_IF_ERROR(operands.Check({MultipleOf("k (y)", k, 16)}));
  if (e != 1) NVFP4_RETURN_IF_ERROR(operands.ExpectGiven("group_sizes"));
  const cpu::TransposedGemmArguments arguments = {operands.in<void>("x"),
                                                  operands.in_or_null<uint8_t>("packed"),
                                                  operands.in_or_null<uint8_t>("block_scale"),
                                                  operands.in_or_null("global_scale"),
                                                  operands.in_or_null<int32_t>("group_sizes"),
                                                  operands.out("y"),
                                                  operands.out<uint8_t>("workspace"),
                                                  operands.size("bytes"),
                                                  operands.type("x"),
                                                  operands.size("m"),
                                                  e,
                                                  n,
                                                  k};
  if (cpu::RunTransposedGemmCpu(arguments, *kernels, threads)) return ffi::Error::Success();
  return Expect({AtLeast("workspace [bytes]", arguments.workspace_bytes,
                         cpu::TransposedGemmCpuWorkspace(arguments, *kernels, 1))});
}

ffi::Error QuantizeCpu(XlaThreadPool& threads, Call& operands, const ffi::Dictionary& attributes) {
  const cpu::Kernels* kernels;
  std::string_view scale_layout;
  bool swizzle;
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  NVFP4_RETURN_IF_ERROR(ReadAttributes(attributes, "scale_layout", &scale_layout));
  NVFP4_RETURN_IF_ERROR(ReadQuantize(operands, scale_layout, &swizzle));
  const cpu::QuantizeArguments arguments = {operands.in<void>("x"),
                                            operands.type("x"),
                                            operands.size("m"),
                                            operands.size("k"),
                                            operands.in_or_null("global_scale"),
                                            swizzle,
                                            operands.out<uint8_t>("packed"),
                                            operands.out<uint8_t>("block_scale"),
                                            operands.out<float>("used_scale")};
  cpu::RunQuantizeCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

constexpr Operand kDenseOperands[] = {
    {"x", kF32, "[m, k]"},
    {"weight", kBF16, "[n, k]"},
    {"y", kF32, "[m, n]", kResult},
};

ffi::Error DenseCpu(XlaThreadPool& threads, const Call& operands,
                    const ffi::Dictionary& attributes) {
  const cpu::Kernels* kernels;
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, &kernels));
  NVFP4_RETURN_IF_ERROR(operands.Check());
  const cpu::DenseArguments arguments = {
      operands.in_or_null("x"), operands.in_or_null<uint16_t>("weight"),
      operands.out<float>("y"), operands.size("m"),
      operands.size("n"),       operands.size("k")};
  cpu::RunDenseCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

#if defined(__x86_64__)

constexpr Operand kAttentionOperands[] = {
    {"q", kBF16, "[b, t, n, d]"},
    {"k", kBF16, "[b, m, s, d]"},
    // The values are in the first columns. It is `k` again if values are a part of the keys.
    {"v", kBF16, "[b, m, s, width]"},
    {"positions", kS32, "[b, t]"},
    {"sinks", kF32, "[n] or [0]"},
    {"y", kBF16, "[b, t, n, dv]", kResult},
};

template <const cpu::AttentionKernels& kKernels>
ffi::Error AttentionCpu(XlaThreadPool& threads, const Call& operands,
                        const ffi::Dictionary& attributes) {
  float scale;
  int32_t window, chunk;  // 0 for none
  NVFP4_RETURN_IF_ERROR(
      ReadAttributes(attributes, "scale", &scale, "window", &window, "chunk", &chunk));
  const int64_t n = operands.size("n"), m = operands.size("m");
  const int64_t width = operands.size("width"), dv = operands.size("dv");
  NVFP4_RETURN_IF_ERROR(operands.Check({AtLeast("v's width", width, dv), AtLeast("m (k)", m, 1),
                                        MultipleOf("n (q)", n, m), AtLeast("window", window, 0),
                                        AtLeast("chunk", chunk, 0)}));
  const cpu::AttentionArguments arguments = {operands.in_or_null<uint16_t>("q"),
                                             operands.in_or_null<uint16_t>("k"),
                                             operands.in_or_null<uint16_t>("v"),
                                             operands.in_or_null<int32_t>("positions"),
                                             operands.in_or_null("sinks"),
                                             operands.out<uint16_t>("y"),
                                             operands.size("b"),
                                             operands.size("t"),
                                             n,
                                             m,
                                             operands.size("s"),
                                             operands.size("d"),
                                             dv,
                                             width,
                                             scale,
                                             window,
                                             chunk};
  cpu::RunAttentionCpu(arguments, kKernels, threads);
  return ffi::Error::Success();
}

#endif  // defined(__x86_64__)

// Puts an operand where a kernel updates it in place. Under jax.vmap, a call has no aliases.
void PutInPlace(const Call& operands, std::string_view operand, std::string_view result) {
  const void* source = operands.in<void>(operand);
  if (source == operands.out(result) || !operands.has(operand)) return;
  std::memcpy(operands.out(result), source, operands[operand].size_bytes());
}

// Fills `arguments` for both forms of `prepare_heads`.
ffi::Error ReadHeads(const Call& operands, const ffi::Dictionary& attributes,
                     cpu::HeadsArguments* arguments, const cpu::Kernels** kernels) {
  NVFP4_RETURN_IF_ERROR(ChooseIsa(attributes, kernels));
  NVFP4_RETURN_IF_ERROR(ReadAttributes(attributes, "eps", &arguments->eps, "rotation_scale",
                                       &arguments->rotation_scale, "rotates_first",
                                       &arguments->rotates_first, "gated", &arguments->gated));
  NVFP4_RETURN_IF_ERROR(
      ReadHeadsShape(operands, arguments->gated, /*factor=*/1, &arguments->shape));
  PutInPlace(operands, "keys", "new_keys");
  PutInPlace(operands, "values", "new_values");
  arguments->type = operands.type("qkv");
  arguments->weight_type = operands.type("q_weight");
  arguments->qkv = operands.in<void>("qkv");
  arguments->positions = operands.in_or_null<int32_t>("positions");
  arguments->q_weight = operands.in_or_null<void>("q_weight");
  arguments->k_weight = operands.in_or_null<void>("k_weight");
  arguments->frequencies = operands.in_or_null("frequencies");
  arguments->q = operands.out("q");
  arguments->keys = operands.out("new_keys");
  arguments->values = operands.out("new_values");
  return ffi::Error::Success();
}

ffi::Error HeadsCpu(XlaThreadPool& threads, const Call& operands,
                    const ffi::Dictionary& attributes) {
  const cpu::Kernels* kernels;
  cpu::HeadsArguments arguments = {};
  NVFP4_RETURN_IF_ERROR(ReadHeads(operands, attributes, &arguments, &kernels));
  cpu::RunHeadsCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

ffi::Error HeadsFp8Cpu(XlaThreadPool& threads, const Call& operands,
                       const ffi::Dictionary& attributes) {
  const cpu::Kernels* kernels;
  cpu::HeadsArguments arguments = {};
  NVFP4_RETURN_IF_ERROR(ReadHeads(operands, attributes, &arguments, &kernels));
  NVFP4_RETURN_IF_ERROR(
      ReadAttributes(attributes, "multiply_by_reciprocal", &arguments.multiply_by_reciprocal));
  arguments.k_scale = operands.in_or_null("k_scale");
  arguments.v_scale = operands.in_or_null("v_scale");
  cpu::RunHeadsCpu(arguments, *kernels, threads);
  return ffi::Error::Success();
}

constexpr Operand kReadRowsOperands[] = {
    {"table", kAnyType, "[v, h]"},
    {"ids", kS32, "[n]"},
    {"rows", Like("table"), "[n, h]", kResult},
};

// rows[i] = table[ids[i]]. Ids outside of the table read its first or last row.
ffi::Error ReadRowsCpu(XlaThreadPool&, const Call& operands, const ffi::Dictionary&) {
  NVFP4_RETURN_IF_ERROR(operands.Check());
  if (!operands.has("rows")) return ffi::Error::Success();
  const int64_t v = operands.size("v");
  NVFP4_RETURN_IF_ERROR(Expect({AtLeast("v (table)", v, 1)}));
  const size_t bytes = operands["table"].size_bytes() / static_cast<size_t>(v);
  for (int64_t i = 0; i < operands.size("n"); ++i) {
    const int64_t at = std::clamp<int64_t>(operands.in<int32_t>("ids")[i], 0, v - 1);
    std::memcpy(operands.out<uint8_t>("rows") + i * bytes,
                operands.in<uint8_t>("table") + at * bytes, bytes);
  }
  return ffi::Error::Success();
}

constexpr Operand kWriteTokensOperands[] = {
    {"entries", kAnyType, "[b, m, s, d]"},
    {"positions", kS32, "[b, t]"},
    {"values", Like("entries"), "[b, t, m, d]"},
    {"written", Like("entries"), "[b, m, s, d]", kResult},  // entries, in place
};

// entries[row, :, positions[row, t]] = values[row, t], in place. Positions outside of the cache are
// not written.
ffi::Error WriteTokensCpu(XlaThreadPool&, const Call& operands, const ffi::Dictionary&) {
  NVFP4_RETURN_IF_ERROR(operands.Check());
  if (!operands.has("values")) return ffi::Error::Success();
  const int64_t b = operands.size("b"), m = operands.size("m"), s = operands.size("s");
  const int64_t t = operands.size("t");
  const size_t bytes = operands["values"].size_bytes() / static_cast<size_t>(b * t * m);
  auto* target = operands.out<uint8_t>("written");
  const auto* source = operands.in<uint8_t>("values");
  const auto* positions = operands.in<int32_t>("positions");
  for (int64_t token = 0; token < b * t; ++token) {
    const int64_t position = positions[token];
    if (position < 0 || position >= s) continue;
    for (int64_t head = 0; head < m; ++head) {
      const int64_t place = (token / t * m + head) * s + position;
      std::memcpy(target + place * bytes, source + (token * m + head) * bytes, bytes);
    }
  }
  return ffi::Error::Success();
}

#if defined(__x86_64__)
#endif  // defined(__x86_64__)

const std::vector<NamedHandler>& Handlers() {
  static const std::vector<NamedHandler> handlers = [] {
    std::vector<NamedHandler> found = {
        NVFP4_CPU_TARGET("nvfp4_moe_w4a16_cpu", kMoEOperands, MoEW4A16Cpu),
        NVFP4_CPU_TARGET("nvfp4_grouped_gemm_w4a16_cpu", kGroupedGemmOperands, GroupedGemmW4A16Cpu),
        NVFP4_CPU_TARGET("nvfp4_transposed_gemm_cpu", kTransposedGemmCpuOperands,
                         TransposedGemmCpu),
        NVFP4_CPU_TARGET("nvfp4_quantize_cpu", kQuantizeOperands, QuantizeCpu),
        NVFP4_CPU_TARGET("nvfp4_dense_cpu", kDenseOperands, DenseCpu),
        NVFP4_CPU_TARGET("nvfp4_prepare_heads_cpu", kHeadsOperands, HeadsCpu),
        NVFP4_CPU_TARGET("nvfp4_prepare_heads_fp8_cpu", kHeadsFp8Operands, HeadsFp8Cpu),
        NVFP4_CPU_TARGET("nvfp4_read_rows_cpu", kReadRowsOperands, ReadRowsCpu),
        NVFP4_CPU_TARGET("nvfp4_write_tokens_cpu", kWriteTokensOperands, WriteTokensCpu),
    };
#if defined(__x86_64__)
    if (cpu::kAttentionAmx.supported()) {
      found.push_back(NVFP4_CPU_TARGET("nvfp4_attention_amx", kAttentionOperands,
                                       AttentionCpu<cpu::kAttentionAmx>));
    }
    if (cpu::kAttentionAvx512.supported()) {
      found.push_back(NVFP4_CPU_TARGET("nvfp4_attention_avx512", kAttentionOperands,
                                       AttentionCpu<cpu::kAttentionAvx512>));
    }
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
  nvfp4::DefineLaunchFacts(m.def_submodule("launch_facts"));
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
