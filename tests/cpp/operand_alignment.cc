// Prints, for each operand that a handler checks, the message of the checks if it alone is
// misaligned.
//   operand_alignment ALIGNMENT PAST
// Adds PAST bytes to the address of one operand after the other, and prints "operand: message" for
// each. A line for aligned operands comes first. No kernel runs, and nothing reads the operands.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "checks.h"

namespace {

using namespace nvfp4;

alignas(64) uint8_t memory[128];

struct Operand {
  const char* name;
  ffi::DataType type;
  std::vector<int64_t> dims;
};

// Calls `check` once with every operand aligned, then once with each operand misaligned.
void Print(const std::vector<Operand>& operands, size_t past,
           const std::function<ffi::Error(const std::vector<ffi::AnyBuffer>&)>& check) {
  for (size_t wrong = 0; wrong <= operands.size(); ++wrong) {
    std::vector<XLA_FFI_Buffer> raw(operands.size());
    std::vector<ffi::AnyBuffer> buffers;
    for (size_t i = 0; i < operands.size(); ++i) {
      const Operand& operand = operands[i];
      raw[i] = {};
      raw[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      raw[i].dtype = static_cast<XLA_FFI_DataType>(operand.type);
      raw[i].data = memory + (i + 1 == wrong ? past : 0);
      raw[i].rank = static_cast<int64_t>(operand.dims.size());
      raw[i].dims = const_cast<int64_t*>(operand.dims.data());
      buffers.emplace_back(&raw[i]);
    }
    const ffi::Error error = check(buffers);
    std::printf("%s: %s\n", wrong == 0 ? "none" : operands[wrong - 1].name,
                error.success() ? "accepted" : error.message().c_str());
  }
}

}  // namespace

int main(int, char** arguments) {
  const auto alignment = static_cast<size_t>(std::atoi(arguments[1]));
  const auto past = static_cast<size_t>(std::atoi(arguments[2]));
  const OperandRules rules = {{16, 16}, alignment};
  std::puts("layer");
  Print({{"x", ffi::BF16, {3, 32}},
         {"gate_up_packed", ffi::U8, {2, 32, 16}},
         {"gate_up_block_scale", ffi::F8E4M3FN, {2, 32, 2}},
         {"gate_up_global_scale", ffi::F32, {2, 2}},
         {"gate_up_input_scale", ffi::F32, {2}},
         {"gate_up_bias", ffi::F32, {2, 32}},
         {"down_packed", ffi::U8, {2, 32, 8}},
         {"down_block_scale", ffi::F8E4M3FN, {2, 32, 1}},
         {"down_global_scale", ffi::F32, {2, 1}},
         {"down_input_scale", ffi::F32, {2}},
         {"down_bias", ffi::F32, {2, 32}},
         {"expert_ids", ffi::S32, {3, 2}},
         {"expert_weights", ffi::F32, {3, 2}},
         {"y", ffi::BF16, {3, 32}}},
        past, [&](const std::vector<ffi::AnyBuffer>& b) {
          MoEShape shape;
          MoEOptions options;
          return CheckMoE({b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11],
                           b[12], b[13]},
                          "silu", 1, 0, 1, "static", 16, rules, &shape, &options);
        });
  std::puts("product");
  Print({{"x", ffi::F32, {3, 32}},
         {"packed", ffi::U8, {2, 48, 16}},
         {"block_scale", ffi::F8E4M3FN, {2, 48, 2}},
         {"global_scale", ffi::F32, {2, 1}},
         {"input_scale", ffi::F32, {2}},
         {"bias", ffi::F32, {2, 40}},
         {"group_sizes", ffi::S32, {2}},
         {"y", ffi::F32, {3, 40}}},
        past, [&](const std::vector<ffi::AnyBuffer>& b) {
          GroupedGemmShape shape;
          DataType type;
          ActivationScale scale;
          return CheckGroupedGemm({b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]}, "static", rules,
                                  &shape, &type, &scale);
        });
  std::puts("quantizer");
  Print({{"x", ffi::F16, {3, 32}},
         {"global_scale", ffi::F32, {}},
         {"packed", ffi::U8, {3, 16}},
         {"block_scale", ffi::F8E4M3FN, {3, 2}},
         {"used_scale", ffi::F32, {}}},
        past, [&](const std::vector<ffi::AnyBuffer>& b) {
          DataType type;
          bool swizzled;
          return CheckQuantize(b[0], b[1], b[2], b[3], b[4], "linear", alignment, &type, &swizzled);
        });
}
