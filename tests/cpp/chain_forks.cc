// Prints what CallChain (call_chain.h) does for calls with flags.
//   chain_forks PLATFORM FLAGS...
// PLATFORM is "forks", or "plain" for a platform that runs calls in order. FLAGS are those of
// one call after the other; "!" behind them makes the call fail, and "?" makes it ignore the work
// that the call before has left to it. With "%" the call runs, and leaves the rest of its work.
// Prints one word for each hook, what was left to each call, its stream, and the error at the end.
// "(first)" follows what was left to a call if no kernel of the chain precedes it.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "call_chain.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

using namespace nvfp4;

const XLA_FFI_Api* side_api = nullptr;

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* Ignore(XLA_FFI_CallFrame*) { return nullptr; }

XLA_FFI_Error* Succeed(XLA_FFI_CallFrame* frame) {
  if (running_chain.fuses) {
    running_chain.work = std::string("both");
    return nullptr;
  }
  const bool follows = running_chain.Follows();
  if (const auto work = running_chain.TakeWork<std::string>()) {
    std::printf("%s%s ", work->c_str(), follows ? "" : "(first)");
  }
  if (running_chain.TakeWork<std::string>()) std::printf("twice ");
  std::printf("%s ", frame->api == side_api ? "side" : "main");
  return nullptr;
}

XLA_FFI_Error* RunInPart(XLA_FFI_CallFrame*) {
  std::printf("part ");
  running_chain.LeaveRest(std::string("rest"));
  return nullptr;
}

XLA_FFI_Error* Fail(XLA_FFI_CallFrame*) { return new XLA_FFI_Error{"failed"}; }

class Printer final : public ChainForks {
 public:
  XLA_FFI_Error* Fork() override { return Print("fork"); }
  XLA_FFI_Error* Begin() override { return Print("begin"); }
  XLA_FFI_Error* Join() override { return Print("join"); }
  const XLA_FFI_Api* api() const override { return side_api; }

 private:
  static XLA_FFI_Error* Print(const char* word) {
    std::printf("%s ", word);
    return nullptr;
  }
};

}  // namespace

int main(int count, char** arguments) {
  const int calls = count - 2;
  const std::vector<NamedHandler> handlers = {
      {"succeed", Succeed}, {"fail", Fail}, {"ignore", Ignore}, {"run_in_part", RunInPart}};
  XLA_FFI_Api api = {}, other = {};
  api.XLA_FFI_Error_Create = other.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_Destroy = other.XLA_FFI_Error_Destroy = DestroyError;
  side_api = &other;
  XLA_FFI_Attrs empty = {};
  std::vector<std::vector<int64_t>> numbers(calls);
  std::vector<XLA_FFI_Array> arrays(calls);
  std::vector<XLA_FFI_ByteSpan> names(calls);
  std::vector<XLA_FFI_AttrType> types;
  std::vector<void*> values;
  for (int i = 0; i < calls; ++i) {
    const std::string flags = arguments[i + 2];
    numbers[i] = {0, 0, std::atoi(flags.c_str())};
    arrays[i] = {XLA_FFI_DataType_S64, numbers[i].size(), numbers[i].data()};
    const char mark = flags.back();
    const int handler = mark == '!' ? 1 : mark == '?' ? 2 : mark == '%' ? 3 : 0;
    const std::string_view name = handlers[handler].name;
    names[i] = {name.data(), name.size()};
    for (const XLA_FFI_AttrType type :
         {XLA_FFI_AttrType_DICTIONARY, XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_STRING}) {
      types.push_back(type);
    }
    for (void* value : {static_cast<void*>(&empty), static_cast<void*>(&arrays[i]),
                        static_cast<void*>(&names[i])}) {
      values.push_back(value);
    }
  }
  XLA_FFI_CallFrame frame = {};
  frame.api = &api;
  frame.attrs.size = static_cast<int64_t>(types.size());
  frame.attrs.types = types.data();
  frame.attrs.attrs = values.data();
  Printer printer;
  const bool forks = std::string(arguments[1]) == "forks";
  XLA_FFI_Error* error = RunCallChain(&frame, handlers, forks ? &printer : nullptr);
  std::printf("%s\n", error == nullptr ? "done" : error->message.c_str());
  delete error;
}
