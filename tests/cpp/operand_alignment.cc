// Prints, for each operand of a target, the message of the checks if it alone is misaligned.
//   operand_alignment ALIGNMENT PAST
// Adds PAST bytes to the address of one operand after the other, and prints "operand: message" for
// each. A line for aligned operands comes first. No kernel runs, and nothing reads the operands.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "expert_operands.h"
#include "operands.h"
#include "quantize_operands.h"

namespace {

using namespace nvfp4;

alignas(64) uint8_t memory[128];

// The element type and the dimensions of a buffer.
struct Buffer {
  ffi::DataType type;
  std::vector<int64_t> dims;
};

// Checks the buffers of `table` once with all of them aligned, then once with each misaligned.
void Print(const Table& table, const std::vector<Buffer>& given, size_t alignment, size_t past,
           const std::function<ffi::Error(Call&)>& check) {
  for (size_t wrong = 0; wrong <= given.size(); ++wrong) {
    std::vector<XLA_FFI_Buffer> buffers(given.size());
    std::vector<void*> addresses;
    for (size_t i = 0; i < given.size(); ++i) {
      buffers[i] = {};
      buffers[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffers[i].dtype = static_cast<XLA_FFI_DataType>(given[i].type);
      buffers[i].data = memory + (i + 1 == wrong ? past : 0);
      buffers[i].rank = static_cast<int64_t>(given[i].dims.size());
      buffers[i].dims = const_cast<int64_t*>(given[i].dims.data());
      addresses.push_back(&buffers[i]);
    }
    std::vector<XLA_FFI_ArgType> operand_types(table.operands, XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(table.results, XLA_FFI_RetType_BUFFER);
    XLA_FFI_Args args = {};
    args.size = static_cast<int64_t>(table.operands);
    args.types = operand_types.data();
    args.args = addresses.data();
    XLA_FFI_Rets rets = {};
    rets.size = static_cast<int64_t>(table.results);
    rets.types = result_types.data();
    rets.rets = addresses.data() + table.operands;
    Call call;
    ffi::Error error =
        call.Read(table, ffi::RemainingArgs(&args, 0), ffi::RemainingRets(&rets, 0), alignment);
    if (error.success()) error = check(call);
    std::printf("%s: %s\n", wrong == 0 ? "none" : std::string(table.rows[wrong - 1]->name).c_str(),
                error.success() ? "accepted" : error.message().c_str());
  }
}

constexpr Table kLayer(kMoEOperands), kProduct(kGroupedGemmOperands), kQuantizer(kQuantizeOperands);

}  // namespace

int main(int, char** arguments) {
  const auto alignment = static_cast<size_t>(std::atoi(arguments[1]));
  const auto past = static_cast<size_t>(std::atoi(arguments[2]));
  constexpr Tile kTile = {16, 16};
  std::puts("layer");
  Print(kLayer,
        {{ffi::BF16, {3, 32}},
         {ffi::U8, {2, 32, 16}},
         {ffi::F8E4M3FN, {2, 32, 2}},
         {ffi::F32, {2, 2}},
         {ffi::F32, {2}},
         {ffi::F32, {2, 32}},
         {ffi::U8, {2, 32, 8}},
         {ffi::F8E4M3FN, {2, 32, 1}},
         {ffi::F32, {2, 1}},
         {ffi::F32, {2}},
         {ffi::F32, {2, 32}},
         {ffi::S32, {3, 2}},
         {ffi::F32, {3, 2}},
         {ffi::BF16, {3, 32}},
         {ffi::U8, {64}}},
        alignment, past, [&](Call& call) {
          MoEShape shape;
          MoEOptions options;
          return ReadMoE(call, {"silu", 1, 0, 1, "static", false, 16}, kTile, &shape, &options);
        });
  std::puts("product");
  Print(kProduct,
        {{ffi::F32, {3, 32}},
         {ffi::U8, {2, 48, 16}},
         {ffi::F8E4M3FN, {2, 48, 2}},
         {ffi::F32, {2, 1}},
         {ffi::F32, {2}},
         {ffi::F32, {2, 40}},
         {ffi::S32, {2}},
         {ffi::F32, {3, 40}},
         {ffi::U8, {64}}},
        alignment, past, [&](Call& call) {
          GroupedGemmShape shape;
          DataType type;
          ActivationScale scale;
          return ReadGroupedGemm(call, "static", kTile, &shape, &type, &scale);
        });
  std::puts("quantizer");
  Print(kQuantizer,
        {{ffi::F16, {3, 32}},
         {ffi::F32, {}},
         {ffi::U8, {3, 16}},
         {ffi::F8E4M3FN, {3, 2}},
         {ffi::F32, {}},
         {ffi::U8, {64}}},
        alignment, past, [&](Call& call) {
          bool swizzled;
          return ReadQuantize(call, "linear", &swizzled);
        });
}
